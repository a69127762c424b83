"""Running requests whose tokens are known in advance: their tokens are counted instead of computed.

In a simulation every request draws the same token in every step. A request is therefore brought up to date only when it
needs a block, fills one, ends or leaves, and when its state is read (`bring_up`). Between those moments its number of
computed tokens and its output lag behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import ModelRunnerOutput
from baton.engine.decode_set import NO_DECODES, DecodeGroup, DecodeSet
from baton.engine.request import Request


class CountedDecodes(DecodeSet):
    """A decode set whose groups name no members, since each of them draws `token_id` in every tick."""

    def __init__(self, block_size: int, token_id: int) -> None:
        super().__init__(block_size)
        self.token_id = token_id
        self._num_in_flight = 0
        """The number of ticks that are not committed, 0 or 1."""

    def bring_up(self) -> None:
        """Bring all members up to date."""
        for request in self._members.values():
            self._bring_up(request)

    def skip_quiet(self, max_ticks: int) -> int:
        """Advance by ticks in which no member needs a block or fills one, at most `max_ticks`. Returns their number."""
        calendar, tick = self._calendar, self._tick
        last = tick + max_ticks
        while tick < last and tick + 1 not in calendar and tick + 2 not in calendar:
            tick += 1
        num_quiet, self._tick = tick - self._tick, tick
        return num_quiet

    def committed(self) -> Sequence[Request]:
        """The members that filled a block or reached their length in the last tick, in the order of joining."""
        tick = self._tick + 1
        if not self._num_in_flight:
            return ()
        self._num_in_flight = 0
        full, over = self._calendar.get(tick), self._over.get(tick)
        if full is None and over is None:
            return ()
        found = {r.request_id: r for r in full or () if self._due_at.get(r.request_id) == tick}
        if over:
            found |= {request_id: self._members[request_id] for request_id in over}
            if len(found) > 1:
                found = {request_id: found[request_id] for request_id in self._members if request_id in found}
        # A request that joined with this tick's step did not decode in it. The scheduler processes its part of the
        # step.
        return [request for request in found.values() if self._bring_up(request, num_spared=1)]

    def leave(self, request_id: str) -> bool:
        """Bring the request up to date and remove it. Returns whether it was a member."""
        request = self._members.get(request_id)
        if request is not None:
            self._bring_up(request)
        return super().leave(request_id)

    def pop_needing_block(self) -> list[Request]:
        """Take the members without a slot for the next tick, brought up to date."""
        found = super().pop_needing_block()
        for request in found:
            self._bring_up(request)
        return found

    def tick(self) -> DecodeGroup:
        """Let all members compute a token. The group only has their number."""
        count = len(self._members)
        self._num_in_flight = min(count, 1)
        if not count:
            return NO_DECODES
        self._tick += 1
        return DecodeGroup({}, {}, count)

    def _bring_up(self, request: Request, num_spared: int = 0) -> bool:
        """Count what the request has computed and append its tokens, except the last `num_spared`.

        Returns whether it has computed anything since it was last brought up to date.
        """
        num_computed_tokens = self._context[request.request_id] + self._tick - self._num_in_flight
        num_new = num_computed_tokens - request.num_computed_tokens
        # A request that joins in a step in flight is counted as further than it is.
        if num_new <= 0:
            return False
        request.num_computed_tokens = num_computed_tokens
        request.output_token_ids += [self.token_id] * (num_new - num_spared)
        return True


class _SameToken(dict[str, Sequence[int]]):
    def __init__(self, token_id: int) -> None:
        super().__init__()
        self._token_ids = (token_id,)

    def get(self, request_id: str, default: object = None) -> Sequence[int]:
        return self._token_ids


def same_token_output(token_id: int) -> ModelRunnerOutput:
    """A runner's output of a step in which each request drew this token. It names no request."""
    return ModelRunnerOutput(_SameToken(token_id))
