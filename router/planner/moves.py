"""The moves of nodes between roles, or out of the cluster: what each waits for, and what bounds all of them. Pure.

    PLANNED     a node is chosen
    CORDONED    it gets no new requests
    EVACUATING  its streams go to other nodes, or end
    FLIPPING    it takes its new role
    WARMING     it is back, and gets a growing share of the load
    ASKING      whoever runs the nodes is to take it away
    LEAVING     that was accepted, and the node ends
    SETTLED     it has its full share, or is gone
    CANCELLED   the node is not to move any more: it was uncordoned before it flipped, or nobody takes it away
    FAILED      the node is gone, does not come back, or does not go

Rules, which `start` and `follow` keep:

1. The last ready node of a role never moves, and a move that would leave its role without one is cancelled.
2. A node moves at most once in REST_S.
3. A node that operators have cordoned or given a role is theirs.
4. What a node has not finished within EVACUATE_S is left to the change of role, which gives it back to routers, or to
   the end of the node, which drains as always.
5. A node that nobody takes away rests for REFUSED_REST_S.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final, TypeAlias

from cachetools import FIFOCache

from baton.machine import Machine
from baton.messages.node import Role
from baton.values import value

REST_S = 60.0
EVACUATE_S = 20.0
FLIP_S = 120.0
"""A node that is not back with its new role after so many seconds has failed to move: it may have to load a model."""
ASK_S = 120.0
"""After so many seconds a change of the number of nodes that was not accepted is given up."""
LEAVE_S = 300.0
"""A node that is still there so many seconds after it was taken away has failed to go."""
REFUSED_REST_S = 3600.0
WARM_S = 5.0
"""As long as a newcomer's share of the load grows."""
_MOST_RESTING = 10_000
_KEPT = 100
"""Ended moves that are kept for operators."""


class MoveState(enum.Enum):
    """The state of a move."""

    PLANNED = "planned"
    CORDONED = "cordoned"
    EVACUATING = "evacuating"
    FLIPPING = "flipping"
    WARMING = "warming"
    ASKING = "asking"
    LEAVING = "leaving"
    SETTLED = "settled"
    CANCELLED = "cancelled"
    FAILED = "failed"


class MoveEvent(enum.Enum):
    """What happens to a move."""

    BEGIN = "begin"
    CORDON_SEEN = "cordon_seen"
    """All routers know that the node gets no new requests."""
    EMPTY = "empty"
    """The node has nothing left to do."""
    LATE = "late"
    """The move has taken too long."""
    MAY_GO = "may_go"
    """The node is to be taken away, and has nothing left to do or has taken too long."""
    BACK = "back"
    """The node is attached with its new role."""
    WARM = "warm"
    TURNED = "turned"
    """The node is needed where it is."""
    LOST = "lost"
    """The node is gone."""
    ACCEPTED = "accepted"
    """Whoever runs the nodes takes it away."""
    REFUSED = "refused"
    """They don't."""


_S, _E = MoveState, MoveEvent
_MAY_TURN: Final = (_S.PLANNED, _S.CORDONED, _S.EVACUATING)
MOVE_TABLE: Final[dict[tuple[MoveState, MoveEvent], MoveState]] = {
    (_S.PLANNED, _E.BEGIN): _S.CORDONED,
    (_S.CORDONED, _E.CORDON_SEEN): _S.EVACUATING,
    (_S.EVACUATING, _E.EMPTY): _S.FLIPPING,
    (_S.EVACUATING, _E.LATE): _S.FLIPPING,
    (_S.EVACUATING, _E.MAY_GO): _S.ASKING,
    (_S.FLIPPING, _E.BACK): _S.WARMING,
    (_S.FLIPPING, _E.LATE): _S.FAILED,
    (_S.WARMING, _E.WARM): _S.SETTLED,
    (_S.ASKING, _E.ACCEPTED): _S.LEAVING,
    (_S.ASKING, _E.REFUSED): _S.CANCELLED,
    (_S.ASKING, _E.LATE): _S.FAILED,
    (_S.LEAVING, _E.LOST): _S.SETTLED,
    (_S.LEAVING, _E.LATE): _S.FAILED,
    **{(state, _E.TURNED): _S.CANCELLED for state in _MAY_TURN},
    **{(state, _E.LOST): _S.FAILED for state in (*_MAY_TURN, _S.WARMING)},
}
OUT: Final = "none"
"""What people read in place of the role to which a node moves that is taken away."""
ENDS: Final = (_S.SETTLED, _S.CANCELLED, _S.FAILED)


@value(frozen=True, slots=True)
class PlannedNode:
    """What moves need to know of one attached node."""

    name: str
    incarnation: str
    role: Role
    work: float = 0.0
    """Tokens that it has to compute and that its streams have: the node with least of it moves."""
    is_idle: bool = True
    """Whether it has no requests, and no blocks that others read."""
    is_ready: bool = True
    """Whether it takes requests, or would if the planner had not cordoned it."""
    is_operators: bool = False
    """Whether operators have cordoned it or given it a role."""


