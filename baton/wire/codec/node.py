"""What routers and nodes say: messages to Protocol Buffers and back."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import InvalidRequest, TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import (
    Abort,
    Adopt,
    KVSource,
    Leg,
    LoadReport,
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
from baton.messages.node_report import TraceEvent, TraceStep
from baton.v1 import node_pb2 as node
from baton.wire.codec.enums import numbers
from baton.wire.codec.kv_cache import kv_update_from_pb, kv_update_to_pb
from baton.wire.codec.sampling import logprobs_from_pb, logprobs_to_pb, sampling_from_pb, sampling_to_pb

_ROLES: Mapping[Role, node.Role] = numbers((Role.PREFILL, Role.DECODE), node.Role)
_ROLE_NAMES = {value: role for role, value in _ROLES.items()}
_LEGS = numbers(Leg, node.Leg)
_LEG_NAMES = {value: leg for leg, value in _LEGS.items()}
_OUTCOMES = {None: node.OUTCOME_UNSPECIFIED} | numbers(Outcome, node.Outcome)
_OUTCOME_NAMES = {value: outcome for outcome, value in _OUTCOMES.items()}
_TRANSFER_CAUSES = {None: node.TRANSFER_CAUSE_UNSPECIFIED} | numbers(TransferCause, node.TransferCause)
_TRANSFER_CAUSE_NAMES = {value: cause for cause, value in _TRANSFER_CAUSES.items()}


def role_to_pb(role: Role) -> node.Role:
    return _ROLES[role]


def role_from_pb(pb: node.Role) -> Role:
    """Raises InvalidRequest for one that no node has."""
    if pb not in _ROLE_NAMES:
        raise InvalidRequest("role", f"{pb} is no role of a node")
    return _ROLE_NAMES[pb]


def transfer_cause_to_pb(cause: TransferCause | None) -> node.TransferCause:
    return _TRANSFER_CAUSES[cause]


def transfer_cause_from_pb(pb: node.TransferCause) -> TransferCause | None:
    """None for none, and for one of a newer version."""
    return _TRANSFER_CAUSE_NAMES.get(pb)


def attempt_to_pb(key: AttemptKey) -> node.Attempt:
    return node.Attempt(request_id=key.request_id, attempt=key.attempt, flight=key.flight)


def attempt_from_pb(pb: node.Attempt) -> AttemptKey:
    return AttemptKey(pb.request_id, pb.attempt, pb.flight)


def router_message_to_pb(message: RouterMessage) -> node.AttachRequest:
    """Work for a node."""
    if isinstance(message, Abort):
        abort = node.Abort(
            attempt=attempt_to_pb(message.attempt),
            reason=message.reason,
            sequence_index=message.sequence_index,
            takeover=message.takeover,
        )
        return node.AttachRequest(abort=abort)
    if isinstance(message, WatchKVCache):
        return node.AttachRequest(watch_kv_cache=node.WatchKVCache())
    if isinstance(message, Adopt):
        attempt = attempt_to_pb(message.attempt)
        return node.AttachRequest(
            adopt=node.Adopt(attempt=attempt, takeover=message.takeover, num_tokens=message.num_tokens)
        )
    submit = node.Submit(
        attempt=attempt_to_pb(message.attempt),
        leg=_LEGS[message.leg],
        prompt_token_ids=message.prompt_token_ids,
        sampling_params=sampling_to_pb(message.sampling_params),
        priority=message.priority,
        cache_salt=message.cache_salt,
        output_token_ids=message.output_token_ids,
        traceparent=message.traceparent,
        takeover=message.takeover,
    )
    if message.kv_source is not None:
        source = message.kv_source
        submit.kv_source.CopyFrom(
            node.Peer(node_id=source.node_id, incarnation=source.incarnation, address=source.address)
        )
    return node.AttachRequest(submit=submit)


def router_message_from_pb(pb: node.AttachRequest) -> RouterMessage:
    """Work from a router; raises InvalidRequest for what can't be meant."""
    kind = pb.WhichOneof("message")
    if kind == "abort":
        index = pb.abort.sequence_index if pb.abort.HasField("sequence_index") else None
        return Abort(attempt_from_pb(pb.abort.attempt), pb.abort.reason, index, pb.abort.takeover)
    if kind == "watch_kv_cache":
        return WatchKVCache()
    if kind == "adopt":
        return Adopt(attempt_from_pb(pb.adopt.attempt), pb.adopt.takeover, tuple(pb.adopt.num_tokens))
    if kind != "submit":
        raise InvalidRequest("message", f"expected submit, abort, watch_kv_cache or adopt, got {kind}")
    submit = pb.submit
    if submit.leg not in _LEG_NAMES:
        raise InvalidRequest("submit.leg", "unknown leg")
    source = None
    if submit.HasField("kv_source"):
        peer = submit.kv_source
        source = KVSource(peer.node_id, peer.incarnation, peer.address)
    return Submit(
        attempt=attempt_from_pb(submit.attempt),
        leg=_LEG_NAMES[submit.leg],
        prompt_token_ids=list(submit.prompt_token_ids),
        sampling_params=sampling_from_pb(submit.sampling_params),
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        kv_source=source,
        output_token_ids=tuple(submit.output_token_ids),
        traceparent=submit.traceparent,
        takeover=submit.takeover,
    )


