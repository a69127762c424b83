"""What the view knows of one node: its record, its description, its load, and the state that follows from these."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import KVFormat
from baton.messages.node import LoadReport, NodeDescription, Role
from baton.registry import NodeRecord
from router.placement.placement import Candidate
from router.placement.room import Lack, RoomRules, UnreportedBlocks

Partners: TypeAlias = Mapping[str, Mapping[tuple[Role, KVFormat], NodeDescription]]
"""By the name of a version, an attached node of each role and format of the KV."""


class NodeState(enum.Enum):
    """The state of a node as operators see it."""

    STARTING = "Starting"
    READY = "Ready"
    CORDONED = "Cordoned"
    DRAINING = "Draining"
    SUSPECT = "Suspect"
    LOST = "Lost"
    INCOMPATIBLE = "Incompatible"
    """Only shown: the node is ready, but gets no new requests, see `router.placement.versions`."""


@dataclass(slots=True)
class KnownNode:
    """What is known of one incarnation."""

    record: NodeRecord
    cordoned: bool = False
    """Whether an operator wants no new requests on it."""
    registered: bool = True
    description: NodeDescription | None = None
    version: tuple[str, str, KVFormat] | None = None
    """The model, the bits and the format of the KV, of the description."""
    attached: bool = False
    load: LoadReport = field(default_factory=LoadReport)
    others: int = 0
    """Number of sequences of other routers on it, as far as its last report shows."""
    in_flight: dict[AttemptKey, int] = field(default_factory=dict)
    """For each of our legs on it, the number of sequences that it computes."""
    ours: int = 0
    """The sum of `in_flight`: number of our sequences on it."""
    unreported: UnreportedBlocks = field(default_factory=UnreportedBlocks)
    """What our legs will need that it has not reported yet."""
    attached_at: float = 0.0
    last_chosen: int = 0
    lost_at: float | None = None
    detail: str = ""
    """Why it is lost; empty: it is not."""
    notice: str = ""
    """A message of the node for operators."""
    adapters: frozenset[str] = frozenset()
    """Digests of the adapters that it acknowledges."""
    refused_adapters: Mapping[str, str] = field(default_factory=dict)
    """Why it refuses others, by digest."""

    def forget_ours(self) -> None:
        """Forget our legs: nothing that we sent there runs any more."""
        self.in_flight.clear()
        self.ours = 0
        self.unreported.clear()

    @property
    def runs_legs(self) -> bool:
        """Whether it runs legs of requests, as all attached nodes do but encode nodes."""
        return self.description is not None and self.description.role is not Role.ENCODE

    @property
    def state(self) -> NodeState:
        if self.attached:
            if self.load.draining or self.record.state == "draining":
                return NodeState.DRAINING
            return NodeState.CORDONED if self.cordoned else NodeState.READY
        if self.lost_at is None:
            return NodeState.STARTING
        return NodeState.SUSPECT if self.registered else NodeState.LOST

    def lack(self, rules: RoomRules, *, goes_ahead: bool = False) -> Lack | None:
        """What it lacks for a further request; None: it has room. A stream to it was open.

        `goes_ahead`: the request goes ahead of those that wait there for seats.
        """
        assert self.description is not None
        sequences, unreported = self.others + self.ours, self.unreported.num_blocks
        return rules.lack(self.description, self.load, sequences, unreported, goes_ahead=goes_ahead)

    @property
    def pressure(self) -> float:
        """The larger share of its blocks and of its seats that its requests take; 0 where it does not say how many it
        has."""
        description, load = self.description, self.load
        blocks = load.promised_blocks / load.total_blocks if load.total_blocks else 0.0
        seats = description.max_num_seqs if description is not None else 0
        return max(blocks, (self.others + self.ours) / seats if seats else 0.0)

    def candidate(self, rules: RoomRules, *, is_left_out: bool = False) -> Candidate | None:
        """The node as one that can be given work; None if it takes none."""
        description, load = self.description, self.load
        if description is None or not self.runs_legs or self.state is not NodeState.READY:
            return None
        return Candidate(
            description,
            float(self.others + self.ours),
            self.last_chosen,
            self.lack(rules),
            load.uncomputed_tokens,
            load.context_tokens,
            self.attached_at,
            self.adapters,
            is_left_out,
        )


def has_free_seat(candidate: Candidate | None) -> bool:
    """Whether a node that takes work decodes, and could run one more stream at once."""
    if candidate is None or candidate.node.role is not Role.DECODE:
        return False
    seats = candidate.node.max_num_seqs
    return not seats or candidate.load < seats
