"""Running requests that compute one token a step: a step costs them little more than the token itself.

What a steady step has to decide about such a request is known in advance: the step in which it needs a block, the one
in which it reaches its length (a calendar has both), and the output length at which its commit is more than an append
(`Request.attention_at`). So nobody asks each of them everything in every step, and what a step says of them all is
built once and used until one joins or leaves.

Where every token is known in advance (a simulator, `known_token`) nobody is asked anything at all: members are counted,
and a request is brought up to date when it needs a block, fills one, ends or leaves. `committed` names those to whom a
step did more than append.

A request joins when the step that computes the last of its known tokens is decided: whether it stopped at the token
that the step draws is known later, and a next step may be decided before. Ticks count decided steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from baton.engine.request import Request
from baton.values import value


@value(frozen=True, slots=True)
class DecodeGroup:
    """The members at one moment; shared between steps, so nobody writes to it."""

    by_client: Mapping[int, Sequence[Request]]
    """Nobody, where they are only counted."""
    num_tokens: Mapping[str, int]
    """One for each request id; likewise."""
    count: int


_NOBODY: Mapping[int, Sequence[Request]] = {}
_NO_TOKENS: Mapping[str, int] = {}
NO_DECODES = DecodeGroup(_NOBODY, _NO_TOKENS, 0)


class DecodeSet:
    """Who decodes, and who needs a block when. Every member computes one token in every tick."""

    def __init__(self, block_size: int, known_token: int | None = None) -> None:
        """`known_token`: what every member draws in every tick; None: somebody else appends what they draw."""
        self._block_size = block_size
        self._known_token = known_token
        self._num_in_flight = 0
        """Of the ticks, those that are not committed; kept where tokens are known."""
        self._members: dict[str, Request] = {}
        self._tick = 0
        """Steps in which the members computed a token."""
        self._calendar: dict[int, list[Request]] = {}
        """Who needs a block before which tick. May name requests that have left, or joined anew."""
        self._due_at: dict[str, int] = {}
        self._over: dict[int, set[str]] = {}
        """Who computes nothing any more from which tick on: by then its length is reached, whatever it draws."""
        self._over_at: dict[str, int] = {}
        self._context: dict[str, int] = {}
        """Of each, its computed tokens less the ticks that have been: what does not change while it decodes."""
        self._num_fixed = 0
        """Their sum."""
        self._group: DecodeGroup | None = NO_DECODES

    @property
    def request_ids(self) -> Collection[str]:
        return self._members.keys()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._members

    @property
    def num_context_tokens(self) -> int:
        """Computed tokens of all members, those in flight included; what they have behind them in the next tick."""
        return self._num_fixed + self._tick * len(self._members)

    @property
    def num_needy(self) -> int:
        """At most so many members have no slot for the next tick."""
        return len(self._calendar.get(self._tick + 1, ()))

    @property
    def num_ticks_left(self) -> int:
        """So many ticks are nobody's last one."""
        return min(self._over, default=self._tick + 2) - 2 - self._tick

    def bring_up(self) -> None:
        """Every member knows its tokens; where those are known and somebody wants to look."""
        if self._known_token is not None:
            for request in self._members.values():
                self._bring_up(request, self._known_token)

    def committed(self) -> list[Request]:
        """Where tokens are known, and the last tick is committed: who filled a block with it or reached its length.

        In the order in which they joined. They are as if their step was computed and its token not appended yet.
        """
        token_id, tick = self._known_token, self._tick + 1
        if token_id is None or not self._num_in_flight:
            return []
        self._num_in_flight = 0
        full, over = self._calendar.get(tick), self._over.get(tick)
        if full is None and over is None:
            return []
        found = {r.request_id: r for r in full or () if self._due_at.get(r.request_id) == tick}
        if over:
            found |= {request_id: self._members[request_id] for request_id in over}
            if len(found) > 1:
                found = {request_id: found[request_id] for request_id in self._members if request_id in found}
        # Who joins with this tick's step did not decode in it: others deal with what that step brought.
        return [request for request in found.values() if self._bring_up(request, token_id, num_spared=1)]

    def skip_quiet(self, most: int) -> int:
        """Ticks, so many at most, in which nobody needs a block and nobody fills one; how many there were."""
        calendar, tick = self._calendar, self._tick
        last = tick + most
        while tick < last and tick + 1 not in calendar and tick + 2 not in calendar:
            tick += 1
        num_quiet, self._tick = tick - self._tick, tick
        return num_quiet

    def join(self, request: Request, num_slots: int, num_ticks: int) -> None:
        """It computes a token in each of the next `num_ticks` ticks, with blocks for `num_slots` tokens in all."""
        self._members[request.request_id] = request
        self._group = None
        fixed = self._context[request.request_id] = request.num_computed_tokens - self._tick
        self._num_fixed += fixed
        self._note_due(request, self._tick + 1 + num_slots - request.num_computed_tokens)
        over_at = self._over_at[request.request_id] = self._tick + 1 + num_ticks
        self._over.setdefault(over_at, set()).add(request.request_id)

    def leave(self, request_id: str) -> bool:
        """It computes no more here; False when it did not."""
        request = self._members.pop(request_id, None)
        if request is None:
            return False
        if self._known_token is not None:
            self._bring_up(request, self._known_token)
        del self._due_at[request_id]
        self._num_fixed -= self._context.pop(request_id)
        over_at = self._over_at.pop(request_id)
        self._over[over_at].remove(request_id)
        if not self._over[over_at]:
            del self._over[over_at]
        self._group = None
        return True

    def take_needy(self) -> list[Request]:
        """Members without a slot for the next tick. Each must be `grown` or `leave` before it."""
        tick = self._tick + 1
        if tick in self._over:
            for request_id in tuple(self._over[tick]):
                self.leave(request_id)
        named = self._calendar.pop(tick, None)
        if named is None:
            return []
        # Whoever left and joined anew may be named twice for one tick.
        needy = {r.request_id: r for r in named if self._due_at.get(r.request_id) == tick}
        if self._known_token is not None:
            for request in needy.values():
                self._bring_up(request, self._known_token)
        return list(needy.values())

    def grown(self, request: Request) -> None:
        """It got a block."""
        self._note_due(request, self._due_at[request.request_id] + self._block_size)

    def tick(self) -> DecodeGroup:
        """All members compute a token in this step."""
        if self._known_token is not None:
            count = len(self._members)
            if not count:
                self._num_in_flight = 0
                return NO_DECODES
            self._tick += 1
            self._num_in_flight = 1
            return DecodeGroup(_NOBODY, _NO_TOKENS, count)
        if self._group is None:
            by_client: dict[int, list[Request]] = {}
            for request in self._members.values():
                by_client.setdefault(request.client_index, []).append(request)
            self._group = DecodeGroup(by_client, dict.fromkeys(self._members, 1), len(self._members))
        if self._members:
            self._tick += 1
        return self._group

    def _bring_up(self, request: Request, token_id: int, num_spared: int = 0) -> bool:
        """Count what it computed, and append what it drew but for the last ones; whether there was anything."""
        num_computed_tokens = self._context[request.request_id] + self._tick - self._num_in_flight
        num_new = num_computed_tokens - request.num_computed_tokens
        # Of whom joins in a step in flight more is counted than is computed.
        if num_new <= 0:
            return False
        request.num_computed_tokens = num_computed_tokens
        request.output_token_ids += [token_id] * (num_new - num_spared)
        return True

    def _note_due(self, request: Request, tick: int) -> None:
        self._due_at[request.request_id] = tick
        self._calendar.setdefault(tick, []).append(request)
