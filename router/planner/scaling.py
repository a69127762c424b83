"""The number of nodes: what a scaler is asked next, what its answers mean, and how each growth of a pool goes on. Pure.

    ASKING     the pool is to have more nodes
    STARTING   whoever runs them knows, and they start
    SETTLED    they serve
    CANCELLED  the pool is not to grow: that was refused
    FAILED     nobody could be asked in time, or the nodes don't serve in time

How a node is taken away is a move (`router.planner.moves`). The rules:

1. One call at a time. Before any change the sizes of the pools are known, and no older than FRESH_S.
2. After a failed call the next one comes later and later, and is `observe`: the failed one may have had its effect.
3. After a change that was refused nothing is changed for a while, which doubles with each refusal in a row.
4. A growth names a number of nodes and may be asked again; a node is taken away by its name.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

from baton.machine import Machine
from baton.messages.node import Role
from baton.values import value
from router.planner.moves import ASK_S, MoveEvent
from router.planner.size import PoolState
from router.scalers.scaler import PoolSize, ScalerFailed, ScalerFault

OBSERVE_S = 10.0
FRESH_S = 45.0
"""Sizes that are older say nothing; a call takes up to 30 s."""
LEVEL_S = 10.0
"""Pools are settled when they have had all their nodes for so many seconds: this router needs some to see them."""
START_S = 600.0
"""Nodes that don't serve so many seconds after they were asked for have failed to start."""
_FIRST_RETRY_S, _LAST_RETRY_S = 2.0, 120.0
_FIRST_REST_S, _LAST_REST_S = 60.0, 1800.0
_FINAL: Final = frozenset({ScalerFault.DENIED, ScalerFault.UNKNOWN_POOL, ScalerFault.UNKNOWN_NODE, ScalerFault.REFUSED})
"""Faults by which nothing was changed, and which another call would have, too."""
_KEPT = 20
"""Ended growths that are kept for operators."""


class GrowthState(enum.Enum):
    """The state of a growth."""

    ASKING = "asking"
    STARTING = "starting"
    SETTLED = "settled"
    CANCELLED = "cancelled"
    FAILED = "failed"


class GrowthEvent(enum.Enum):
    """What happens to a growth."""

    ACCEPTED = "accepted"
    """Whoever runs the nodes knows."""
    REFUSED = "refused"
    SERVE = "serve"
    """The pool has as many nodes."""
    LATE = "late"
    """The growth has taken too long."""


_S, _E = GrowthState, GrowthEvent
GROWTH_TABLE: Final[dict[tuple[GrowthState, GrowthEvent], GrowthState]] = {
    (_S.ASKING, _E.ACCEPTED): _S.STARTING,
    (_S.ASKING, _E.REFUSED): _S.CANCELLED,
    (_S.ASKING, _E.LATE): _S.FAILED,
    (_S.STARTING, _E.SERVE): _S.SETTLED,
    (_S.STARTING, _E.LATE): _S.FAILED,
}
GROWTH_ENDS: Final = (_S.SETTLED, _S.CANCELLED, _S.FAILED)


class Growth:
    """The growth of one pool."""

    def __init__(self, pool: str, before: int, after: int, reason: str, now: float) -> None:
        self.pool = pool
        self.before = before
        self.after = after
        self.reason = reason
        self.began_at = self._since = now
        self.ended_at: float | None = None
        self._machine = Machine(f"growth of {pool}", GrowthState.ASKING, GROWTH_TABLE)

    @property
    def state(self) -> GrowthState:
        return self._machine.state

    @property
    def told(self) -> str:
        """What grows and why, for people."""
        return f"{self.before} to {self.after} nodes: {self.reason}"

    def feed(self, event: GrowthEvent, now: float) -> None:
        """Take an event. Raises IllegalEvent."""
        self._machine.feed(event)
        self._since = now
        if self.state in GROWTH_ENDS:
            self.ended_at = now

    def observed(self, size: PoolSize | None, now: float) -> GrowthEvent | None:
        """What the size of its pool shows; None: nothing new, or the size is not known."""
        in_state_s = now - self._since
        if self.state is GrowthState.ASKING:
            if size is not None and size.want >= self.after:
                return GrowthEvent.ACCEPTED
            return GrowthEvent.LATE if in_state_s >= ASK_S else None
        if size is not None and size.have >= self.after:
            return GrowthEvent.SERVE
        return GrowthEvent.LATE if in_state_s >= START_S else None


