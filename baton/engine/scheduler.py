"""Decides what each step computes, and commits what it brought.

Where a request can be:

  for grammar  WAITING_FOR_GRAMMAR: what it may generate is being compiled, it is not polled
  waiting      WAITING (no blocks yet) or PREEMPTED (none any more)
  remote       WAITING_FOR_REMOTE_KVS: the blocks of its prompt are reserved, it is not polled
  arrived      its prompt's KV is here: it joins the very next step, ahead of newcomers
  running      RUNNING, in order of admission: either filling (its known tokens are still being computed) or one of
               the decodes, which compute a token in every step (see decode_set.py)
  swapped      SWAPPED: preempted, its KV is in the host tier; it comes back ahead of newcomers
  parked       a computed beam, until the others of its search are, too (see beam_group.py); not in `requests`
  ended        no longer in `requests`; its blocks are free, leased or quarantined

Rules that keep it from wedging and from serving wrong KV:

  - Admission is all or nothing (see admission.py).
  - The newest running request (or the one of the largest priority) is preempted first: the first in turn always
    progresses. Nothing is loaded in a step that preempts, so no peer writes to blocks that are still to be copied out.
  - A prefill leg is never preempted: its blocks are offered while it runs, and a peer may be reading them. It never
    needs to be: it has all its blocks from the start, or goes round in those that it has.
  - Blocks enter the prefix cache at commit, when their KV is known to be there.

A step can be decided while the one before it runs (`may_run_ahead`): how far a request is computed and when it reaches
its length is known without the tokens, and the runner appends those itself. What such a step computes for a request
that has meanwhile ended is skipped at its commit; what that wrote is behind a fence (see block_pool.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from baton.clock import Clock
from baton.engine.batch import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from baton.engine.commit import Commit
from baton.engine.connector import KVConnector, KVTransferOutput, NullConnector
from baton.engine.decode_set import DecodeSet
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.engine.kv_cache.host_tier import NO_COPIES
from baton.engine.kv_cache.manager import AllocationAnswer, KVCacheManager
from baton.engine.ledger import Ledger, OutputsByClient
from baton.engine.request import Request, RequestStatus
from baton.engine.sampling.grammar import TokenMatcher
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.sequence_steps import check_sequences, open_group
from baton.engine.step_plan import StepPlan
from baton.engine.stopping import most_outputs
from baton.engine.waiting.admission import Admission
from baton.engine.waiting.preemption import Preemption
from baton.errors import DuplicateRequest, InvalidRequest
from baton.messages.node import Leg

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Called from one thread. Every request ends in exactly one output that has a finish reason."""

    def __init__(
        self,
        config: SchedulerConfig,
        key_fields: CacheKeyFields,
        clock: Clock,
        connector: KVConnector | None = None,
        *,
        make_decodes: Callable[[int], DecodeSet] = DecodeSet,
    ) -> None:
        """`make_decodes`: makes the set of decoding requests for a block size; a simulation has one of its own."""
        self.config = config
        self.num_unknown_transfers = 0
        """Transfer reports for requests that did not wait for one."""
        self.clock = clock
        connector = connector if connector is not None else NullConnector()
        self._ledger = Ledger(config, key_fields, clock, connector, make_decodes(config.block_size))
        self._admission = Admission(self._ledger)
        self._preemption = Preemption(self._ledger, self._admission)
        self._commit = Commit(self._ledger, self._admission)
        self._step = 0
        self._in_flight: dict[int, StepPlan] = {}
        self._pending = OutputsByClient()
        """Ends of requests that never ran, until a step's outputs are handed out or somebody asks."""
        self._stalled = False
        """The last `schedule` could compute nothing, and nothing has happened since."""

    @property
    def requests(self) -> dict[str, Request]:
        """Every request that has not ended, by id; for looking only."""
        return self._ledger.requests

    @property
    def decoding(self) -> Collection[str]:
        """Ids of running requests that compute one token a step; for looking only."""
        return self._ledger.decodes.request_ids

    @property
    def kv_cache_manager(self) -> KVCacheManager:
        return self._ledger.kv_cache_manager

    @property
    def max_model_len(self) -> int:
        """The configured one, or what the pool can hold when that is less."""
        return self._ledger.max_model_len

    def most_tokens(self, request: Request) -> int:
        """How long it may become: one of several sequences less than `max_model_len` where the pool is small."""
        return self._ledger.most_tokens(request)

    @property
    def num_skipped_results(self) -> int:
        """Results of a step for requests that had ended or were never scheduled."""
        return self._commit.num_skipped_results

    @property
    def num_connector_errors(self) -> int:
        """Calls of the connector that raised."""
        return self._ledger.num_connector_errors

    # --- requests in and out ---

    def add_request(self, request: Request) -> None:
        """Queue a fresh request. One that can never fit ends at once: `take_refusals` has its output.

        DuplicateRequest: its id is live, or a transfer still holds blocks under it. InvalidRequest: its priority or n.
        """
        ledger = self._ledger
        check_sequences(request.sampling_params)
        if request.priority < self.config.min_priority:
            least = self.config.min_priority
            raise InvalidRequest("priority", f"must be at least {least} here, not {request.priority}")
        if self._is_taken(request.request_id):
            raise DuplicateRequest(f"request {request.request_id} is here already")
        open_group(request, ledger)
        ledger.requests[request.request_id] = request
        if request.arrival_time == math.inf:
            request.arrival_time = self.clock.monotonic()
        self._stalled = False
        ledger.events.record(EngineCoreEventType.QUEUED, request.request_id, request.num_submitted_tokens)
        self._admission.add(request, self._pending)

    def finish_requests(
        self, request_ids: Collection[str], status: RequestStatus, error: str | None = None
    ) -> dict[int, EngineCoreOutputs]:
        """End requests from outside, whatever they are doing; unknown ids are skipped. Returns their last outputs.

        A request's own id means all its sequences, `lone_sequence_id` one of them.
        """
        if not status.is_finished:
            raise ValueError(f"{status.name} ends nothing")
        outputs = OutputsByClient()
        self._finish(self._ledger.named(request_ids), status, error, outputs)
        self._finish_broken_groups(outputs)
        return outputs.seal()

    def grammar_compiled(self, request_id: str, matchers: Sequence[TokenMatcher]) -> None:
        """What a request in WAITING_FOR_GRAMMAR waits for: a matcher for each sequence that it will have here.

        They have been given its output so far. Skipped when it has ended. One whose grammar can't be compiled is ended
        with `finish_requests`.
        """
        self._admission.grammar_compiled(request_id, matchers)
        self._stalled = False

    def get_request_counts(self) -> tuple[int, int]:
        """(running, not running): what has not ended."""
        num_running = len(self._ledger.running)
        return num_running, len(self._ledger.requests) - num_running

    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._ledger.requests)

    def has_work(self) -> bool:
        """Whether a step could bring something now; when False, nothing will change until somebody calls in.

        A connector that answered "not known yet" wakes the scheduler with any `update_from_kv_transfer`.
        """
        if self._ledger.running or self._admission.num_arrived or self._pending:
            return True
        return not self._stalled and self._admission.num_waiting + self._admission.num_swapped > 0

    def make_stats(self) -> SchedulerStats:
        """Load after a step, in O(running requests that don't decode)."""
        pool, host = self.kv_cache_manager.pool, self.kv_cache_manager.host
        num_running, num_waiting = self.get_request_counts()
        num_uncomputed_tokens, num_context_tokens = self.num_uncomputed_and_context_tokens()
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_uncomputed_tokens=num_uncomputed_tokens,
            num_context_tokens=num_context_tokens,
            num_requests_waiting_by_reason=self._admission.num_waiting_by_reason(),
            total_blocks=pool.num_total_blocks,
            free_blocks=pool.num_free_blocks,
            leased_blocks=pool.num_leased_blocks,
            quarantined_blocks=pool.num_quarantined_blocks,
            total_host_blocks=host.pool.num_total_blocks if host is not None else 0,
            free_host_blocks=host.pool.num_free_blocks if host is not None else 0,
            num_preemptions_by_mode={
                "recompute": self._preemption.num_recomputed,
                "swap": self._preemption.num_swapped,
            },
            prefix_cache=self._admission.prefix_cache.stats(),
            num_skipped_results=self.num_skipped_results,
            num_unknown_transfers=self.num_unknown_transfers,
            num_connector_errors=self.num_connector_errors,
        )

    def num_uncomputed_and_context_tokens(self) -> tuple[int, int]:
        """As in `make_stats`, which has much else: for who asks in every step."""
        num_filled = num_to_fill = 0
        for request in self._ledger.filling:
            num_filled += request.num_computed_tokens
            num_to_fill += request.num_tokens - request.num_computed_tokens
        num_uncomputed_tokens = self._admission.num_waiting_tokens + num_to_fill
        return num_uncomputed_tokens, self._ledger.decodes.num_context_tokens + num_filled

    @property
    def num_waiting_for_remote_kvs(self) -> int:
        """As in `make_stats`."""
        return self._admission.num_waiting_for_remote_kvs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False, and nothing changes, while any block is held: see `blocks_in_use`."""
        return self.kv_cache_manager.reset_prefix_cache()

    def blocks_in_use(self) -> str:
        """Says who holds blocks, for a person; empty when nobody does."""
        return self.kv_cache_manager.blocks_in_use()

    def take_events(self) -> list[EngineCoreEvent]:
        """What happened to requests since the last call."""
        return self._ledger.events.take()

    def stop_events(self) -> None:
        """Nobody will take events: none are recorded any more."""
        self._ledger.events.is_recording = False

    def kv_snapshot(self) -> KVSnapshot:
        """Everything in the prefix cache; from here on its events are recorded, until `stop_kv_events`. O(blocks)."""
        return self.kv_cache_manager.kv_snapshot()

    def kv_events_since(self, sequence: int) -> KVEventBatch:
        """What the prefix cache took in and lost since a snapshot or an earlier batch said `sequence`."""
        return self.kv_cache_manager.kv_events.since(sequence)

    def stop_kv_events(self) -> None:
        """Nobody reads them any more."""
        self.kv_cache_manager.kv_events.stop()

    def check_invariant(self) -> None:
        """The block books against each other; raises BlockInvariantBroken. O(blocks): for tests and idle moments."""
        self.kv_cache_manager.check_invariant()

    def _is_taken(self, request_id: str) -> bool:
        ledger = self._ledger
        known = request_id in ledger.requests or request_id in ledger.groups or request_id in ledger.beams
        return known or ledger.kv_cache_manager.holds(request_id)

    def _finish(
        self, requests: Sequence[Request], status: RequestStatus, error: str | None, outputs: OutputsByClient
    ) -> None:
        if requests:
            self._admission.take_out(requests)
            for request in requests:
                self._ledger.end(request, status, outputs, error=error)
            self._ledger.drop_ended()
            self._stalled = False

    def _finish_broken_groups(self, outputs: OutputsByClient) -> None:
        while self._ledger.broken_groups:
            group, first = self._ledger.broken_groups.pop()
            status, error = RequestStatus.ERROR, "another sequence of the request failed"
            if first.status in (RequestStatus.INVALID, RequestStatus.REPETITION):
                # Not the node's fault in any of them: a router that read ERROR would hold it against the node.
                status, error = first.status, first.error or error
            self._finish(list(group.members), status, error, outputs)

    # --- deciding a step ---

    def may_run_ahead(self) -> bool:
        """Whether a step may be decided while the last one is in flight. Whatever forbids that is here.

        Beams: the next ones follow from the tokens. Preemption: a victim must not have a token in flight, and what a
        step swaps out is lost if somebody loads into those blocks before the runner has copied them.
        """
        ledger = self._ledger
        if ledger.beams or any(plan.swapped_out for plan in self._in_flight.values()):
            return False
        # So many blocks at most does the next step take before anything else; with fewer it would preempt.
        manager = ledger.kv_cache_manager
        return ledger.decodes.num_needing_block * manager.num_groups <= manager.pool.num_free_blocks

    def schedule(self) -> SchedulerOutput:
        """Decide one step. Requests that can never run end here; their outputs come with the step's.

        While the step before it is in flight, only if `may_run_ahead`.
        """
        plan = StepPlan(self._step, self.config.max_num_batched_tokens, self.config.long_prefill_token_threshold)
        self._step += 1
        ledger = self._ledger
        self._fill_step(plan)
        if plan.requests:
            self._let_decode(plan)
        moved = ledger.free_parked() or bool(plan.preempted_req_ids)
        is_empty = plan.is_empty
        self._stalled = is_empty and not moved and not self._pending
        copies = ledger.kv_cache_manager.take_copies(plan.step)
        if not is_empty or copies is not NO_COPIES:
            self._in_flight[plan.step] = plan
            ledger.kv_cache_manager.begin_step(plan.step)
        return plan.build(ledger.take_finished_req_ids(), copies)

    def _fill_step(self, plan: StepPlan) -> None:
        """Choose what the step computes: running requests first, then requests that wait."""
        ledger, admission = self._ledger, self._admission
        if admission.take_whole_step_wish():
            admission.admit_waiting(plan, self._pending)
        if plan.is_empty:
            self._schedule_decodes(plan)
            if ledger.filling:
                self._schedule_filling(plan)
            admission.admit_arrived(plan)
            if not plan.preempted_req_ids and admission.admit_swapped(plan):
                admission.admit_waiting(plan, self._pending)

    def take_refusals(self) -> dict[int, EngineCoreOutputs]:
        """The ends of requests that never ran, ahead of the next step's outputs."""
        outputs, self._pending = self._pending, OutputsByClient()
        return outputs.seal()

    def _schedule_decodes(self, plan: StepPlan) -> None:
        decodes, manager = self._ledger.decodes, self.kv_cache_manager
        for request in decodes.pop_needing_block():
            # An older one in need may have preempted it meanwhile.
            while request.request_id in decodes:
                # Its blocks are full when this step begins, tokens in flight included.
                num_full = manager.num_slots(request.request_id)
                allocation = manager.allocate_slots(request, num_full + 1 - request.num_computed_tokens)
                if allocation.answer is AllocationAnswer.OK:
                    decodes.grown(request)
                    plan.note_growth(request, num_full, allocation.new_block_ids)
                    break
                self._preemption.make_room(request, plan)
        num_context_tokens = decodes.num_context_tokens
        plan.add_decodes(decodes.tick(), num_context_tokens)

    def _schedule_filling(self, plan: StepPlan) -> None:
        # Others have all their known tokens in flight, and no decoding to come.
        filling = [r for r in self._ledger.filling if r.num_tokens > r.num_computed_tokens]
        arriving = min(self._admission.num_arrived, self.config.max_num_seqs - len(self._ledger.running))
        for index, request in enumerate(filling):
            if plan.token_budget <= 0:
                return
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens > 1:
                # A long prompt leaves a token to everyone behind it: their streams would stall while it is computed.
                behind = len(filling) - index - 1 + arriving
                num_tokens = plan.cut(num_tokens, max(1, plan.token_budget - behind))
            if not self.kv_cache_manager.num_growing:
                # All its blocks were taken when it was admitted.
                plan.add_known(request, num_tokens, ())
                continue
            growth = self.kv_cache_manager.grow(request, num_tokens)
            if growth.num_tokens > 0:
                plan.add_known(request, growth.num_tokens, growth.new_block_ids)

    def _let_decode(self, plan: StepPlan) -> None:
        """Whose last known token is computed in this step decodes from the next one on, if there is more to come."""
        ledger = self._ledger
        for request in plan.requests:
            # A beam ends with the token that it lacks, and so does a prefill leg; an embedding lacks none.
            if (
                request.num_computed_tokens < request.num_tokens
                or request.beams is not None
                or request.leg in (Leg.PREFILL, Leg.EMBED)
            ):
                continue
            num_to_come = most_outputs(request, ledger.most_tokens(request)) - len(request.output_token_ids) - 1
            if num_to_come > 0:
                ledger.filling.remove(request)
                ledger.decodes.join(request, ledger.kv_cache_manager.num_slots(request.request_id), num_to_come)

    # --- committing a step ---

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Commit a step, in the order of deciding: append tokens, judge stops, free what ended. Keyed by client index.

        Results for requests that ended meanwhile, or that were never scheduled, are skipped and counted.
        """
        outputs, self._pending = self._pending, OutputsByClient()
        num_scheduled = scheduler_output.num_scheduled_tokens
        if runner_output.sampled_token_ids:
            self._commit.num_skipped_results += len(runner_output.sampled_token_ids.keys() - num_scheduled.keys())
        if runner_output.lost:
            self._ledger.tell_finished_again(scheduler_output.finished_req_ids)
        plan = self._in_flight.pop(scheduler_output.step, None)
        if plan is not None:
            self._stalled = False
            self._preemption.settle(plan, scheduler_output, runner_output)
            self._commit.take(plan, num_scheduled, runner_output, outputs)
        self._ledger.drop_ended()
        if self._ledger.broken_groups:
            self._finish_broken_groups(outputs)
        return outputs.seal()

    # --- KV from elsewhere ---

    def update_from_kv_transfer(self, transfers: KVTransferOutput) -> dict[int, EngineCoreOutputs]:
        """Take in what the transfer side reports: arrivals, failures, and blocks that nobody touches any more.

        A failure ends its request with ERROR, or has computed here what did not come, as the policy says; an arrival
        whose first token stops it ends it as that token says.
        Reports for requests that don't wait for one are skipped and counted.
        """
        outputs = OutputsByClient()
        for request_id, arrived in transfers.arrived.items():
            request = self._admission.take_remote(request_id)
            if request is None:
                self.num_unknown_transfers += 1
            else:
                self._admission.arrive(request, arrived, outputs)
        for request_id, lost in transfers.failed.items():
            request = self._admission.take_unloaded(request_id)
            if request is None:
                self.num_unknown_transfers += 1
            elif self.config.on_transfer_failure == "recompute":
                self._admission.compute_here(request, lost.num_valid_blocks)
            else:
                reroutes = self.config.on_transfer_failure == "reroute"
                status = RequestStatus.KV_LOST if reroutes else RequestStatus.ERROR
                self._ledger.end(request, status, outputs, error=lost.story, transfer_cause=lost.cause)
        for request_id in transfers.released:
            self.num_unknown_transfers += not self.kv_cache_manager.release(request_id)
        self._finish_broken_groups(outputs)
        self._stalled = False
        return outputs.seal()
