"""Preemption: which running request gives up its blocks when they run out, and whether its KV is kept."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import EngineCoreEventType, ModelRunnerOutput, SchedulerOutput
from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.engine.scheduler_state import SchedulerState
from baton.engine.step_plan import StepPlan
from baton.engine.waiting.waiting_requests import WaitingRequests
from baton.messages.node import Leg

_WEIGHT = 0.2
"""Weight of the newest measurement in the exponential moving averages."""


@dataclass(frozen=True, slots=True)
class PreemptionRates:
    """Measured costs of copying blocks and computing tokens. The defaults apply until there is a measurement."""

    seconds_per_block: float = 1e-4
    """Time to copy a block in one direction."""
    seconds_per_token: float = 1e-3
    """Time to compute one token of a prompt."""

    def after_copies(self, num_blocks: int, seconds: float) -> PreemptionRates:
        """These rates with one more measurement of copying."""
        return PreemptionRates(_mean(self.seconds_per_block, seconds / num_blocks), self.seconds_per_token)

    def after_compute(self, num_tokens: int, seconds: float) -> PreemptionRates:
        """These rates with one more measurement of computing prompts."""
        return PreemptionRates(self.seconds_per_block, _mean(self.seconds_per_token, seconds / num_tokens))


def swap_is_cheaper(num_blocks: int, num_tokens: int, rates: PreemptionRates) -> bool:
    """Whether copying `num_blocks` blocks out and back in is faster than recomputing their `num_tokens` tokens."""
    return 2 * num_blocks * rates.seconds_per_block < num_tokens * rates.seconds_per_token


def _mean(so_far: float, newest: float) -> float:
    return so_far + _WEIGHT * (newest - so_far)


class Preemption:
    """Moves running requests back to `waiting` (their KV is recomputed) or to `swapped` (their KV is kept)."""

    def __init__(self, state: SchedulerState, waiting: WaitingRequests) -> None:
        self._state = state
        self._waiting = waiting
        self._mode = state.config.preemption_mode
        self.rates = PreemptionRates()
        """Measured costs of copying and of computing."""
        self.num_recomputed = 0
        """Preemptions by recomputation, since start."""
        self.num_swapped = 0
        """Preemptions by swapping, since start."""

    def make_room(self, requester: Request, plan: StepPlan) -> None:
        """Preempt the running request that is last in turn, before anything is scheduled in this step.

        `requester`, which lacks a block, is a candidate itself. Computed beams, which are parked, hold blocks as well:
        they count as newer than the running requests, and their search continues without their blocks.
        """
        state = self._state
        candidates = [request for request in state.running if request.leg is not Leg.PREFILL]
        victim = self._waiting.last_in_turn([*candidates, *state.parked.values()]) or requester
        if victim.beams is not None and victim.request_id in state.parked:
            state.free_parked(victim.beams)
        else:
            self._preempt(victim, plan)

    def settle(self, plan: StepPlan, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> None:
        """Note that a step's copies are done. If the step was lost, what it swapped out has to be recomputed."""
        self._state.kv_cache_manager.settle(plan.step, runner_output.lost)
        if runner_output.lost:
            for request in plan.swapped_out:
                if request.status is RequestStatus.SWAPPED:
                    self._waiting.remove((request,))
                    self._state.kv_cache_manager.free(request.request_id)
                    self._requeue(request, RequestEvent.SWAP_LOST)
        elif self._mode == "auto":
            self._measure(plan, scheduler_output, runner_output)

    def start_over(self, request: Request) -> None:
        """Let a running request, all of whose tokens are committed, be computed again as a long sequence."""
        self._give_up_seat(request)
        self.num_recomputed += 1
        self._state.forget_short(request)
        self._requeue(request, RequestEvent.PREEMPTED)

    def _give_up_seat(self, request: Request) -> None:
        state = self._state
        state.running.remove(request)
        if not state.decodes.leave(request.request_id):
            # A decoding request that starts over may have left when the step after its last one was decided.
            if request in state.filling:
                state.filling.remove(request)
            state.speculating.pop(request.request_id, None)
            request.spec_token_ids = []
        request.num_preemptions += 1
        request.num_found_tokens = 0
        if request.move is not None:
            # Its blocks may hold the KV of other tokens before they are read.
            state.end_move(request, "it was preempted")
        state.encoder_cache.release(request.request_id, request.encoder_inputs)
        state.events.record(EngineCoreEventType.PREEMPTED, request, request.num_preemptions)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        manager = self._state.kv_cache_manager
        self._give_up_seat(request)
        plan.preempted_req_ids.add(request.request_id)
        if self._may_swap(request) and manager.swap_out(request):
            self.num_swapped += 1
            plan.swapped_out.append(request)
            request.transition(RequestEvent.SWAPPED_OUT)
            self._waiting.put_back(request)
        else:
            self.num_recomputed += 1
            manager.free(request.request_id)
            self._requeue(request, RequestEvent.PREEMPTED)

    def _requeue(self, request: Request, event: RequestEvent) -> None:
        request.transition(event)
        request.num_computed_tokens = 0
        self._waiting.put_back(request)

    def _may_swap(self, request: Request) -> bool:
        if self._mode != "auto":
            return self._mode == "swap"
        num_blocks = self._state.kv_cache_manager.num_computed_blocks(request)
        return swap_is_cheaper(num_blocks, request.num_computed_tokens, self.rates)

    def _measure(self, plan: StepPlan, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> None:
        num_copied = len(scheduler_output.blocks_to_swap_out) + len(scheduler_output.blocks_to_swap_in)
        if num_copied and runner_output.copy_seconds > 0:
            self.rates = self.rates.after_copies(num_copied, runner_output.copy_seconds)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        # Steps of mostly prompts say what a prompt costs; decoding a token costs something else.
        if 2 * scheduler_output.num_prefill_tokens > num_tokens and runner_output.compute_seconds > 0:
            self.rates = self.rates.after_compute(num_tokens, runner_output.compute_seconds)