@value(frozen=True, slots=True)
class Cordon:
    """Send the node no new requests."""

    name: str


@value(frozen=True, slots=True)
class Flip:
    """Give the node its new role, whatever it still has to do."""

    name: str
    incarnation: str
    role: Role


@value(frozen=True, slots=True)
class Uncordon:
    """Send the node requests again."""

    name: str


@value(frozen=True, slots=True)
class Forget:
    """Forget what was planned for a node that is gone for good: another one may get its name."""

    name: str


@value(frozen=True, slots=True)
class MoveEnded:
    """A move has ended: tell operators."""

    move: Move


MoveEffect: TypeAlias = Cordon | Flip | Uncordon | Forget | MoveEnded


class Move:
    """The move of one node to another role, or out of the cluster."""

    def __init__(self, node: PlannedNode, to: Role | None, reason: str, now: float) -> None:
        """`to`: None: the node is to be taken away."""
        self.name = node.name
        self.incarnation = node.incarnation
        self.origin = node.role
        self.to = to
        self.reason = reason
        self.began_at = self.since = now
        """`since`: when it came into its state."""
        self.ended_at: float | None = None
        self._machine = Machine(f"move of {node.name}", MoveState.PLANNED, MOVE_TABLE)

    @property
    def state(self) -> MoveState:
        return self._machine.state

    @property
    def told(self) -> str:
        """What moves and why, for people."""
        return f"{self.origin.value} to {OUT if self.to is None else self.to.value}: {self.reason}"

    @property
    def may_turn(self) -> bool:
        """Whether it can still be cancelled."""
        return self._machine.accepts(MoveEvent.TURNED)

    def feed(self, event: MoveEvent, now: float) -> Sequence[MoveEffect]:
        """Take an event. Returns the effects in the order in which they are to be carried out; raises IllegalEvent."""
        after, self.since = self._machine.feed(event), now
        match after:
            case MoveState.CORDONED:
                return (Cordon(self.name),)
            case MoveState.FLIPPING:
                assert self.to is not None
                return (Flip(self.name, self.incarnation, self.to),)
            case MoveState.WARMING:
                return (Uncordon(self.name),)
            case MoveState.SETTLED:
                self.ended_at = now
                return (MoveEnded(self),) if self.to is not None else (Forget(self.name), MoveEnded(self))
            case MoveState.CANCELLED | MoveState.FAILED:
                self.ended_at = now
                return (Uncordon(self.name), MoveEnded(self))
        return ()

    def observed(self, node: PlannedNode | None, settle_s: float, now: float) -> MoveEvent | None:
        """What the cluster shows of the move; None: nothing new. `node`: the one of this name; None: it is gone."""
        in_state_s = now - self.since
        if self.state is MoveState.FLIPPING:
            if node is not None and node.role is self.to and node.incarnation != self.incarnation:
                self.incarnation = node.incarnation
                return MoveEvent.BACK
            return MoveEvent.LATE if in_state_s >= FLIP_S else None
        if self.state is MoveState.ASKING:
            # A node that ends now may have been taken away by a call whose answer is not known.
            return MoveEvent.LATE if in_state_s >= ASK_S else None
        if node is None or node.incarnation != self.incarnation:
            return MoveEvent.LOST
        if self.may_turn and node.is_operators:
            return MoveEvent.TURNED
        match self.state:
            case MoveState.PLANNED:
                return MoveEvent.BEGIN
            case MoveState.CORDONED if in_state_s >= settle_s:
                return MoveEvent.CORDON_SEEN
            case MoveState.EVACUATING if node.is_idle:
                return MoveEvent.EMPTY if self.to is not None else MoveEvent.MAY_GO
            case MoveState.EVACUATING if in_state_s >= EVACUATE_S:
                return MoveEvent.LATE if self.to is not None else MoveEvent.MAY_GO
            case MoveState.WARMING if in_state_s >= WARM_S:
                return MoveEvent.WARM
            case MoveState.LEAVING if in_state_s >= LEAVE_S:
                return MoveEvent.LATE
        return None


