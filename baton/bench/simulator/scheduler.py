"""The engine's scheduler for simulations: it can execute many steps at once, and has one more policy."""

from __future__ import annotations

from functools import partial

from baton.bench.simulator.counted_decodes import CountedDecodes
from baton.bench.simulator.decode_run import DecodeRun
from baton.clock import Clock
from baton.engine.connector import KVConnector
from baton.engine.decode_set import DecodeSet
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_plan import StepPlan


class SimulatedScheduler(Scheduler):
    """A scheduler for requests of one sequence that draw the same token in every step, at which none of them stops.

    With a `known_token` their decoding is only counted: `bring_up_decodes` before one of them is looked at.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        key_fields: CacheKeyFields,
        clock: Clock,
        connector: KVConnector | None = None,
        *,
        known_token: int | None = None,
        prompts_first: bool = False,
    ) -> None:
        """`known_token`: the token that every request draws; None: the runner's output names the tokens.

        `prompts_first`: while there are prompts, a step computes nothing else, as in vLLM before chunked prefill.
        """
        make = DecodeSet if known_token is None else partial(CountedDecodes, token_id=known_token)
        super().__init__(config, key_fields, clock, connector, make_decodes=make)
        self._prompts_first = prompts_first

    def decode_run(self) -> DecodeRun | None:
        """Many steps at once; None while anything but decoding is to be decided, or if tokens are not known."""
        decodes, max_steps = self._state.decodes, self.num_quiet_steps()
        if max_steps < 1 or not isinstance(decodes, CountedDecodes):
            return None
        self._stalled = False
        return DecodeRun(decodes, self.kv_cache_manager, self._step, max_steps)

    def bring_up_decodes(self) -> None:
        """Bring the tokens of all requests up to date."""
        decodes = self._state.decodes
        if isinstance(decodes, CountedDecodes):
            decodes.bring_up()

    def num_quiet_steps(self) -> int:
        """A number of steps that only decode unless something arrives: no request ends in them or lacks a block."""
        state, waiting = self._state, self._waiting
        num_decodes = len(state.decodes)
        if not num_decodes or state.filling or self._in_flight or self._pending or waiting.may_be_admitted:
            return 0
        several = state.beams or state.groups or state.parked
        manager = state.kv_cache_manager
        if several or manager.host is not None or self.config.windows != (None,):
            return 0
        # Each request needs a block every `block_size` steps.
        num_blocks = manager.pool.num_free_blocks // num_decodes
        return max(0, min(state.decodes.num_ticks_left, num_blocks * self.config.block_size))

    def _fill_step(self, plan: StepPlan) -> None:
        if self._prompts_first:
            # Requests with drafts are among those that fill, and decode.
            filling, speculating = self._state.filling, self._state.speculating
            drafted = [request for request in filling if request.request_id in speculating]
            filling[:] = [request for request in filling if request.request_id not in speculating]
            self._schedule_filling(plan)
            self._admission.admit_waiting(plan, self._pending)
            self._state.filling += drafted
        super()._fill_step(plan)
