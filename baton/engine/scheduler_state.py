"""The state that the parts of the scheduler share: live requests, running requests, blocks, and how a request ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.clock import Clock
from baton.engine.batch import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, Failure
from baton.engine.connector import BlockFate, KVConnector
from baton.engine.decode_set import DecodeSet
from baton.engine.encoder_cache import EncoderCache
from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.events import KVSnapshot
from baton.engine.kv_cache.host_tier import HostTier
from baton.engine.kv_cache.manager import KVCacheManager
from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.sequences.beams import BeamGroup
from baton.engine.sequences.sequence_group import SequenceGroup
from baton.engine.stats import EngineCounters
from baton.engine.step_plan import StepPlan
from baton.engine.stopping import max_output_tokens
from baton.errors import InvalidRequest, TransferCause
from baton.messages.kv_cache import BlockRemoved, BlockStored, Tier
from baton.messages.node import Leg, Outcome
from baton.messages.sampling import TokenLogprobs
from baton.messages.spans import rows_key


def failure_of(error: Exception) -> tuple[Outcome, Failure]:
    """How a request ends that failed with this error, and what is told of it."""
    if isinstance(error, InvalidRequest):
        return Outcome.INVALID, error.not_raised()
    return Outcome.ERROR, str(error)


class EventLog:
    """A bounded list of events: when it is full the oldest events are dropped and counted."""

    def __init__(self, clock: Clock, capacity: int = 65536) -> None:
        self.is_recording = True
        """Whether the log has a reader; without one nothing is recorded."""
        self._clock = clock
        self._events: deque[EngineCoreEvent] = deque(maxlen=capacity)
        self.num_lost = 0

    def record(self, type: EngineCoreEventType, request: Request, value: int = 0) -> None:
        """Append one event with the clock's present time."""
        if not self.is_recording:
            return
        self.num_lost += len(self._events) == self._events.maxlen
        self._events.append(
            EngineCoreEvent(type, request.attempt, self._clock.monotonic(), value, request.sequence_index)
        )

    def take(self) -> list[EngineCoreEvent]:
        """All events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events


class OutputsByClient:
    """Collects the outputs of one call of the scheduler, by client index."""

    def __init__(self) -> None:
        self._by_client: dict[int, list[EngineCoreOutput]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def add(self, client_index: int, output: EngineCoreOutput) -> None:
        """Append one output for a client."""
        outputs = self._by_client.get(client_index)
        if outputs is None:
            self._by_client[client_index] = [output]
        else:
            outputs.append(output)

    def for_client(self, client_index: int) -> list[EngineCoreOutput]:
        """The list to which a client's outputs are to be appended."""
        return self._by_client.setdefault(client_index, [])

    def seal(self) -> EngineCoreOutputs:
        """All outputs by client index, without clients that have none."""
        if not self._by_client:
            return {}
        return {index: outputs for index, outputs in self._by_client.items() if outputs}


