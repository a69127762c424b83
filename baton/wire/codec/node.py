"""The codecs of the messages between routers and nodes and between nodes, to Protocol Buffers and back."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import InvalidRequest, TransferCause
from baton.messages.adapters import AdapterList, AdapterReport
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVCacheUpdate, Tier
from baton.messages.node import (
    Abort,
    Adopt,
    LoadReport,
    MoveOut,
    NodeDescription,
    Outcome,
    RequestDelta,
    Role,
    RouterMessage,
    StageTimings,
    StepFigures,
    StepReport,
    Submit,
    WatchKVCache,
)
from baton.messages.node_model import in_order, known_capabilities
from baton.messages.node_report import (
    FailedProbe,
    HandoffReport,
    HandoffSide,
    NodeReport,
    OpenHandoff,
    ProbeFault,
    TraceEvent,
    TraceStep,
)
from baton.messages.request_spec import RequestSpec
from baton.messages.spans import RowsRequest
from baton.messages.speculation import DraftCounts
from baton.model_formats.adapters import AdapterInfo
from baton.v1 import encoder_rows_pb2 as pb
from baton.v1 import node_pb2 as node
from baton.wire.codec.derived import Codec, FieldConversion, OneOfCodec, enum_numbers
from baton.wire.codec.sampling import SAMPLING_PARAMS, logprobs_from_pb, logprobs_to_pb

_TIERS: dict[Tier, node.KVCacheTier] = {
    "device": node.KV_CACHE_TIER_DEVICE,
    "host": node.KV_CACHE_TIER_HOST,
    "encoder": node.KV_CACHE_TIER_ENCODER,
}
_TIER_NAMES: dict[int, Tier] = {number: tier for tier, number in _TIERS.items()}
_ROLES: Mapping[Role, node.Role] = enum_numbers((Role.PREFILL, Role.DECODE, Role.ENCODE), node.Role.DESCRIPTOR)
_ROLE_NAMES = {value: role for role, value in _ROLES.items()}
_OUTCOMES = {None: node.OUTCOME_UNSPECIFIED} | enum_numbers(Outcome, node.Outcome.DESCRIPTOR)
_OUTCOME_NAMES = {value: outcome for outcome, value in _OUTCOMES.items()}
_TRANSFER_CAUSES = {None: node.TRANSFER_CAUSE_UNSPECIFIED} | enum_numbers(TransferCause, node.TransferCause.DESCRIPTOR)
_TRANSFER_CAUSE_NAMES = {value: cause for cause, value in _TRANSFER_CAUSES.items()}
LOAD = Codec(LoadReport, node.LoadReport)
STEP_FIGURES = Codec(StepFigures, node.StepFigures)
TRACE_EVENT = Codec(TraceEvent, node.TraceEvent)
TRACE_STEP = Codec(TraceStep, node.TraceStep)
_TIMINGS = Codec(StageTimings, node.StageTimings)
ADAPTER_INFO = Codec(AdapterInfo, node.InspectAdapterResponse)
_ADAPTER_REPORT = Codec(AdapterReport, node.AdapterReport)
_DRAFT_COUNTS = Codec(DraftCounts, node.DraftCounts)
_SPEC = Codec(
    RequestSpec,
    node.Submit,
    FieldConversion("prompt_token_ids", read=list),
    nested=(SAMPLING_PARAMS,),
    is_inlined=True,
)
_SUBMIT = Codec(Submit, node.Submit, inlined={"spec": _SPEC})
_ROUTER_MESSAGES: OneOfCodec[RouterMessage, node.AttachRequest] = OneOfCodec(
    node.AttachRequest,
    _SUBMIT,
    Codec(Abort, node.Abort),
    Codec(Adopt, node.Adopt),
    Codec(WatchKVCache, node.WatchKVCache),
    Codec(AdapterList, node.AdapterList),
    Codec(MoveOut, node.MoveOut),
)
_SIDES = set(enum_numbers(HandoffSide, node.HandoffSide.DESCRIPTOR).values())
_OPEN = Codec(OpenHandoff, node.OpenHandoff)
_FAULTS = set(enum_numbers(ProbeFault, node.ProbeFault.DESCRIPTOR).values())
_FAILED_PROBE = Codec(FailedProbe, node.FailedProbe)
READ_ROWS = Codec(RowsRequest, pb.ReadRowsRequest)


def kv_update_to_pb(update: KVCacheUpdate) -> node.KVCacheUpdate:
    """The message of an update. It leaves out the token ids: routers look up prompts by their hashes."""
    return node.KVCacheUpdate(
        first_sequence=update.first_sequence,
        next_sequence=update.next_sequence,
        restart=update.restart,
        events=[_event_to_pb(event) for event in update.events],
    )


def kv_update_from_pb(pb: node.KVCacheUpdate) -> KVCacheUpdate:
    """The update in a message, without events of a kind or tier that this version does not know."""
    events = [event for event in map(_event_from_pb, pb.events) if event is not None]
    return KVCacheUpdate(pb.first_sequence, pb.next_sequence, events, pb.restart)


def _event_to_pb(event: KVCacheEvent) -> node.KVCacheEvent:
    match event:
        case BlockStored(hashes, parent, _, group, tier):
            stored = node.BlockStored(block_hashes=hashes, parent_block_hash=parent, group=group, tier=_TIERS[tier])
            return node.KVCacheEvent(block_stored=stored)
        case BlockRemoved(hashes, tier):
            return node.KVCacheEvent(block_removed=node.BlockRemoved(block_hashes=hashes, tier=_TIERS[tier]))
        case AllBlocksCleared():
            return node.KVCacheEvent(all_blocks_cleared=node.AllBlocksCleared())


def _event_from_pb(pb: node.KVCacheEvent) -> KVCacheEvent | None:
    match pb.WhichOneof("event"):
        case "block_stored" if pb.block_stored.tier in _TIER_NAMES:
            stored = pb.block_stored
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            hashes = tuple(stored.block_hashes)
            return BlockStored(hashes, parent, group=stored.group, tier=_TIER_NAMES[stored.tier])
        case "block_removed" if pb.block_removed.tier in _TIER_NAMES:
            removed = pb.block_removed
            return BlockRemoved(tuple(removed.block_hashes), _TIER_NAMES[removed.tier])
        case "all_blocks_cleared":
            return AllBlocksCleared()
    return None


def role_to_pb(role: Role) -> node.Role:
    return _ROLES[role]


def role_from_pb(pb: node.Role) -> Role:
    """Raises InvalidRequest for a role that nodes do not have."""
    if pb not in _ROLE_NAMES:
        raise InvalidRequest("role", f"a node can't have the role with number {pb}")
    return _ROLE_NAMES[pb]


def transfer_cause_to_pb(cause: TransferCause | None) -> node.TransferCause:
    return _TRANSFER_CAUSES[cause]


def transfer_cause_from_pb(pb: node.TransferCause) -> TransferCause | None:
    """The cause; None if there is none, or if only a newer version knows it."""
    return _TRANSFER_CAUSE_NAMES.get(pb)


def attempt_to_pb(key: AttemptKey) -> node.Attempt:
    return node.Attempt(request_id=key.request_id, attempt=key.attempt, flight=key.flight)


def attempt_from_pb(pb: node.Attempt) -> AttemptKey:
    return AttemptKey(pb.request_id, pb.attempt, pb.flight)


NODE_DESCRIPTION = Codec(
    NodeDescription,
    node.NodeDescription,
    FieldConversion("role", role_to_pb, role_from_pb),
    FieldConversion("capabilities", in_order, known_capabilities),
    FieldConversion("on_transfer_failure", read=lambda policy: policy or "reroute"),
)


def router_message_to_pb(message: RouterMessage) -> node.AttachRequest:
    """A router's message on the stream to a node."""
    return _ROUTER_MESSAGES.to_pb(message)


