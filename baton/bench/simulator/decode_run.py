"""Many steps at once, while nothing but decoding happens: where the tokens are known (a simulator).

What a step of decoding changes is a token more for everyone, and a block for a few, on days that the calendar of the
decode set has. So steps are counted, and only those few are touched, in the very order in which `Scheduler.schedule`
and `update_from_output` would have touched them: afterwards pool, cache, events and requests are what they would be.

`Scheduler.decode_run` offers a run. Between `begin` and `commit` a step is in flight, as between `schedule` and
`update_from_output`; whatever happens meanwhile or between two steps (newcomers, arrivals, aborts) may be told to the
scheduler, and the run is over with the step in which that happened.
"""

from __future__ import annotations

from baton.engine.decode_set import DecodeSet
from baton.engine.kv_cache.manager import AllocationAnswer, KVCacheManager


class DecodeRun:
    """Steps in which everybody decodes, nobody ends and nobody lacks a block."""

    def __init__(self, decodes: DecodeSet, manager: KVCacheManager, token_id: int, step: int, max_steps: int) -> None:
        self.max_steps = max_steps
        """After so many something else happens, or may."""
        self._decodes = decodes
        self._manager = manager
        self._token_id = token_id
        self._step = step

    @property
    def num_sequences(self) -> int:
        return len(self._decodes.request_ids)

    @property
    def num_context_tokens(self) -> int:
        """What they have behind them in the next step."""
        return self._decodes.num_context_tokens

    def begin(self) -> None:
        """Decide a step: as `schedule`."""
        for request in self._decodes.take_needy():
            num_full = self._manager.num_slots(request.request_id)
            allocation = self._manager.allocate_slots(request, num_full + 1 - request.num_computed_tokens)
            assert allocation.answer is AllocationAnswer.OK
            self._decodes.grown(request)
        self._decodes.tick()
        self._manager.begin_step(self._step)

    def commit(self) -> None:
        """Everybody got the token: as `update_from_output`."""
        self._manager.settle(self._step, lost=False)
        for request in self._decodes.committed():
            self._manager.cache_blocks(request, request.num_computed_tokens)
            request.output_token_ids.append(self._token_id)

    def advance(self, num_steps: int) -> None:
        """So many steps, from `begin` to `commit`."""
        while num_steps > 0:
            num_steps -= self._decodes.skip_quiet(num_steps)
            if num_steps:
                self.begin()
                self.commit()
                num_steps -= 1
