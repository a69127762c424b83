"""Running requests that compute one token per step, at a cost per step that is little more than the token itself.

What a step has to decide about such a request is known in advance: the step before which it needs a block, the step in
which it reaches its length (a calendar has both), and the output length up to which its commit only appends a token
(`Request.append_only_until`). The scheduler therefore does not look at each of them in each step, and the group of them
that a step schedules is built once and used until one joins or leaves.

A request joins when the step that computes the last of its known tokens is decided. Whether that step's token ends it
is known later, and the next step may be decided before. Ticks count decided steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from baton.engine.request import Request
from baton.values import value


@value(frozen=True, slots=True)
class DecodeGroup:
    """The members at one moment. Several steps share one group, so it is never changed."""

    by_client: Mapping[int, Sequence[Request]]
    """The members whose tokens the runner's output names, by client index."""
    num_tokens: Mapping[str, int]
    """The number 1 for each of their request ids."""
    count: int
    """The number of all members."""


NO_DECODES = DecodeGroup({}, {}, 0)


class DecodeSet:
    """The requests that decode, and when each needs its next block. Every member computes one token in every tick."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._members: dict[str, Request] = {}
        self._tick = 0
        """Steps in which the members computed a token."""
        self._calendar: dict[int, list[Request]] = {}
        """The members that need a block before a tick. It may name requests that have left, or have joined again."""
        self._due_at: dict[str, int] = {}
        """The tick before which each member needs a block."""
        self._over: dict[int, set[str]] = {}
        """The members that compute nothing from a tick on, because they have reached their length by then."""
        self._over_at: dict[str, int] = {}
        """That tick of each member."""
        self._context: dict[str, int] = {}
        """Each member's computed tokens less the present tick, which does not change while it decodes."""
        self._num_fixed = 0
        """The sum of these numbers."""
        self._group: DecodeGroup | None = NO_DECODES

    @property
    def request_ids(self) -> Collection[str]:
        """The ids of all members."""
        return self._members.keys()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._members

    @property
    def num_context_tokens(self) -> int:
        """Computed tokens of all members, those of steps in flight included."""
        return self._num_fixed + self._tick * len(self._members)

    @property
    def num_needing_block(self) -> int:
        """An upper bound of the members without a slot for the next tick."""
        return len(self._calendar.get(self._tick + 1, ()))

    @property
    def num_ticks_left(self) -> int:
        """The number of ticks to come in which no member computes its last token."""
        return min(self._over, default=self._tick + 2) - 2 - self._tick

    def committed(self) -> Sequence[Request]:
        """Members whose part of a committed step the scheduler has to process although no `DecodeGroup` names them.

        There are none, except in a subclass whose groups leave members out. Such members are in the state in which
        their step is computed and its token is not appended yet.
        """
        return ()

    def join(self, request: Request, num_slots: int, num_ticks: int) -> None:
        """Add a request that computes a token in each of the next `num_ticks` ticks.

        Its blocks hold `num_slots` tokens in all.
        """
        self._members[request.request_id] = request
        self._group = None
        fixed = self._context[request.request_id] = request.num_computed_tokens - self._tick
        self._num_fixed += fixed
        self._note_due(request, self._tick + 1 + num_slots - request.num_computed_tokens)
        over_at = self._over_at[request.request_id] = self._tick + 1 + num_ticks
        self._over.setdefault(over_at, set()).add(request.request_id)

    def leave(self, request_id: str) -> bool:
        """Remove a request. Returns whether it was a member."""
        if self._members.pop(request_id, None) is None:
            return False
        del self._due_at[request_id]
        self._num_fixed -= self._context.pop(request_id)
        over_at = self._over_at.pop(request_id)
        self._over[over_at].remove(request_id)
        if not self._over[over_at]:
            del self._over[over_at]
        self._group = None
        return True

    def pop_needing_block(self) -> list[Request]:
        """Take the members without a slot for the next tick. Each must get a block (`grown`) or `leave` before it."""
        tick = self._tick + 1
        if tick in self._over:
            for request_id in tuple(self._over[tick]):
                self.leave(request_id)
        named = self._calendar.pop(tick, None)
        if named is None:
            return []
        # A request that left and joined again may be named twice for one tick.
        return list({r.request_id: r for r in named if self._due_at.get(r.request_id) == tick}.values())

    def note_growth(self, request: Request) -> None:
        """Note that a member got a block, so it needs the next one `block_size` ticks later."""
        self._note_due(request, self._due_at[request.request_id] + self._block_size)

    def tick(self) -> DecodeGroup:
        """Let all members compute a token in the step that is being decided."""
        if self._group is None:
            by_client: dict[int, list[Request]] = {}
            for request in self._members.values():
                by_client.setdefault(request.client_index, []).append(request)
            self._group = DecodeGroup(by_client, dict.fromkeys(self._members, 1), len(self._members))
        if self._members:
            self._tick += 1
        return self._group

    def _note_due(self, request: Request, tick: int) -> None:
        self._due_at[request.request_id] = tick
        self._calendar.setdefault(tick, []).append(request)