def router_message_from_pb(pb: node.AttachRequest) -> RouterMessage:
    """A message that came from a router. Raises InvalidRequest for one that this version does not know."""
    message = _ROUTER_MESSAGES.from_pb(pb)
    if message is None:
        kind = pb.WhichOneof("message")
        raise InvalidRequest(
            "message", f"expected submit, abort, watch_kv_cache, adopt, adapters or move_out, got {kind}"
        )
    return message


def report_to_pb(report: StepReport) -> node.StepReport:
    """The message of one engine step's report."""
    deltas = [
        node.RequestDelta(
            attempt=attempt_to_pb(delta.attempt),
            first_index=delta.first_index,
            token_ids=delta.token_ids,
            logprobs=logprobs_to_pb(delta.logprobs),
            outcome=_OUTCOMES[delta.outcome],
            stop_token_id=delta.stop_token_id,
            # Routers of earlier versions read the field from the error.
            error=f"{delta.error_field}: {delta.error}" if delta.error_field else delta.error,
            error_field=delta.error_field,
            timings=_TIMINGS.to_pb(delta.timings) if delta.timings is not None else None,
            sequence_index=delta.sequence_index,
            transfer_cause=transfer_cause_to_pb(delta.transfer_cause),
            embedding=delta.embedding,
            takeover=delta.takeover,
            prompt_logprobs=logprobs_to_pb(delta.prompt_logprobs),
            draft_counts=_DRAFT_COUNTS.to_pb(delta.draft_counts) if delta.draft_counts is not None else None,
            prompt_timings=_TIMINGS.to_pb(delta.prompt_timings) if delta.prompt_timings is not None else None,
        )
        for delta in report.deltas
    ]
    kv_cache = kv_update_to_pb(report.kv_cache) if report.kv_cache is not None else None
    return node.StepReport(
        deltas=deltas,
        load=LOAD.to_pb(report.load),
        kv_cache=kv_cache,
        notice=report.notice,
        step=STEP_FIGURES.to_pb(report.step) if report.step is not None else None,
        adapters=_ADAPTER_REPORT.to_pb(report.adapters) if report.adapters is not None else None,
    )