def description_to_pb(description: NodeDescription) -> node.NodeDescription:
    return node.NodeDescription(
        node_id=description.node_id,
        incarnation=description.incarnation,
        role=_ROLES[description.role],
        address=description.address,
        pid=description.pid,
        version=description.version,
        model=description.model,
        model_fingerprint=description.model_fingerprint,
        dtype=description.dtype,
        numerics=description.numerics,
        bit_exact=description.bit_exact,
        vocab_size=description.vocab_size,
        max_model_len=description.max_model_len,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        eos_token_ids=sorted(description.eos_token_ids),
        on_transfer_failure=description.on_transfer_failure,
        kv_layout=description.kv_layout,
        block_bytes=description.block_bytes,
        max_num_seqs=description.max_num_seqs,
        max_num_batched_tokens=description.max_num_batched_tokens,
        link_protocol=description.link_protocol,
        embedding_size=description.embedding_size,
    )


def description_from_pb(pb: node.NodeDescription) -> NodeDescription:
    """Raises InvalidRequest for a role that this version does not know."""
    if pb.role not in _ROLE_NAMES:
        raise InvalidRequest("role", f"node {pb.node_id} has a role this version does not know")
    return NodeDescription(
        node_id=pb.node_id,
        incarnation=pb.incarnation,
        role=_ROLE_NAMES[pb.role],
        address=pb.address,
        pid=pb.pid,
        version=pb.version,
        model=pb.model,
        model_fingerprint=pb.model_fingerprint,
        dtype=pb.dtype,
        numerics=pb.numerics,
        bit_exact=pb.bit_exact,
        vocab_size=pb.vocab_size,
        max_model_len=pb.max_model_len,
        block_size=pb.block_size,
        num_blocks=pb.num_blocks,
        eos_token_ids=frozenset(pb.eos_token_ids),
        on_transfer_failure=pb.on_transfer_failure or "reroute",
        kv_layout=pb.kv_layout,
        block_bytes=pb.block_bytes,
        max_num_seqs=pb.max_num_seqs,
        max_num_batched_tokens=pb.max_num_batched_tokens,
        link_protocol=pb.link_protocol,
        embedding_size=pb.embedding_size,
    )


def load_to_pb(load: LoadReport) -> node.LoadReport:
    return node.LoadReport(
        running=load.running,
        waiting=load.waiting,
        waiting_for_remote_kvs=load.waiting_for_remote_kvs,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        leased_blocks=load.leased_blocks,
        quarantined_blocks=load.quarantined_blocks,
        draining=load.draining,
        uncomputed_tokens=load.uncomputed_tokens,
        context_tokens=load.context_tokens,
    )


def load_from_pb(pb: node.LoadReport) -> LoadReport:
    return LoadReport(
        running=pb.running,
        waiting=pb.waiting,
        waiting_for_remote_kvs=pb.waiting_for_remote_kvs,
        total_blocks=pb.total_blocks,
        free_blocks=pb.free_blocks,
        leased_blocks=pb.leased_blocks,
        quarantined_blocks=pb.quarantined_blocks,
        draining=pb.draining,
        uncomputed_tokens=pb.uncomputed_tokens,
        context_tokens=pb.context_tokens,
    )