class MoveBook:
    """The moves of a cluster. Its callers carry out the effects in order."""

    def __init__(self) -> None:
        self._open: dict[str, Move] = {}
        """By the name of the node."""
        self._rests_until: FIFOCache[str, float] = FIFOCache(_MOST_RESTING)
        self.ended: list[Move] = []
        """The latest that ended, the oldest first."""
        self.num_ended: Counter[tuple[Role | None, MoveState]] = Counter()
        """By the role to which nodes moved (None: out), and how that ended."""

    @property
    def moves(self) -> Sequence[Move]:
        """The moves that go on, the oldest first."""
        return list(self._open.values())

    def num_changing(self, roles: Collection[Role]) -> int:
        """How many nodes are on their way from these roles: those that warm up are there."""
        return sum(move.origin in roles and move.state is not MoveState.WARMING for move in self._open.values())

    def moves_away(self, name: str) -> bool:
        """Whether the node of this name moves to another role, or out."""
        return name in self._open

    def counts(self, nodes: Iterable[PlannedNode]) -> Mapping[Role, int]:
        """The ready nodes of each role once all moves have ended."""
        counts = Counter(node.role for node in nodes if node.is_ready and node.name not in self._open)
        counts.update(move.to for move in self._open.values() if move.to is not None)
        return counts

    def start(self, to: Role, nodes: Sequence[PlannedNode], reason: str, now: float) -> Move | None:
        """Begin to move the node with least to do to a role; None: no node may move.

        Its effects come from `follow`.
        """
        donors = [node for node in nodes if node.role is not to and node.is_ready and node.name not in self._open]
        able = [node for node in donors if not node.is_operators and now >= self._rests_until.get(node.name, -math.inf)]
        if len(donors) < 2 or not able:
            return None
        node = min(able, key=lambda one: (one.work, one.name))
        move = self._open[node.name] = Move(node, to, reason, now)
        return move

    def start_removal(
        self, nodes: Sequence[PlannedNode], only: Set[str], pressure: Mapping[Role, float], reason: str, now: float
    ) -> Move | None:
        """Begin to take a node away; None: none may go. Its effects come from `follow`.

        `only`: the names of those that can; empty: any. `pressure`: what is left without a node of each role that may
        lose one; the node whose lack is felt least goes.
        """
        counts = Counter(node.role for node in nodes if node.is_ready and node.name not in self._open)
        able = [
            node
            for node in nodes
            if node.is_ready
            and node.name not in self._open
            and not node.is_operators
            and node.role in pressure
            and counts[node.role] > 1
            and now >= self._rests_until.get(node.name, -math.inf)
            and (not only or node.name in only)
        ]
        if not able:
            return None
        node = min(able, key=lambda one: (pressure[one.role], one.work, one.name))
        move = self._open[node.name] = Move(node, None, reason, now)
        return move

    @property
    def to_ask(self) -> Sequence[str]:
        """The nodes that are emptied, and that are to be taken away."""
        return [name for name, move in self._open.items() if move.state is MoveState.ASKING]

    def answered(self, name: str, event: MoveEvent, now: float) -> Sequence[MoveEffect]:
        """Take what became of the call that is to take a node away."""
        move = self._open.get(name)
        if move is None or move.state is not MoveState.ASKING:
            return ()
        effects = self._feed(move, event, now)
        if event is MoveEvent.REFUSED:
            self._rests_until[name] = now + REFUSED_REST_S
        return effects

    def turn(self, to: Role, now: float) -> Sequence[MoveEffect]:
        """Cancel the latest move away from a role, if one can still be cancelled. Empty: there is none."""
        for move in reversed(self._open.values()):
            if move.origin is to and move.may_turn:
                return self._feed(move, MoveEvent.TURNED, now)
        return ()

    def keep(self, roles: Collection[Role], now: float) -> Sequence[MoveEffect]:
        """Keep a node of these roles that was to be taken away, if one still can be kept. Empty: there is none."""
        for move in self._open.values():
            if move.to is None and move.origin in roles and move.may_turn:
                return self._feed(move, MoveEvent.TURNED, now)
        return ()

    def follow(self, nodes: Sequence[PlannedNode], settle_s: float, now: float) -> Sequence[MoveEffect]:
        """Take what the cluster shows now.

        `settle_s`: within so many seconds all routers know that a node is cordoned.
        """
        by_name = {node.name: node for node in nodes}
        effects: list[MoveEffect] = []
        for move in list(self._open.values()):
            # Several events may be due at once.
            while move.ended_at is None and (event := move.observed(by_name.get(move.name), settle_s, now)) is not None:
                effects += self._feed(move, event, now)
            if move.may_turn and not any(self._stay(nodes, move.origin)):
                effects += self._feed(move, MoveEvent.TURNED, now)
        return effects

    def _stay(self, nodes: Sequence[PlannedNode], role: Role) -> Iterator[PlannedNode]:
        """The ready nodes of a role that don't move away."""
        return (node for node in nodes if node.role is role and node.is_ready and node.name not in self._open)

    def _feed(self, move: Move, event: MoveEvent, now: float) -> Sequence[MoveEffect]:
        effects = move.feed(event, now)
        if move.ended_at is not None:
            del self._open[move.name]
            self._rests_until[move.name] = move.began_at + REST_S
            self.num_ended[move.to, move.state] += 1
            self.ended = [*self.ended[1 - _KEPT :], move]
        return effects