def _field_and_reason(pb: node.RequestDelta) -> tuple[str, str]:
    """The field that a refusal is about, and its reason. Nodes of earlier versions say the field in the error alone."""
    if field := pb.error_field:
        return field, pb.error.removeprefix(f"{field}: ")
    field, _, reason = pb.error.partition(": ")
    return field, reason


def _delta_from_pb(pb: node.RequestDelta) -> RequestDelta:
    """The delta in a message. Fields that are not set are not read, to be fast: there is a delta for each token."""
    token_ids, logprobs = list(pb.token_ids), pb.logprobs
    delta = RequestDelta(
        attempt_from_pb(pb.attempt),
        pb.first_index,
        token_ids,
        logprobs_from_pb(logprobs) if logprobs else (),
        sequence_index=pb.sequence_index,
    )
    if pb.outcome:
        delta.outcome = _OUTCOME_NAMES.get(pb.outcome, Outcome.ERROR)
        delta.stop_token_id = pb.stop_token_id if pb.HasField("stop_token_id") else None
        delta.error = pb.error
        if delta.outcome is Outcome.INVALID:
            delta.error_field, delta.error = _field_and_reason(pb)
        delta.transfer_cause = transfer_cause_from_pb(pb.transfer_cause)
        delta.embedding = pb.embedding
        delta.takeover = pb.takeover
    if prompt_logprobs := pb.prompt_logprobs:
        delta.prompt_logprobs = logprobs_from_pb(prompt_logprobs)
    if pb.HasField("timings"):
        delta.timings = _TIMINGS.from_pb(pb.timings)
        if pb.HasField("prompt_timings"):
            delta.prompt_timings = _TIMINGS.from_pb(pb.prompt_timings)
    if pb.HasField("draft_counts"):
        delta.draft_counts = _DRAFT_COUNTS.from_pb(pb.draft_counts)
    return delta


def report_from_pb(pb: node.StepReport) -> StepReport:
    """The report in a message, without its next tokens, which `report_stream` reads.

    An outcome that only a newer version knows counts as an error, never as progress.
    """
    deltas = [_delta_from_pb(delta) for delta in pb.deltas]
    kv_cache = kv_update_from_pb(pb.kv_cache) if pb.HasField("kv_cache") else None
    notice = pb.notice if pb.HasField("notice") else None
    step = STEP_FIGURES.from_pb(pb.step) if pb.HasField("step") else None
    adapters = _ADAPTER_REPORT.from_pb(pb.adapters) if pb.HasField("adapters") else None
    return StepReport(deltas, LOAD.from_pb(pb.load), kv_cache, notice, step, adapters)


_HANDOFF = Codec(
    HandoffReport,
    node.HandoffReport,
    # Hand-offs with a side that only a newer version knows are left out.
    FieldConversion("open", read=lambda pbs: tuple([_OPEN.from_pb(pb) for pb in pbs if pb.side in _SIDES])),
    FieldConversion(
        "failed_probes", read=lambda pbs: tuple([_FAILED_PROBE.from_pb(pb) for pb in pbs if pb.fault in _FAULTS])
    ),
)
NODE_REPORT = Codec(
    NodeReport,
    node.DescribeResponse,
    nested=(NODE_DESCRIPTION, _HANDOFF),
)