class SchedulerState:
    """What admission, preemption, scheduling and committing share. Only they write to it, from one thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        key_fields: CacheKeyFields,
        clock: Clock,
        connector: KVConnector,
        decodes: DecodeSet,
    ) -> None:
        self.config = config
        self.max_model_len = config.effective_max_model_len
        self._max_shared_len = config.max_shared_len
        self.requests: dict[str, Request] = {}
        """Every request that has not ended."""
        self.groups: dict[str, SequenceGroup] = {}
        """Requests of several sequences of which at least one has not ended, by the request's id."""
        self.beams: dict[str, BeamGroup] = {}
        """Beam searches that are not over, by the request's id."""
        self.failed_groups: list[tuple[SequenceGroup | BeamGroup, Request]] = []
        """Groups of which one sequence, the request beside it, has failed: the other sequences must be ended, too."""
        self.running: list[Request] = []
        """Running requests, in order of admission."""
        self.filling: list[Request] = []
        """Running requests that don't decode yet: some of their known tokens are still to be computed."""
        self.speculating: dict[str, Request] = {}
        """The requests in `filling` that had drafts in the last step, or have some for the next one."""
        self.decodes = decodes
        """Running requests that decode."""
        self.kv_cache_manager = KVCacheManager(
            BlockPool(config.num_blocks),
            BlockHasher(key_fields, config.block_size),
            config.block_size,
            windows=config.windows,
            keeps_states=config.keeps_states,
            enable_caching=config.enable_prefix_caching,
            host=HostTier(config.num_host_blocks) if config.num_host_blocks else None,
        )
        self.encoder_cache = EncoderCache(config.num_encoder_rows, self._note_rows)
        self.connector = connector
        self.clock = clock
        self.events = EventLog(clock)
        self.counters = EngineCounters()
        self.begun_loads: list[Request] = []
        """Requests whose KV began to come from another node while this step was decided."""
        self._finished_req_ids: set[str] = set()
        self._running_has_ended = False
        """Whether `running` may have requests that don't run any more."""
        self.is_step_in_flight = False
        """Whether a step runs beside the one that is committed, which writes to blocks of running requests."""
        self.moving: dict[str, Request] = {}
        """The requests that are moved to other nodes, by id."""
        self.parked: dict[str, Request] = {}
        """Computed beams. They keep their blocks for the beams that continue them, until the next step is decided."""

    def end(
        self,
        request: Request,
        outcome: Outcome,
        outputs: OutputsByClient,
        *,
        stop_reason: int | None = None,
        error: Failure | None = None,
        transfer_cause: TransferCause | None = None,
        first_index: int | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        embedding: bytes = b"",
    ) -> None:
        """End a request: free, lease or quarantine its blocks, and write its last output.

        The caller removes it from the queue in which it waits; `remove_ended` removes it from the running requests.
        `transfer_cause`: why the prompt's KV did not arrive, where that is the reason.
        `first_index`: output index of the first token that this output has; None: the output has only those tokens that
        are not reported yet (`Request.num_unreported`).
        """
        transferring = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        request.end(outcome)
        request.stop_reason = stop_reason
        request.error = error
        self._settle_blocks(request, transferring)
        self.encoder_cache.drop(request.request_id, request.encoder_inputs)
        del self.requests[request.request_id]
        self.decodes.leave(request.request_id)
        self.speculating.pop(request.request_id, None)
        self.moving.pop(request.request_id, None)
        self._finished_req_ids.add(request.request_id)
        self._running_has_ended = True
        if request.group is not None:
            self._leave_group(request, request.group)
        beams = request.beams
        if beams is not None:
            if not self._leave_beams(request, beams):
                return
            request = beams.root
        self.events.record(EngineCoreEventType.FINISHED, request, request.num_output_tokens)
        if first_index is None:
            first_index = request.num_output_tokens - request.num_unreported
            logprobs = request.last_logprobs
        self.emit(
            request,
            first_index,
            logprobs,
            outputs,
            outcome=outcome,
            error=error,
            transfer_cause=transfer_cause,
            embedding=embedding,
        )

    def end_move(self, request: Request, why: str) -> None:
        """Let a request that is moved go on here."""
        move, request.move, request.seen_from = request.move, None, 0
        del self.moving[request.request_id]
        if move is not None:
            self.connector.move_ended(request.request_id, move.to, why)

    def fail(self, request: Request, error: Failure, outputs: OutputsByClient) -> None:
        """End a request that failed: INVALID where the request is at fault, and would fail on every node."""
        self.end(request, Outcome.INVALID if isinstance(error, InvalidRequest) else Outcome.ERROR, outputs, error=error)

    def park(self, request: Request) -> None:
        """Let a request that has computed its beam give up its seat. It runs again only as the heir of that beam."""
        request.transition(RequestEvent.BEAM_COMPUTED)
        del self.requests[request.request_id]
        self.parked[request.request_id] = request
        self._running_has_ended = True

    def end_computed_beams(self, beams: BeamGroup) -> None:
        """End computed beams that have no heir, without an output. Their blocks can be shared until `free_parked`."""
        for request in beams.computed:
            request.end(Outcome.STOP)
            self._settle_blocks(request, False, keep=True)
            self._finished_req_ids.add(request.request_id)
        beams.computed = []

    def free_parked(self, of: BeamGroup | None = None) -> bool:
        """Free the blocks of parked requests, unless they run again; `of`: only those of one beam search.

        Call it once all beams that can continue the parked ones have been admitted. Returns whether any were parked.
        """
        if not self.parked:
            return False
        parked = [request for request in self.parked.values() if of is None or request.beams is of]
        for request in parked:
            del self.parked[request.request_id]
            if request.status is not RequestStatus.RUNNING:
                self.kv_cache_manager.free(request.request_id)
                request.num_computed_tokens = 0
        return bool(parked)

    def end_beams(self, beams: BeamGroup, outputs: OutputsByClient) -> None:
        """End a beam search that is over, and write its best sequences as outputs."""
        self._end_computed_and_parked(beams)
        root, found = beams.root, beams.outputs()
        beams.is_closed = True
        del self.beams[root.request_id]
        self.events.record(EngineCoreEventType.FINISHED, root, len(found))
        if len(found) < beams.num_returned:
            error = (
                f"the beam search found {len(found)} of {beams.num_returned} sequences: the model offered too few "
                "continuations"
            )
            self.emit(root, 0, (), outputs, outcome=Outcome.ERROR, error=error)
            return
        for output in found:
            outputs.add(root.client_index, output)

    def live_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """All live sequences and beams of the requests that were submitted with these ids; unknown ids are skipped."""
        requests: dict[str, Request] = {}
        for request_id in request_ids:
            group = self.groups.get(request_id) or self.beams.get(request_id)
            request = self.requests.get(request_id)
            members = group.members if group is not None else [] if request is None else [request]
            requests.update((member.request_id, member) for member in members)
        return list(requests.values())

    def live_sequence(self, request_id: str, index: int) -> Request | None:
        """One of several sequences of a request, if it lives; there is none before they are forked."""
        group = self.groups.get(request_id)
        return group.member(index) if group is not None else None

    def end_after_connector_error(self, request: Request, exc: Exception, outputs: OutputsByClient) -> None:
        """End a request for which the connector raised an exception, so that it fails alone and the engine goes on."""
        self.counters.num_connector_errors += 1
        error, lost = f"the KV connector failed: {exc!r}", request.leg is Leg.DECODE
        outcome, cause = (Outcome.KV_LOST, TransferCause.REFUSED) if lost else (Outcome.ERROR, None)
        self.end(request, outcome, outputs, error=error, transfer_cause=cause)

    def num_encoded(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of the tokens [start, start + num_tokens) of a request can be computed now.

        See `EncoderCache.hold_for_chunk`.
        """
        if not request.encoder_inputs:
            return num_tokens
        return self.encoder_cache.hold_for_chunk(request.request_id, request.encoder_inputs, start, num_tokens)

    def move_to_decodes(self, plan: StepPlan) -> None:
        """Move requests whose last known token is computed in this step to the decodes, unless its token ends them."""
        for request in plan.requests:
            # A beam and a prefill leg end with the token that is computed now, and an embedding needs none.
            if (
                request.num_computed_tokens < request.num_tokens
                or request.request_id in plan.drafts
                or request.beams is not None
                or request.leg in (Leg.PREFILL, Leg.EMBED)
            ):
                continue
            num_to_come = self.most_output_tokens(request) - len(request.output_token_ids) - 1
            if num_to_come > 0:
                self.filling.remove(request)
                self.speculating.pop(request.request_id, None)
                self.decodes.join(request, self.kv_cache_manager.num_slots(request.request_id), num_to_come)

    def max_num_tokens(self, request: Request) -> int:
        """The most tokens that a request may have, prompt and output together."""
        params = request.sampling_params
        return self.max_model_len if params.n == 1 and not params.beam_width else self._max_shared_len

    def is_long(self, request: Request) -> bool:
        """Whether all positions of a request are to have the rotary angles of long sequences."""
        rule = self.config.long_sequences
        return rule is not None and rule.is_long(request.num_prompt_tokens, request.num_tokens)

    def most_output_tokens(self, request: Request) -> int:
        """The most output tokens of a request before it ends, or starts over as a long sequence."""
        most, rule = max_output_tokens(request, self.max_num_tokens(request)), self.config.long_sequences
        if rule is None or not rule.starts_over or request.is_long:
            return most
        return min(most, rule.most_short + 1 - request.num_prompt_tokens)

    def forget_short(self, request: Request) -> None:
        """Free the blocks of a request that starts over as a long sequence, and drop their keys."""
        self.kv_cache_manager.free(request.request_id)
        request.block_hashes = []
        request.num_computed_tokens = 0
        request.is_long = True

    def give_up_load(self, request: Request, num_valid_blocks: int, partly_filled: Sequence[int]) -> int:
        """Take the blocks of a request whose load is over. Returns how many of its leading tokens are cached now.

        `num_valid_blocks`, `partly_filled`: as in `LostKV`. The valid blocks hold KV, and nothing writes to them: they
        enter the prefix cache and are idle there, so that no request holds blocks while it waits for more. The other
        blocks are in no cache.
        """
        manager = self.kv_cache_manager
        # The draft model may be computing its tokens in these blocks.
        self._finished_req_ids.add(request.request_id)
        try:
            fate = self.connector.load_failed(request, manager.exchanged_block_ids(request))
        except Exception:
            self.counters.num_connector_errors += 1
            fate, num_valid_blocks = BlockFate.QUARANTINED, 0
        manager.note_partly_filled(request, partly_filled)
        num_stripes = manager.cache_valid(request, num_valid_blocks)
        # Groups with windows may have fewer: blocks that only the next query would see were never loaded.
        num_cached_tokens = manager.get_computed_blocks(request, with_host=False).num_tokens
        if fate is BlockFate.FREE:
            manager.free(request.request_id)
        else:
            manager.quarantine(request.request_id, num_stripes)
        return num_cached_tokens

    def kv_snapshot(self) -> KVSnapshot:
        """What the KV cache and the encoder cache have; from now on their changes are recorded. O(blocks)."""
        manager = self.kv_cache_manager
        manager.kv_events.is_recording = True
        keys: dict[Tier, frozenset[bytes]] = {"device": frozenset(manager.pool.keys)}
        if manager.host is not None:
            keys["host"] = frozenset(manager.host.pool.keys)
        if rows := frozenset(map(rows_key, self.encoder_cache.ready_digests)):
            keys["encoder"] = rows
        return KVSnapshot(keys, manager.kv_events.next_sequence)

    def _note_rows(self, digest: str, is_there: bool) -> None:
        log = self.kv_cache_manager.kv_events
        if log.is_recording:
            keys = (rows_key(digest),)
            log.record(BlockStored(keys, tier="encoder") if is_there else BlockRemoved(keys, "encoder"))

    def emit(
        self,
        request: Request,
        first_index: int,
        logprobs: Sequence[TokenLogprobs],
        outputs: OutputsByClient,
        *,
        outcome: Outcome | None = None,
        error: Failure | None = None,
        transfer_cause: TransferCause | None = None,
        embedding: bytes = b"",
    ) -> None:
        """Write an output with the request's tokens from `first_index` on. `outcome`: the request ended so."""
        new_token_ids = request.output_token_ids[first_index:]
        output = EngineCoreOutput(
            attempt=request.attempt,
            sequence_index=request.sequence_index,
            new_token_ids=new_token_ids,
            first_index=first_index,
            new_logprobs=logprobs[: len(new_token_ids)],
            outcome=outcome,
            stop_reason=request.stop_reason,
            error=error,
            transfer_cause=transfer_cause,
            num_cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens),
            num_external_tokens=request.num_external_tokens,
            embedding=embedding,
            prompt_logprobs=request.prompt_logprobs,
            draft_counts=request.draft_counts if request.has_new_draft_counts else None,
        )
        request.prompt_logprobs = ()
        request.has_new_draft_counts = False
        outputs.add(request.client_index, output)

    def remove_ended(self) -> None:
        """Remove requests that have ended or were parked since the last call from `running` and `filling`."""
        if self._running_has_ended:
            self._running_has_ended = False
            running = RequestStatus.RUNNING
            self.running = [request for request in self.running if request.status is running]
            if self.filling:
                self.filling = [request for request in self.filling if request.status is running]

    def take_finished_req_ids(self) -> frozenset[str]:
        """The ids of requests that ended since the last call."""
        if not self._finished_req_ids:
            return frozenset()
        finished, self._finished_req_ids = frozenset(self._finished_req_ids), set()
        return finished

    def report_finished_again(self, request_ids: frozenset[str]) -> None:
        """Report ends once more, since the step that reported them was lost and the runner may not know of them.

        Ids that have been given to new requests are left out: the runner replaces what it has under such an id.
        """
        self._finished_req_ids.update(request_ids - self.requests.keys())

    def _leave_beams(self, request: Request, beams: BeamGroup) -> bool:
        """End a beam search of which a beam failed or was aborted. Returns whether this beam is the first one."""
        self._end_computed_and_parked(beams)
        beams.members.remove(request)
        if beams.is_closed:
            return False
        beams.is_closed = True
        del self.beams[beams.request_id]
        self.failed_groups.append((beams, request))
        return True

    def _end_computed_and_parked(self, beams: BeamGroup) -> None:
        self.end_computed_beams(beams)
        self.free_parked(beams)

    def _leave_group(self, request: Request, group: SequenceGroup) -> None:
        group.leave(request)
        if not group.members:
            del self.groups[group.request_id]
        elif request.outcome is not None and not request.outcome.ends_one_sequence:
            self.failed_groups.append((group, request))

    def _settle_blocks(self, request: Request, transferring: bool, *, keep: bool = False) -> None:
        """Free, lease or quarantine a request's blocks, as the connector says; `keep`: leave freeing to the caller."""
        manager, request_id = self.kv_cache_manager, request.request_id
        try:
            fate = self.connector.request_finished(request, manager.exchanged_block_ids(request), transferring)
        except Exception:
            self.counters.num_connector_errors += 1
            # A peer or transfer may still access the blocks; losing them to the quarantine is better than wrong KV.
            is_read = request.leg is Leg.PREFILL or request.move is not None
            fate = BlockFate.QUARANTINED if transferring or is_read else BlockFate.FREE
        if fate is BlockFate.FREE:
            if not keep:
                manager.free(request_id)
        elif transferring:
            manager.quarantine(request_id)
        else:
            manager.lease(request_id)