def _timings_to_pb(timings: StageTimings | None) -> node.StageTimings | None:
    if timings is None:
        return None
    return node.StageTimings(
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        transfer_ms=timings.transfer_ms,
        cached_tokens=timings.cached_tokens,
        external_tokens=timings.external_tokens,
        kv_bytes=timings.kv_bytes,
        intake_ms=timings.intake_ms,
        decode_ms=timings.decode_ms,
    )


def _timings_from_pb(pb: node.StageTimings) -> StageTimings:
    return StageTimings(
        queue_ms=pb.queue_ms,
        prefill_ms=pb.prefill_ms,
        transfer_ms=pb.transfer_ms,
        cached_tokens=pb.cached_tokens,
        external_tokens=pb.external_tokens,
        kv_bytes=pb.kv_bytes,
        intake_ms=pb.intake_ms,
        decode_ms=pb.decode_ms,
    )


def _step_to_pb(step: StepFigures | None) -> node.StepFigures | None:
    if step is None:
        return None
    return node.StepFigures(
        step_ms=step.step_ms,
        prefill_tokens=step.prefill_tokens,
        decode_sequences=step.decode_sequences,
        decode_context_tokens=step.decode_context_tokens,
    )


def _step_from_pb(pb: node.StepFigures) -> StepFigures:
    return StepFigures(pb.step_ms, pb.prefill_tokens, pb.decode_sequences, pb.decode_context_tokens)


def report_to_pb(report: StepReport) -> node.StepReport:
    """One engine step's news."""
    deltas = [
        node.RequestDelta(
            attempt=attempt_to_pb(delta.attempt),
            first_index=delta.first_index,
            token_ids=delta.token_ids,
            logprobs=logprobs_to_pb(delta.logprobs),
            outcome=_OUTCOMES[delta.outcome],
            stop_token_id=delta.stop_token_id,
            error=delta.error,
            timings=_timings_to_pb(delta.timings),
            sequence_index=delta.sequence_index,
            transfer_cause=transfer_cause_to_pb(delta.transfer_cause),
            embedding=delta.embedding,
            takeover=delta.takeover,
        )
        for delta in report.deltas
    ]
    kv_cache = kv_update_to_pb(report.kv_cache) if report.kv_cache is not None else None
    return node.StepReport(
        deltas=deltas,
        load=load_to_pb(report.load),
        kv_cache=kv_cache,
        notice=report.notice,
        step=_step_to_pb(report.step),
    )


def _delta_from_pb(pb: node.RequestDelta) -> RequestDelta:
    """What it does not need costs nothing."""
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
        delta.transfer_cause = transfer_cause_from_pb(pb.transfer_cause)
        delta.embedding = pb.embedding
        delta.takeover = pb.takeover
    if pb.HasField("timings"):
        delta.timings = _timings_from_pb(pb.timings)
    return delta


def report_from_pb(pb: node.StepReport) -> StepReport:
    """One engine step's news, without its next tokens: those are for `report_stream`. An outcome of a newer version
    counts as an error, never as going on.
    """
    deltas = [_delta_from_pb(delta) for delta in pb.deltas]
    kv_cache = kv_update_from_pb(pb.kv_cache) if pb.HasField("kv_cache") else None
    notice = pb.notice if pb.HasField("notice") else None
    step = _step_from_pb(pb.step) if pb.HasField("step") else None
    return StepReport(deltas, load_from_pb(pb.load), kv_cache, notice, step)


def trace_to_pb(event: TraceEvent) -> node.TraceEvent:
    return node.TraceEvent(
        seq=event.seq,
        monotonic_ns=event.monotonic_ns,
        name=event.name,
        attempt=attempt_to_pb(event.attempt),
        value=event.value,
        detail=event.detail,
    )


def trace_step_to_pb(step: TraceStep) -> node.TraceStep:
    return node.TraceStep(
        seq=step.seq,
        monotonic_ns=step.monotonic_ns,
        figures=_step_to_pb(step.figures),
        goes_on=step.goes_on,
    )


def trace_step_from_pb(pb: node.TraceStep) -> TraceStep:
    return TraceStep(pb.seq, pb.monotonic_ns, _step_from_pb(pb.figures), pb.goes_on)


def trace_from_pb(pb: node.TraceEvent) -> TraceEvent:
    return TraceEvent(pb.seq, pb.monotonic_ns, pb.name, attempt_from_pb(pb.attempt), pb.value, pb.detail)
