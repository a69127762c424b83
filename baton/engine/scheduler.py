"""The scheduler: decides what each step computes, and commits the results of a computed step.

Every request is in one of these places:

  for grammar  WAITING_FOR_GRAMMAR: its JSON schema is being compiled; no step looks at it
  for adapter  WAITING_FOR_ADAPTER: its adapter is being loaded; no step looks at it
  waiting      WAITING (it has no blocks yet) or PREEMPTED (it has lost its blocks)
  remote       WAITING_FOR_REMOTE_KVS: the blocks of its prompt are reserved; no step looks at it
  arrived      the KV of its prompt has arrived: it joins the next step, before new requests
  running      RUNNING, in order of admission: either filling (its known tokens are still being computed) or decoding
               (it computes a token in every step, see decode_set.py)
  swapped      SWAPPED: it was preempted, and its KV is in the host tier; it runs again before new requests do
  parked       a computed beam, until the other beams of its search are computed (see beams.py); not in `requests`
  ended        no longer in `requests`; its blocks are free, leased or quarantined

Four rules keep the scheduler from deadlocks and from using wrong KV:

  - Admission is all or nothing (see admission.py).
  - The request whose turn is last (or the newest one, or that with the largest priority number) is preempted first, so
    the first request in turn always progresses. No load begins in a step that preempts, so no peer writes to blocks
    that are still to be copied out.
  - A prefill leg is never preempted: its blocks are offered while it runs, and a peer may be reading them. It never
    lacks a block: it gets all its blocks at admission, or reuses those that it has.
  - Blocks enter the prefix cache at commit, when their KV is known to be there.

A step can be decided while the step before it runs (`may_run_ahead`): how far a request is computed and when it reaches
its length is known without the tokens, and the runner appends those itself. The results of such a step for a request
that has ended meanwhile are skipped at its commit, and the fence in block_pool.py keeps the blocks to which the step
wrote from being allocated too early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from baton.clock import Clock
from baton.engine.batch import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutputs,
    Failure,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from baton.engine.commit import Commit
from baton.engine.connector import KVConnector, KVTransferOutput, NullConnector
from baton.engine.constraints import TokenMatcher
from baton.engine.decode_set import DecodeSet
from baton.engine.encoder_cache import EncoderCache, EncoderWork
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.kv_cache.block_table import AllocationAnswer
from baton.engine.kv_cache.events import KVSnapshot
from baton.engine.kv_cache.host_tier import NO_COPIES
from baton.engine.kv_cache.manager import KVCacheManager
from baton.engine.request import Request
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.scheduler_state import OutputsByClient, SchedulerState, failure_of
from baton.engine.speculation.speculation import Speculation
from baton.engine.stats import EngineCounters
from baton.engine.step_plan import StepPlan
from baton.engine.waiting.admission import Admission
from baton.engine.waiting.arrivals import Arrivals
from baton.engine.waiting.preemption import Preemption
from baton.engine.waiting.sequences import Sequences
from baton.engine.waiting.waiting_requests import WaitingRequests
from baton.errors import DuplicateRequest
from baton.messages.node import MoveOut, Outcome

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """The scheduler of one engine. Called from one thread. Every request ends with exactly one output with an outcome.

    Ids of requests that are unknown or have ended are skipped wherever they are passed in.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        key_fields: CacheKeyFields,
        clock: Clock,
        connector: KVConnector | None = None,
        *,
        make_decodes: Callable[[int], DecodeSet] = DecodeSet,
    ) -> None:
        """`make_decodes`: creates the set of decoding requests for a block size; a simulation passes a subclass."""
        self.config = config
        self.clock = clock
        connector = connector if connector is not None else NullConnector()
        self._state = SchedulerState(config, key_fields, clock, connector, make_decodes(config.block_size))
        self._waiting = WaitingRequests(config)
        self._sequences = Sequences(self._state, self._waiting)
        self._admission = Admission(self._state, self._waiting, self._sequences)
        self._arrivals = Arrivals(self._state, self._waiting, self._sequences, self._admission.prefix_cache)
        self._preemption = Preemption(self._state, self._waiting)
        self._speculation = Speculation(config.speculation, self._state, self._waiting, self._preemption)
        self._commit = Commit(self._state, self._sequences, self._speculation, self._preemption)
        self._step = 0
        self._in_flight: dict[int, StepPlan] = {}
        self._pending = OutputsByClient()
        """The last outputs of requests that never ran, until a step is committed or `take_refusals` is called."""
        self._stalled = False
        """Whether the last `schedule` could compute nothing, and nothing has happened since."""

    @property
    def requests(self) -> dict[str, Request]:
        """Every request that has not ended, by id; not to be changed."""
        return self._state.requests

    @property
    def decoding(self) -> Collection[str]:
        """Ids of the running requests that compute one token a step; not to be changed."""
        return self._state.decodes.request_ids

    @property
    def kv_cache_manager(self) -> KVCacheManager:
        return self._state.kv_cache_manager

    @property
    def encoder_cache(self) -> EncoderCache:
        return self._state.encoder_cache

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request: the configured number, or what the block pool can hold if that is less."""
        return self._state.max_model_len

    def max_num_tokens(self, request: Request) -> int:
        """The most tokens that a request may have; for one of several sequences, a small pool may hold fewer."""
        return self._state.max_num_tokens(request)

    @property
    def counters(self) -> EngineCounters:
        """What this engine has counted since its start; it goes on counting, `make_stats` has a copy."""
        return self._state.counters

    # --- requests in and out ---

    def add_request(self, request: Request, *, awaits_adapter: bool = False) -> None:
        """Queue a new request. A request that can never fit ends at once; `take_refusals` returns its output.

        `awaits_adapter`: its adapter is not loaded yet, and it waits for `adapter_loaded`. Raises DuplicateRequest if a
        request or a transfer's blocks with its id are here, and InvalidRequest for a number of sequences or a
        combination of parameters that this engine does not accept.
        """
        state = self._state
        self._sequences.check(request)
        if self._is_taken(request.request_id):
            raise DuplicateRequest(f"request {request.request_id} is here already")
        request.is_long = state.is_long(request)
        self._sequences.open_group(request)
        state.requests[request.request_id] = request
        if request.arrival_time == math.inf:
            request.arrival_time = self.clock.monotonic()
        self._stalled = False
        state.events.record(EngineCoreEventType.QUEUED, request, request.num_submitted_tokens)
        self._admission.add(request, self._pending, awaits_adapter=awaits_adapter)

    def end_requests(
        self, request_ids: Collection[str], outcome: Outcome, error: Failure | None = None
    ) -> EngineCoreOutputs:
        """End requests with all their sequences, wherever they are. Returns their last outputs by client index."""
        outputs = OutputsByClient()
        self._end(self._state.live_requests(request_ids), outcome, error, outputs)
        self._end_failed_groups(outputs)
        return outputs.seal()

    def end_sequence(self, request_id: str, index: int, outcome: Outcome) -> EngineCoreOutputs:
        """End one of several sequences of a request; others are skipped. Returns its last output by client index."""
        outputs = OutputsByClient()
        if (sequence := self._state.live_sequence(request_id, index)) is not None:
            self._end([sequence], outcome, None, outputs)
            self._end_failed_groups(outputs)
        return outputs.seal()

    def move(self, request_id: str, move: MoveOut) -> None:
        """Let another node read the KV of a decoding request, and end the request HANDED_OFF when it has nearly all.

        The connector is told at once if that can't begin, and later if the request goes on here for another reason.
        """
        state, request = self._state, self._state.requests.get(request_id)
        why = self._why_not_moved(request, move)
        if request is None or why:
            state.connector.move_ended(request_id, move.to, why)
            return
        request.move, request.append_only_until = move, 0
        # What a step in flight computes may count as computed already.
        request.seen_from = min(request.num_computed_tokens, request.num_tokens - 1)
        state.moving[request_id] = request
        state.connector.move_begun(request)

    def _why_not_moved(self, request: Request | None, move: MoveOut) -> str:
        if request is None:
            return "it is not here any more"
        if request.has_several:
            return "a request of several sequences stays where it is"
        if request.move is not None:
            return f"it is being moved to {request.move.to} already"
        request_id = request.request_id
        if request_id not in self._state.decodes.request_ids and request_id not in self._state.speculating:
            return "it does not decode now"
        if not request.num_prompt_tokens < move.num_tokens <= request.num_tokens < move.cut_by:
            return f"it has {request.num_tokens} tokens, and is to move with {move.num_tokens} to {move.cut_by}"
        return ""

    def grammar_compiled(self, request_id: str, matchers: Sequence[TokenMatcher]) -> None:
        """Give a request in WAITING_FOR_GRAMMAR a matcher for each sequence that it will have here.

        The matchers have been given the request's output so far. A request whose grammar can't be compiled is ended
        with `end_requests` instead.
        """
        self._waiting.grammar_compiled(request_id, matchers)
        self._stalled = False

    def adapter_loaded(self, request_id: str) -> None:
        """Queue a request in WAITING_FOR_ADAPTER: the runner has its adapter, and keeps it until the request has ended.

        A request whose adapter can't be loaded is ended with `end_requests` and ADAPTER_UNAVAILABLE instead.
        """
        self._waiting.adapter_loaded(request_id)
        self._stalled = False

    def adapters_in_use(self) -> set[str]:
        """The digests of the adapters of all requests that have not ended. O(requests)."""
        members = (beam for group in self._state.beams.values() for beam in group.members)
        return {request.adapter for request in (*self._state.requests.values(), *members) if request.adapter}

    def take_encoder_work(self) -> EncoderWork:
        """What the runner is to release and to encode since the last call, in this order."""
        cache = self._state.encoder_cache
        return EncoderWork(cache.take_evicted(), cache.take_inputs_to_encode())

    def input_encoded(self, digest: str, *, is_fetched: bool = False) -> None:
        """Note that the runner has the rows of an input, which `take_encoder_work` named.

        `is_fetched`: another node made them.
        """
        self._state.encoder_cache.encoded(digest, is_fetched=is_fetched)
        self._stalled = False

    def input_failed(self, digest: str, error: Exception) -> None:
        """End the requests that need an input which can't be encoded. InvalidRequest: the input is at fault.

        Their last outputs come with the next commit, or from `take_refusals`.
        """
        asked = self._state.encoder_cache.failed(digest)
        needing = [request for request_id, request in self._state.requests.items() if request_id in asked]
        self._end(needing, *failure_of(error), self._pending)
        self._end_failed_groups(self._pending)
        self._stalled = False

    def get_request_counts(self) -> tuple[int, int]:
        """The numbers of requests that run, and of those that wait for anything.

        Sequences that are held back (see sequence_group.py) are in neither: they take no room from other requests.
        """
        num_running = len(self._state.running)
        return num_running, len(self._state.requests) - num_running - self._waiting.num_held

    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._state.requests)

    def has_work(self) -> bool:
        """Whether a step could do anything now. If not, nothing changes until another method is called.

        A connector that answered "not known yet" wakes the scheduler with any `update_from_kv_transfer`.
        """
        if self._waiting.arrived or self._waiting.has_due or self._pending:
            return True
        # Requests that run can have nothing to compute while images are encoded.
        if self._state.running and not (self._stalled and self._state.encoder_cache.is_encoding):
            return True
        if self._speculation.has_work:
            return True
        return not self._stalled and self._waiting.num_queued + len(self._waiting.swapped) > 0

    def make_stats(self) -> SchedulerStats:
        """The engine's load after a step, in O(running requests that don't decode)."""
        pool, host = self.kv_cache_manager.pool, self.kv_cache_manager.host
        num_running, num_waiting = self.get_request_counts()
        num_uncomputed_tokens, num_context_tokens = self.num_uncomputed_and_context_tokens()
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_uncomputed_tokens=num_uncomputed_tokens,
            num_context_tokens=num_context_tokens,
            num_requests_waiting_by_reason=self._waiting.num_by_reason(),
            total_blocks=pool.num_total_blocks,
            free_blocks=pool.num_free_blocks,
            promised_blocks=self.num_promised_blocks,
            leased_blocks=pool.num_leased_blocks,
            quarantined_blocks=pool.num_quarantined_blocks,
            total_host_blocks=host.pool.num_total_blocks if host is not None else 0,
            free_host_blocks=host.pool.num_free_blocks if host is not None else 0,
            num_preemptions_by_mode={
                "recompute": self._preemption.num_recomputed,
                "swap": self._preemption.num_swapped,
            },
            prefix_cache=self._admission.prefix_cache.stats(),
            spec_decoding=self._speculation.counts.stats(),
            counters=replace(
                self.counters,
                num_encoded_inputs=self.encoder_cache.num_encoded,
                num_fetched_inputs=self.encoder_cache.num_fetched,
                num_encoder_hits=self.encoder_cache.num_hits,
            ),
        )

    def num_uncomputed_and_context_tokens(self) -> tuple[int, int]:
        """Two numbers of `make_stats` alone, for callers that need them in every step."""
        num_filled = num_to_fill = 0
        for request in self._state.filling:
            num_filled += request.num_computed_tokens
            num_to_fill += request.num_tokens - request.num_computed_tokens
        num_uncomputed_tokens = self._waiting.num_queued_tokens + num_to_fill
        return num_uncomputed_tokens, self._state.decodes.num_context_tokens + num_filled

    @property
    def num_promised_blocks(self) -> int:
        """Blocks in use, each once, and those that waiting requests will take, whatever their windows. In O(1)."""
        manager = self.kv_cache_manager
        in_use = manager.pool.num_total_blocks - manager.pool.num_free_blocks
        return in_use + self._waiting.num_blocks_to_take * manager.num_groups

    @property
    def num_waiting_for_remote_kvs(self) -> int:
        """The same number as in `make_stats`, in O(1)."""
        return self._waiting.num_waiting_for_remote_kvs

    def take_events(self) -> list[EngineCoreEvent]:
        """The events of requests since the last call, oldest first."""
        return self._state.events.take()

    def stop_events(self) -> None:
        """Record no events of requests any more; for an engine whose events are never taken."""
        self._state.events.is_recording = False

    def kv_snapshot(self) -> KVSnapshot:
        """The keys of all cached blocks, and of rows of inputs; from now on changes are recorded. O(blocks).

        They are until `kv_cache_manager.kv_events.stop`.
        """
        return self._state.kv_snapshot()

    def _is_taken(self, request_id: str) -> bool:
        state = self._state
        known = request_id in state.requests or request_id in state.groups or request_id in state.beams
        return known or request_id in state.kv_cache_manager.held

    def _end(
        self, requests: Sequence[Request], outcome: Outcome, error: Failure | None, outputs: OutputsByClient
    ) -> None:
        if requests:
            self._waiting.remove(requests)
            for request in requests:
                self._state.end(request, outcome, outputs, error=error)
            self._state.remove_ended()
            self._stalled = False

    def _end_failed_groups(self, outputs: OutputsByClient) -> None:
        while self._state.failed_groups:
            group, first = self._state.failed_groups.pop()
            outcome: Outcome = Outcome.ERROR
            error: Failure = "another sequence of the request failed"
            if first.outcome in (Outcome.INVALID, Outcome.REPETITION):
                # The node is not at fault, so the others don't end with ERROR, which routers count against the node.
                outcome, error = first.outcome, first.error or error
            self._end(list(group.members), outcome, error, outputs)

    # --- deciding a step ---

    def may_run_ahead(self) -> bool:
        """Whether a step may be decided while the last one is in flight.

        Not with beams, since the next beams follow from the tokens of the step in flight. Not while a request is moved,
        whose blocks nothing may write to once it is handed over; nor while one is moved here, whose stream stands still
        until it is in a step. Not while tokens are drafted: how far these requests are is known only when the step is
        committed. Not if the step might preempt or the step in flight swaps out: a preempted request must not have a
        token in flight, and swapped blocks must be copied before a load from another node writes to them.
        """
        state = self._state
        if state.beams or state.speculating or state.moving or self._speculation.is_waiting:
            return False
        if self._waiting.awaits_moved:
            return False
        if any(plan.swapped_out or plan.num_drafts_wanted for plan in self._in_flight.values()):
            return False
        # The next step first allocates at most this many blocks; with fewer free blocks it would preempt.
        manager = state.kv_cache_manager
        return state.decodes.num_needing_block * manager.num_groups <= manager.pool.num_free_blocks

    def schedule(self) -> SchedulerOutput:
        """Decide one step. Requests that turn out never to fit end here; their outputs come with the next commit.

        While the step before it is in flight, it may be called only if `may_run_ahead`.
        """
        config = self.config
        plan = StepPlan(
            self._step, config.step_tokens, config.max_num_batched_tokens, config.long_prefill_token_threshold
        )
        self._step += 1
        state = self._state
        if self._speculation.is_waiting and not self._in_flight:
            self._speculation.propose()
        self._fill_step(plan)
        self._speculation.ask_draft_model(plan)
        if plan.requests:
            state.move_to_decodes(plan)
        moved = state.free_parked() or bool(plan.preempted_req_ids)
        is_empty = plan.is_empty
        self._stalled = is_empty and not moved and not self._pending
        copies = state.kv_cache_manager.begin_step(plan.step, is_empty=is_empty)
        if not is_empty or copies is not NO_COPIES:
            self._in_flight[plan.step] = plan
        return plan.build(state.take_finished_req_ids(), copies)

    def _fill_step(self, plan: StepPlan) -> None:
        """Choose what the step computes: running requests first, then waiting ones.

        A prompt that needs a whole step's budget, since prompts may not be split into chunks, is tried before them.
        """
        state, admission = self._state, self._admission
        admission.begin_step()
        if admission.pop_needs_whole_step():
            admission.admit_waiting(plan, self._pending)
        if plan.is_empty:
            self._schedule_decodes(plan)
            if state.filling:
                self._schedule_filling(plan)
            admission.admit_arrived(plan)
            if not plan.preempted_req_ids and admission.admit_swapped(plan):
                admission.admit_waiting(plan, self._pending)

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Give requests drafts of what follows their tokens, for the next step.

        Drafts are guesses: those of requests that don't decode are skipped, those beyond a request's length cut off,
        and while a step is in flight all are, since nobody knows yet what they would follow. The engine drafts tokens
        itself (`SchedulerConfig.speculation`); this is for drafts from elsewhere.
        """
        if not self._in_flight:
            self._speculation.update_draft_token_ids(drafts)

    def take_refusals(self) -> EngineCoreOutputs:
        """The last outputs of requests that never ran, without waiting for the next step's outputs."""
        outputs, self._pending = self._pending, OutputsByClient()
        return outputs.seal()

    def _schedule_decodes(self, plan: StepPlan) -> None:
        decodes, manager = self._state.decodes, self.kv_cache_manager
        if self._state.speculating:
            self._speculation.allocate(plan)
        for request in decodes.pop_needing_block():
            # Making room for another request may have preempted this one meanwhile.
            while request.request_id in decodes:
                # All slots of its blocks are taken when this step begins, if tokens in flight are counted.
                num_full = manager.num_slots(request.request_id)
                allocation = manager.allocate_slots(request, num_full + 1 - request.num_computed_tokens)
                if allocation.answer is AllocationAnswer.OK:
                    decodes.note_growth(request)
                    plan.note_growth(request, num_full, allocation.new_block_ids)
                    break
                self._preemption.make_room(request, plan)
        num_context_tokens = decodes.num_context_tokens
        plan.add_decodes(decodes.tick(), num_context_tokens)
        if self._state.speculating:
            self._speculation.schedule(plan)

    @property
    def _num_arriving(self) -> int:
        """The requests whose KV has arrived and that get a seat in this step."""
        return min(len(self._waiting.arrived), self.config.max_num_seqs - len(self._state.running))

    def _schedule_filling(self, plan: StepPlan) -> None:
        state = self._state
        # The other requests have all their known tokens in flight, and end with the token that is being computed.
        filling = [r for r in state.filling if r.num_tokens > r.num_computed_tokens]
        arriving = self._num_arriving
        for index, request in enumerate(filling):
            if plan.token_budget <= 0:
                return
            num_tokens = request.num_tokens - request.num_computed_tokens
            # A long prompt leaves a token of the budget to each request behind it, or their streams would stall.
            behind = len(filling) - index - 1 + arriving
            num_tokens = plan.chunk_size(request, num_tokens, max(1, plan.token_budget - behind))
            num_tokens = num_tokens and state.num_encoded(request, request.num_computed_tokens, num_tokens)
            if not num_tokens:
                continue
            if not self.kv_cache_manager.num_growing:
                # All its blocks were allocated when it was admitted.
                plan.add_known(request, num_tokens, ())
                continue
            growth = self.kv_cache_manager.grow(request, num_tokens)
            if growth.num_tokens > 0:
                plan.add_known(request, growth.num_tokens, growth.new_block_ids)

    # --- committing a step ---

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Commit a step: append tokens, check whether they end requests, free the blocks of ended ones.

        Steps are committed in the order in which they were decided. Returns outputs by client index. Results for
        requests that ended meanwhile, or that were never scheduled, are skipped and counted.
        """
        outputs, self._pending = self._pending, OutputsByClient()
        num_scheduled = scheduler_output.num_scheduled_tokens
        if runner_output.sampled_token_ids:
            self.counters.num_skipped_results += len(runner_output.sampled_token_ids.keys() - num_scheduled.keys())
        if runner_output.lost:
            self._state.report_finished_again(scheduler_output.finished_req_ids)
        self._speculation.note_step(scheduler_output, runner_output)
        plan = self._in_flight.pop(scheduler_output.step, None)
        if plan is not None:
            self._stalled = False
            self._preemption.settle(plan, scheduler_output, runner_output)
            self._state.is_step_in_flight = bool(self._in_flight)
            self._commit.commit(plan, num_scheduled, runner_output, outputs)
        self._state.remove_ended()
        if self._state.failed_groups:
            self._end_failed_groups(outputs)
        return outputs.seal()

    # --- KV from another node ---

    def update_from_kv_transfer(self, transfers: KVTransferOutput) -> EngineCoreOutputs:
        """Process arrivals and failures of transfers, and the release of blocks that no peer accesses any more.

        A failure ends its request (KV_LOST or ERROR) or lets it be computed here, as `on_transfer_failure` says. An
        arrival ends its request if its first token is a stop token or reaches its length. Reports for requests that
        don't wait for one are skipped and counted.
        """
        outputs = OutputsByClient()
        self._arrivals.take(transfers, outputs)
        self._end_failed_groups(outputs)
        self._stalled = False
        return outputs.seal()
