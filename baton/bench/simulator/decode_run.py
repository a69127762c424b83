"""Many decode steps at once, while nothing else happens and the tokens are known.

A step of decoding adds a token to each request and a block to a few, at ticks that the decode set's calendar has. The
steps are therefore counted, and only those few requests are touched, in the order in which `Scheduler.schedule` and
`update_from_output` would touch them. Afterwards pool, cache, events and requests are as after single steps.

`SimulatedScheduler.decode_run` offers a run. Between `begin` and `commit` a step is in flight, as between `schedule`
and `update_from_output`. New requests, arrivals and aborts may be given to the scheduler meanwhile, or between two
steps; the run ends with the step in which that happens.
"""

from __future__ import annotations

from baton.bench.simulator.counted_decodes import CountedDecodes
from baton.engine.kv_cache.block_table import AllocationAnswer
from baton.engine.kv_cache.manager import KVCacheManager


class DecodeRun:
    """Steps in which all running requests decode, none of them ends, and none of them lacks a block."""

    def __init__(self, decodes: CountedDecodes, manager: KVCacheManager, step: int, max_steps: int) -> None:
        self.max_steps = max_steps
        """The number of steps after which something else happens, or may happen."""
        self._decodes = decodes
        self._manager = manager
        self._step = step

    @property
    def num_sequences(self) -> int:
        """The number of running requests."""
        return len(self._decodes.request_ids)

    @property
    def num_context_tokens(self) -> int:
        """The tokens that the requests attend to in the next step."""
        return self._decodes.num_context_tokens

    def begin(self) -> None:
        """Decide a step, as `Scheduler.schedule` does."""
        for request in self._decodes.pop_needing_block():
            num_full = self._manager.num_slots(request.request_id)
            allocation = self._manager.allocate_slots(request, num_full + 1 - request.num_computed_tokens)
            assert allocation.answer is AllocationAnswer.OK
            self._decodes.note_growth(request)
        self._decodes.tick()
        self._manager.begin_step(self._step)

    def commit(self) -> None:
        """Give each request its token, as `Scheduler.update_from_output` does."""
        self._manager.settle(self._step, lost=False)
        for request in self._decodes.committed():
            self._manager.cache_blocks(request, request.num_computed_tokens)
            request.output_token_ids.append(self._decodes.token_id)

    def advance(self, num_steps: int) -> None:
        """Carry out this number of steps, each from `begin` to `commit`."""
        while num_steps > 0:
            num_steps -= self._decodes.skip_quiet(num_steps)
            if num_steps:
                self.begin()
                self.commit()
                num_steps -= 1
