"""Decides what each step computes, and keeps the books of every request of one engine.

Where a request can be:

  waiting      in `_waiting`: WAITING (no blocks) or PREEMPTED (none any more)
  remote       in `_remote`: WAITING_FOR_REMOTE_KVS, all blocks of its prompt reserved, not polled
  arrived      in `_arrived`: its prompt's KV is here; joins the very next step, ahead of newcomers
  running      in `_running`, in order of admission
  ended        in none of them and not in `requests`; its blocks are free, leased or quarantined

Rules that keep it from wedging and from serving wrong KV:

  - Admission takes the blocks of everything the request has so far, all or nothing, though they are computed in
    chunks. Two half-admitted requests can't wait for each other, and a prompt tends to lie in one run of neighbours.
  - A load from elsewhere also reserves the slot of its first generated token, so an arrival never waits for blocks.
  - A prefill leg is never preempted: its blocks are offered while it runs, and a peer may be reading them. It never
    needs to be: it has all its blocks from the start.
  - Blocks enter the prefix cache at commit, when their KV is known to be there.
  - The oldest running request that can be preempted is preempted last: there is always progress.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection

from baton.clock import Clock
from baton.engine.block_hash import BlockHasher, CacheKeyFields
from baton.engine.block_pool import BlockPool
from baton.engine.connector import (
    NO_EXTERNAL_TOKENS,
    ArrivedKV,
    BlockFate,
    ExternalTokens,
    KVConnector,
    KVTransferOutput,
    NullConnector,
)
from baton.engine.event_log import EventLog
from baton.engine.kv_cache_manager import AllocationAnswer, ComputedBlocks, KVCacheManager
from baton.engine.outputs import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from baton.engine.request import Leg, Request, RequestStatus
from baton.engine.request_queue import FCFSRequestQueue, RequestQueue
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_plan import StepPlan
from baton.engine.stopping import check_stop
from baton.errors import DuplicateRequest

__all__ = ["Scheduler", "SchedulerConfig"]

_Outputs = dict[int, list[EngineCoreOutput]]
_IN_A_QUEUE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class _Admission(enum.Enum):
    """What became of a waiting request that was tried."""

    ADMITTED = enum.auto()
    """It runs, or waits with its blocks for remote KV."""
    ENDED = enum.auto()
    NO_BLOCKS = enum.auto()
    """Not enough free blocks now; a smaller one may fit."""
    STEP_FULL = enum.auto()
    """No seat or budget left: nobody behind it fits either."""
    ASK_AGAIN = enum.auto()
    """Its connector does not know yet."""


class Scheduler:
    """Called from one thread. Every request ends in exactly one output that has a finish reason."""

    def __init__(
        self, config: SchedulerConfig, key_fields: CacheKeyFields, clock: Clock, connector: KVConnector | None = None
    ) -> None:
        self.config = config
        self.max_model_len = config.effective_max_model_len
        self.requests: dict[str, Request] = {}
        """Every request that has not ended."""
        self.kv_cache_manager = KVCacheManager(
            BlockPool(config.num_blocks),
            BlockHasher(key_fields, config.block_size),
            config.block_size,
            enable_caching=config.enable_prefix_caching,
        )
        self.num_skipped_results = 0
        """Results of a step for requests that had ended or were never scheduled."""
        self.num_unknown_transfers = 0
        """Transfer reports for requests that did not wait for one."""
        self.num_connector_errors = 0
        self._connector = connector if connector is not None else NullConnector()
        self._events = EventLog(clock)
        self._waiting: RequestQueue = FCFSRequestQueue()
        self._remote: dict[str, Request] = {}
        self._arrived: deque[Request] = deque()
        self._running: list[Request] = []
        self._step = 0
        self._in_flight: dict[int, list[Request]] = {}
        self._pending: _Outputs = {}
        """Ends that `schedule` decided, until the step's outputs are handed out."""
        self._finished_req_ids: set[str] = set()
        self._times_passed: dict[str, int] = {}
        self._stalled = False
        """The last `schedule` could compute nothing, and nothing has happened since."""
        self._waiting_goes_first = False
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    # --- requests in and out ---

    def add_request(self, request: Request) -> None:
        """Queue a fresh request. DuplicateRequest: its id is live, or a transfer still holds blocks under it."""
        if request.request_id in self.requests or self.kv_cache_manager.holds(request.request_id):
            raise DuplicateRequest(f"request {request.request_id} is here already")
        self.requests[request.request_id] = request
        self._waiting.add(request)
        self._stalled = False
        self._events.record(EngineCoreEventType.QUEUED, request.request_id, request.num_prompt_tokens)

    def finish_requests(
        self, request_ids: Collection[str], status: RequestStatus, error: str | None = None
    ) -> dict[int, EngineCoreOutputs]:
        """End requests from outside, whatever they are doing; unknown ids are skipped. Returns their last outputs."""
        if not status.is_finished:
            raise ValueError(f"{status.name} ends nothing")
        ended = [self.requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self.requests]
        if not ended:
            return {}
        collected: _Outputs = {}
        queued = {request.request_id for request in ended if request.status in _IN_A_QUEUE}
        for request in ended:
            self._end(request, status, collected, error=error)
            self._remote.pop(request.request_id, None)
        if queued:
            self._waiting.remove_many(queued)
            self._arrived = deque(request for request in self._arrived if request.request_id not in queued)
        self._drop_ended_from_running()
        self._stalled = False
        return _sealed(collected)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, not running): what has not ended."""
        return len(self._running), len(self.requests) - len(self._running)

    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    def has_work(self) -> bool:
        """Whether a step could bring something now; when False, nothing will change until somebody calls in.

        A connector that answered "not known yet" wakes the scheduler with any `update_from_kv_transfer`.
        """
        return bool(self._running or self._arrived or self._pending or (len(self._waiting) and not self._stalled))

    def make_stats(self) -> SchedulerStats:
        """Load after a step, in O(1)."""
        pool = self.kv_cache_manager.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self.requests) - len(self._running),
            num_waiting_for_remote_kvs=len(self._remote),
            total_blocks=pool.num_total_blocks,
            free_blocks=pool.num_free_blocks,
            leased_blocks=pool.num_leased_blocks,
            quarantined_blocks=pool.num_quarantined_blocks,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False, and nothing changes, while any block is held."""
        return self.kv_cache_manager.pool.reset_prefix_cache()

    def take_events(self) -> list[EngineCoreEvent]:
        """What happened to requests since the last call."""
        return self._events.take()

    def check_invariant(self) -> None:
        """The block books against each other; raises BlockInvariantBroken. O(blocks): for tests and idle moments."""
        self.kv_cache_manager.check_invariant()

    # --- deciding a step ---

    def schedule(self) -> SchedulerOutput:
        """Decide one step. Requests that can never run end here; their outputs come with the step's."""
        plan = StepPlan(self._step, self.config.max_num_batched_tokens)
        self._step += 1
        if self._waiting_goes_first:
            self._waiting_goes_first = False
            self._admit_waiting(plan)
        if plan.is_empty:
            self._schedule_running(plan)
            self._admit_arrived(plan)
            if not plan.preempted_req_ids:
                self._admit_waiting(plan)
        self._stalled = plan.is_empty and not self._pending
        if plan.requests:
            self._in_flight[plan.step] = plan.requests
        finished, self._finished_req_ids = frozenset(self._finished_req_ids), set()
        return plan.build(finished)

    def _schedule_running(self, plan: StepPlan) -> None:
        running, manager = self._running, self.kv_cache_manager
        index = 0
        while index < len(running) and plan.token_budget > 0:
            request = running[index]
            num_tokens = request.num_tokens_with_spec - request.num_computed_tokens
            if num_tokens > 1:
                # A long prompt leaves a token to everyone behind it, or their streams would stall while it is computed.
                seats = min(len(self._arrived), self.config.max_num_seqs - len(running))
                others = len(running) - index - 1 + seats
                num_tokens = self._cut(num_tokens, max(1, plan.token_budget - others))
            allocation = manager.allocate_slots(request, num_tokens)
            while allocation.answer is not AllocationAnswer.OK:
                victim = self._newest_preemptible(request)
                self._preempt(victim, plan)
                if victim is request:
                    break
                allocation = manager.allocate_slots(request, num_tokens)
            else:
                plan.add_known(request, num_tokens, allocation.new_block_ids)
                index += 1

    def _newest_preemptible(self, needy: Request) -> Request:
        # `needy` is one itself, so this never reaches a request that this step has scheduled already.
        for request in reversed(self._running):
            if request.leg is not Leg.PREFILL:
                return request
        return needy

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self._running.remove(request)
        self.kv_cache_manager.free(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids.clear()
        self._waiting.prepend(request)
        plan.preempted_req_ids.add(request.request_id)
        self._num_preemptions += 1
        self._events.record(EngineCoreEventType.PREEMPTED, request.request_id, request.num_preemptions)

    def _cut(self, num_tokens: int, budget: int) -> int:
        limit = self.config.long_prefill_token_threshold
        return min(num_tokens, budget, limit) if limit else min(num_tokens, budget)

    def _admit_arrived(self, plan: StepPlan) -> None:
        while self._arrived and plan.token_budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._arrived[0]
            num_tokens = self._cut(request.num_tokens - request.num_computed_tokens, plan.token_budget)
            if self.kv_cache_manager.allocate_slots(request, num_tokens).answer is not AllocationAnswer.OK:
                return
            self._arrived.popleft()
            self._run(request, num_tokens, plan)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Try waiting requests in order. What stays keeps its place."""
        stay: list[Request] = []
        stuck: list[Request] = []
        while len(self._waiting):
            request = self._waiting.pop()
            admission = self._try_admit(request, plan)
            if admission is _Admission.ADMITTED and stuck:
                for passed in stuck:
                    self._times_passed[passed.request_id] = self._times_passed.get(passed.request_id, 0) + 1
                if not all(self._may_be_passed(passed) for passed in stuck):
                    break
            elif admission is _Admission.NO_BLOCKS:
                stay.append(request)
                stuck.append(request)
                if len(stuck) > self.config.max_stuck_requests or not self._may_be_passed(request):
                    break
            elif admission is _Admission.STEP_FULL:
                stay.append(request)
                break
            elif admission is _Admission.ASK_AGAIN:
                stay.append(request)
        self._waiting.prepend_many(stay)

    def _may_be_passed(self, request: Request) -> bool:
        # A preempted one has a stream waiting; newcomers taking its room would have it preempted for ever.
        if request.status is RequestStatus.PREEMPTED:
            return False
        return self._times_passed.get(request.request_id, 0) < self.config.max_times_passed

    def _try_admit(self, request: Request, plan: StepPlan) -> _Admission:
        if request.num_tokens + 1 > self.max_model_len:
            return self._refuse(request)
        may_load = request.leg is Leg.DECODE and request.status is RequestStatus.WAITING
        if not may_load and not self._has_seat(plan):
            return _Admission.STEP_FULL
        if may_load and len(self._remote) + len(self._arrived) >= self.config.max_num_seqs:
            return _Admission.STEP_FULL
        computed = self.kv_cache_manager.get_computed_blocks(request)
        if may_load:
            try:
                external = self._external_tokens(request, computed)
            except Exception as exc:
                return self._fail_admission(request, f"the KV connector failed: {exc!r}")
            if external.num_tokens is None:
                return _Admission.ASK_AGAIN
            if external.num_tokens:
                return self._load(request, computed, external.num_tokens)
            if not self._has_seat(plan):
                return _Admission.STEP_FULL
        return self._admit(request, computed, plan)

    def _has_seat(self, plan: StepPlan) -> bool:
        return plan.token_budget > 0 and len(self._running) < self.config.max_num_seqs

    def _external_tokens(self, request: Request, computed: ComputedBlocks) -> ExternalTokens:
        external = self._connector.get_num_new_matched_tokens(request, computed.num_tokens)
        if not external.num_tokens:
            return external if external.num_tokens is None else NO_EXTERNAL_TOKENS
        if not external.load_async or computed.num_tokens + external.num_tokens != request.num_prompt_tokens:
            raise ValueError(f"{external} does not complete a prompt with {computed.num_tokens} tokens here")
        return external

    def _admit(self, request: Request, computed: ComputedBlocks, plan: StepPlan) -> _Admission:
        missing = request.num_tokens - computed.num_tokens
        if self.config.enable_chunked_prefill:
            num_tokens = self._cut(missing, plan.token_budget)
        elif missing <= plan.token_budget:
            num_tokens = missing
        else:
            self._waiting_goes_first = True
            return _Admission.STEP_FULL
        allocation = self.kv_cache_manager.allocate_slots(
            request, missing, computed=computed, num_spared_blocks=self._spared_blocks()
        )
        if allocation.answer is AllocationAnswer.LATER:
            return _Admission.NO_BLOCKS
        if allocation.answer is AllocationAnswer.NEVER:
            return self._refuse(request)
        self._note_hits(request, computed)
        request.num_computed_tokens = computed.num_tokens
        self._run(request, num_tokens, plan)
        return _Admission.ADMITTED

    def _load(self, request: Request, computed: ComputedBlocks, num_external_tokens: int) -> _Admission:
        """Reserve the whole prompt and the slot after it, and let the connector fill what is not cached here."""
        lookahead = 1 if request.num_prompt_tokens + 1 < self.max_model_len else 0
        allocation = self.kv_cache_manager.allocate_slots(
            request,
            0,
            computed=computed,
            num_external_tokens=num_external_tokens,
            num_lookahead_tokens=lookahead,
            num_spared_blocks=self._spared_blocks(),
        )
        if allocation.answer is AllocationAnswer.LATER:
            return _Admission.NO_BLOCKS
        if allocation.answer is AllocationAnswer.NEVER:
            return self._refuse(request)
        self._note_hits(request, computed)
        request.num_computed_tokens = computed.num_tokens
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._remote[request.request_id] = request
        self._times_passed.pop(request.request_id, None)
        self._events.record(EngineCoreEventType.REMOTE_KV_REQUESTED, request.request_id, num_external_tokens)
        try:
            self._connector.update_state_after_alloc(request, self._prompt_block_ids(request), num_external_tokens)
        except Exception as exc:
            del self._remote[request.request_id]
            return self._fail_admission(request, f"the KV connector failed: {exc!r}")
        return _Admission.ADMITTED

    def _run(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        block_ids = self.kv_cache_manager.block_ids(request.request_id)
        self._events.record(EngineCoreEventType.SCHEDULED, request.request_id, request.num_computed_tokens)
        if request.status is RequestStatus.PREEMPTED:
            plan.add_known(request, num_tokens, block_ids, resumed=True)
        else:
            plan.add_new(request, num_tokens, block_ids)
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        self._times_passed.pop(request.request_id, None)

    def _spared_blocks(self) -> int:
        return self.config.watermark_blocks if self._running else 0

    def _note_hits(self, request: Request, computed: ComputedBlocks) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = computed.num_tokens
        self._prefix_cache_queries += request.num_tokens
        self._prefix_cache_hits += computed.num_tokens

    def _refuse(self, request: Request) -> _Admission:
        pool_tokens = self.kv_cache_manager.pool.num_total_blocks * self.config.block_size
        error = (
            f"a prompt of {request.num_prompt_tokens} tokens leaves no room to generate: this engine's limit is "
            f"{self.max_model_len} tokens (max_model_len {self.config.max_model_len}, KV cache {pool_tokens})"
        )
        self._end(request, RequestStatus.IGNORED, self._pending, error=error)
        return _Admission.ENDED

    def _fail_admission(self, request: Request, error: str) -> _Admission:
        self.num_connector_errors += 1
        self._end(request, RequestStatus.ERROR, self._pending, error=error)
        return _Admission.ENDED

    # --- committing a step ---

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Commit a step: append tokens, judge stops, free what ended. Keyed by client index.

        Results for requests that ended meanwhile, or that were never scheduled, are skipped and counted.
        """
        collected, self._pending = self._pending, {}
        num_scheduled = scheduler_output.num_scheduled_tokens
        self.num_skipped_results += len(runner_output.sampled_token_ids.keys() - num_scheduled.keys())
        for request in self._in_flight.pop(scheduler_output.step, ()):
            if request.status is RequestStatus.RUNNING:
                self._commit(request, num_scheduled[request.request_id], runner_output, collected)
            else:
                self.num_skipped_results += 1
        self._drop_ended_from_running()
        return _sealed(collected)

    def _commit(
        self, request: Request, num_scheduled_tokens: int, runner_output: ModelRunnerOutput, collected: _Outputs
    ) -> None:
        request_id = request.request_id
        failure = runner_output.failed.get(request_id)
        if failure is not None:
            self._end(request, RequestStatus.ERROR, collected, error=failure)
            return
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        if num_scheduled_tokens > 1 or not request.output_token_ids:
            self._events.record(EngineCoreEventType.CHUNK_COMPUTED, request_id, request.num_computed_tokens)
        if request.leg is Leg.PREFILL:
            block_ids = self.kv_cache_manager.block_ids(request_id)
            try:
                self._connector.blocks_computed(request, block_ids, request.num_computed_tokens)
            except Exception as exc:
                self.num_connector_errors += 1
                self._end(request, RequestStatus.ERROR, collected, error=f"the KV connector failed: {exc!r}")
                return
        if request.num_computed_tokens < request.num_tokens:
            return
        token_ids = runner_output.sampled_token_ids.get(request_id)
        if not token_ids:
            self._end(request, RequestStatus.ERROR, collected, error="the runner returned no token")
            return
        self._append(request, token_ids, runner_output.logprobs.get(request_id, ()), collected)

    def _append(
        self,
        request: Request,
        token_ids: Collection[int],
        logprobs: Collection[TokenLogprobs],
        collected: _Outputs,
    ) -> None:
        first_index = len(request.output_token_ids)
        stop = None
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            stop = check_stop(request, self.max_model_len)
            if stop is not None:
                break
        if first_index == 0:
            self._events.record(EngineCoreEventType.FIRST_TOKEN, request.request_id)
        if stop is not None:
            self._end(request, stop.status, collected, first_index, logprobs, stop_reason=stop.stop_reason)
        elif request.leg is Leg.PREFILL:
            self._end(request, RequestStatus.HANDED_OFF, collected, first_index, logprobs)
        else:
            self._emit(request, first_index, logprobs, collected)

    # --- KV from elsewhere ---

    def update_from_kv_transfer(self, transfers: KVTransferOutput) -> dict[int, EngineCoreOutputs]:
        """Take in what the transfer side reports: arrivals, failures, and blocks that nobody touches any more.

        A failure ends its request with ERROR, an arrival whose first token stops it ends it as that token says.
        Reports for requests that don't wait for one are skipped and counted.
        """
        collected: _Outputs = {}
        for request_id, arrived in transfers.arrived.items():
            request = self._remote.pop(request_id, None)
            if request is None:
                self.num_unknown_transfers += 1
            else:
                self._arrive(request, arrived, collected)
        for request_id, reason in transfers.failed.items():
            request = self._remote.pop(request_id, None)
            if request is None:
                self.num_unknown_transfers += 1
            else:
                self._end(request, RequestStatus.ERROR, collected, error=reason)
        for request_id in transfers.released:
            self.num_unknown_transfers += not self.kv_cache_manager.release(request_id)
        self._stalled = False
        return _sealed(collected)

    def _arrive(self, request: Request, arrived: ArrivedKV, collected: _Outputs) -> None:
        request.status = RequestStatus.WAITING
        request.num_external_tokens = request.num_prompt_tokens - request.num_computed_tokens
        request.num_computed_tokens = request.num_prompt_tokens
        self._events.record(EngineCoreEventType.REMOTE_KV_ARRIVED, request.request_id, request.num_external_tokens)
        self.kv_cache_manager.cache_blocks(request, request.num_prompt_tokens)
        for token_id in arrived.first_token_ids:
            request.output_token_ids.append(token_id)
            stop = check_stop(request, self.max_model_len)
            if stop is not None:
                self._end(request, stop.status, collected, stop_reason=stop.stop_reason)
                return
        if not request.output_token_ids:
            self._end(request, RequestStatus.ERROR, collected, error="the KV arrived without a first token")
            return
        self._arrived.append(request)

    # --- ending ---

    def _end(
        self,
        request: Request,
        status: RequestStatus,
        collected: _Outputs,
        first_index: int | None = None,
        logprobs: Collection[TokenLogprobs] = (),
        *,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> None:
        """The one way out: settles the blocks and writes the last output. The caller takes it out of its queue.

        `first_index`: of the tokens that this output brings; None when it brings none.
        """
        request_id = request.request_id
        transferring = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        request.status = status
        request.stop_reason = stop_reason
        request.error = error
        self._settle_blocks(request, transferring)
        del self.requests[request_id]
        self._times_passed.pop(request_id, None)
        self._finished_req_ids.add(request_id)
        self._events.record(EngineCoreEventType.FINISHED, request_id, request.num_output_tokens)
        self._emit(request, request.num_output_tokens if first_index is None else first_index, logprobs, collected)

    def _settle_blocks(self, request: Request, transferring: bool) -> None:
        manager, request_id = self.kv_cache_manager, request.request_id
        block_ids = self._prompt_block_ids(request) if transferring else manager.block_ids(request_id)
        try:
            fate = self._connector.request_finished(request, block_ids, transferring)
        except Exception:
            self.num_connector_errors += 1
            # Nobody knows who still touches them: a lost block is better than wrong KV.
            fate = BlockFate.QUARANTINED if transferring or request.leg is Leg.PREFILL else BlockFate.FREE
        if fate is BlockFate.FREE:
            manager.free(request_id)
        elif transferring:
            manager.quarantine(request_id)
        else:
            manager.lease(request_id)

    def _emit(
        self, request: Request, first_index: int, logprobs: Collection[TokenLogprobs], collected: _Outputs
    ) -> None:
        new_token_ids = request.output_token_ids[first_index:]
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            first_index=first_index,
            new_logprobs=tuple(logprobs)[: len(new_token_ids)] if logprobs else (),
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            num_cached_tokens=request.num_cached_tokens,
            num_external_tokens=request.num_external_tokens,
        )
        collected.setdefault(request.client_index, []).append(output)

    def _drop_ended_from_running(self) -> None:
        if any(request.is_finished for request in self._running):
            self._running = [request for request in self._running if not request.is_finished]

    def _prompt_block_ids(self, request: Request) -> list[int]:
        num_blocks = -(-request.num_prompt_tokens // self.config.block_size)
        return self.kv_cache_manager.block_ids(request.request_id)[:num_blocks]


def _sealed(collected: _Outputs) -> dict[int, EngineCoreOutputs]:
    return {client_index: EngineCoreOutputs(outputs) for client_index, outputs in collected.items()}