@value(frozen=True, slots=True)
class Observe:
    """Ask for the sizes of all pools."""

    told: str = "asked for the sizes of its pools"


@value(frozen=True, slots=True)
class Grow:
    """Ask for so many nodes of a pool."""

    pool: str
    nodes: int

    @property
    def told(self) -> str:
        return f"asked for {self.nodes} nodes of pool {self.pool}"


@value(frozen=True, slots=True)
class Remove:
    """Ask for the end of a node."""

    name: str

    @property
    def told(self) -> str:
        return f"asked to take {self.name} away"


Ask: TypeAlias = Observe | Grow | Remove
Answer: TypeAlias = Mapping[str, PoolSize] | ScalerFailed | None
"""The sizes of the pools, why the call failed, or that a change was accepted."""


@value(frozen=True, slots=True)
class GrowthEnded:
    """A growth has ended: tell operators."""

    growth: Growth


class Scaling:
    """What is known of the pools of a cluster, and the growths that go on. Seconds on the caller's clock."""

    def __init__(self) -> None:
        self.sizes: Mapping[str, PoolSize] = {}
        """The sizes of the pools, by role, as they were observed last."""
        self.trouble = ""
        """What the scaler failed to do, for people; empty: nothing."""
        self.growths: list[Growth] = []
        self.ended: list[Growth] = []
        """The latest that ended, the oldest first."""
        self.num_ended: Counter[tuple[str, GrowthState]] = Counter()
        self.num_failures: Counter[ScalerFault] = Counter()
        self._observed_at = -math.inf
        self._level_since: dict[str, float] = {}
        """Since when each pool has had all its nodes; without those that have not."""
        self._must_observe = True
        self._asks_at = 0.0
        self._rests_until = 0.0
        self._num_failed = self._num_refused = 0
        """In a row."""

    def state(self, roles: Collection[Role], num_moves: int, now: float) -> PoolState:
        """What is known of the pools of these roles. `num_moves`: nodes that move or leave."""
        if now >= self._observed_at + FRESH_S or now < self._rests_until:
            return PoolState.BLIND
        names = self._pools_of(roles).keys()
        is_level = all(now >= self._level_since.get(name, math.inf) + LEVEL_S for name in names)
        is_settled = is_level and not num_moves and not any(growth.pool in names for growth in self.growths)
        return PoolState.SETTLED if is_settled else PoolState.CHANGING

    def num_coming(self, roles: Collection[Role]) -> int:
        """The nodes that the pools of these roles are to have and that don't serve yet."""
        return sum(max(0, size.want - size.have) for size in self._pools_of(roles).values())

    def only(self, roles: Collection[Role]) -> frozenset[str]:
        """The names of the only nodes of these roles that can be taken away; empty: any can."""
        return frozenset(size.next_out for size in self._pools_of(roles).values() if size.next_out)

    def _pools_of(self, roles: Collection[Role]) -> Mapping[str, PoolSize]:
        return {role.value: self.sizes[role.value] for role in roles if role.value in self.sizes}

    def known(self, now: float) -> Mapping[str, PoolSize]:
        """The sizes of the pools; empty where the last that were observed are too old."""
        return self.sizes if now < self._observed_at + FRESH_S else {}

    def told(self, now: float) -> str:
        """What is wrong with the scaler of the pools, for people; empty: nothing."""
        parts = [] if self.known(now) else ["the sizes of the pools are not known"]
        if self.trouble:
            parts.append(f"the scaler was {self.trouble}")
        if now < max(self._rests_until, self._asks_at):
            what = "nothing is changed" if now < self._rests_until else "it is not asked"
            parts.append(f"{what} for {max(self._rests_until, self._asks_at) - now:.0f} s")
        return "; ".join(parts)

    def grow(self, missing: Mapping[Role, int], count: int, most: int, reason: str, now: float) -> list[Growth]:
        """Let the pools grow by so many nodes together. `missing`: what each role lacks; most of all gets a node first.

        `most`: these pools are to have no more together, however few of their nodes this router sees. A role without a
        pool gets its nodes from the other one, by a move. Without any pool nothing grows.
        """
        short, more = dict(missing), Counter[str]()
        roles = {role for role in missing if role.value in self.sizes}
        room = most - sum(self.sizes[role.value].want for role in roles)
        for _ in range(min(count, room) if roles else 0):
            role = max(roles, key=lambda one: (short[one], one.value))
            short[role] -= 1
            more[role.value] += 1
        grown = [
            Growth(pool, self.sizes[pool].want, self.sizes[pool].want + number, reason, now)
            for pool, number in more.items()
        ]
        self.growths += grown
        return grown

    def follow(self, now: float) -> list[GrowthEnded]:
        """Take what the sizes show now."""
        ended: list[GrowthEnded] = []
        sizes = self.known(now)
        for growth in list(self.growths):
            # Several events may be due at once.
            while growth.ended_at is None:
                event = growth.observed(sizes.get(growth.pool), now)
                if event is None:
                    break
                ended += self._feed(growth, event, now)
        return ended

    def cancel(self, growth: Growth, now: float) -> list[GrowthEnded]:
        """Don't ask for it."""
        ended = self._feed(growth, GrowthEvent.REFUSED, now)
        self._rest(now)
        return ended

    def next_ask(self, to_remove: Sequence[str], now: float) -> Ask | None:
        """What is to be asked now, if no call goes on. `to_remove`: the nodes that are emptied."""
        if now < self._asks_at:
            return None
        if not self._must_observe and now < self._observed_at + FRESH_S:
            for growth in self.growths:
                if growth.state is GrowthState.ASKING:
                    return Grow(growth.pool, growth.after)
            for name in to_remove:
                return Remove(name)
        return Observe() if self._must_observe or now >= self._observed_at + OBSERVE_S else None

    def answered(
        self, ask: Ask, answer: Answer, to_remove: Sequence[str], now: float
    ) -> tuple[list[GrowthEnded], MoveEvent | None]:
        """Take the answer to a call. Returns the growths that ended, and what the node's move is told, if there is one.

        `to_remove`: as for `next_ask`.
        """
        if isinstance(answer, ScalerFailed):
            return self._failed(ask, answer, now)
        if isinstance(ask, Observe):
            assert answer is not None
            self._observed(answer, now)
            ended = self.follow(now)
            asks = to_remove or any(growth.state is GrowthState.ASKING for growth in self.growths)
            if not asks:
                self._num_failed = 0
                self.trouble = self.trouble if now < self._rests_until else ""
            return ended, None
        self._num_failed, self._num_refused, self.trouble = 0, 0, ""
        self._level_since.clear()
        if isinstance(ask, Remove):
            return [], MoveEvent.ACCEPTED
        for growth in self._asked(ask):
            self._feed(growth, GrowthEvent.ACCEPTED, now)
        return [], None

    def forget_sizes(self) -> None:
        """A call was given up, or others may have changed the pools: ask before the next change."""
        self._must_observe, self._observed_at = True, -math.inf
        self._level_since.clear()

    def _observed(self, sizes: Mapping[str, PoolSize], now: float) -> None:
        level_since: dict[str, float] = {}
        for name, size in sizes.items():
            if size.want == size.have:
                is_same = name in self.sizes and self.sizes[name].want == size.want
                level_since[name] = self._level_since.get(name, now) if is_same else now
        self._level_since = level_since
        self.sizes, self._observed_at, self._must_observe = sizes, now, False

    def _failed(self, ask: Ask, error: ScalerFailed, now: float) -> tuple[list[GrowthEnded], MoveEvent | None]:
        self.num_failures[error.fault] += 1
        self.trouble = f"{ask.told}: {error}"
        self._num_failed += 1
        self._must_observe = True
        self._asks_at = now + min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (self._num_failed - 1))
        if error.fault not in _FINAL or isinstance(ask, Observe):
            return [], None
        self._rest(now)
        if isinstance(ask, Remove):
            return [], MoveEvent.REFUSED
        return [end for growth in self._asked(ask) for end in self._feed(growth, GrowthEvent.REFUSED, now)], None

    def _rest(self, now: float) -> None:
        self._num_refused += 1
        self._rests_until = now + min(_LAST_REST_S, _FIRST_REST_S * 2.0 ** (self._num_refused - 1))

    def _asked(self, ask: Grow) -> list[Growth]:
        asking = (growth for growth in self.growths if growth.state is GrowthState.ASKING)
        return [growth for growth in asking if (growth.pool, growth.after) == (ask.pool, ask.nodes)]

    def _feed(self, growth: Growth, event: GrowthEvent, now: float) -> list[GrowthEnded]:
        growth.feed(event, now)
        if growth.ended_at is None:
            return []
        self.growths.remove(growth)
        self.num_ended[growth.pool, growth.state] += 1
        self.ended = [*self.ended[1 - _KEPT :], growth]
        return [GrowthEnded(growth)]
