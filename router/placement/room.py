"""Whether a node has room for one more request. Pure.

Nodes have queues of their own, but a request that waits there can neither be overtaken nor moved any more, and is lost
with its node. So a router gives a node little more than it can run. A node has room if it has all of these:

1. seats: some headroom beyond the sequences that it runs at once, so that it never falls idle between two reports, and
   as much again, two at least, for requests that go ahead of those that wait there (`router.admission.turns`);
2. tokens: uncomputed ones of its prompts for a few steps at most;
3. blocks: its KV cache holds what all of its requests have, so that requests with seats don't take turns for blocks.

What a node does not say is no bound: how many sequences it runs, or the blocks of nodes of earlier versions. A node
without any request always has room, unless its blocks are offered to others or in quarantine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, NodeDescription

_STEPS_UNTIL_COUNTED = 2
"""The first report of a step behind a dispatch may be of one that was decided before. The second has the leg, unless
the message took longer than a step."""


class Lack(enum.Enum):
    """What a node without room lacks."""

    SEATS = "seats"
    TOKENS = "tokens"
    KV = "kv"

    @property
    def story(self) -> str:
        """What is so of a node that lacks this, as the rest of a sentence."""
        return _STORIES[self]


_STORIES = {
    Lack.SEATS: "has as many requests as it runs at once",
    Lack.TOKENS: "has tokens of prompts to compute for several steps",
    Lack.KV: "has requests that need its whole KV cache",
}


@dataclass(frozen=True, slots=True)
class RoomRules:
    """How much of its resources a node may be promised."""

    kv_room: float = 1.0
    """The share of its blocks; 0: any number."""
    steps_ahead: int = 4
    """For so many steps it may have uncomputed tokens of prompts."""

    def lack(
        self,
        node: NodeDescription,
        load: LoadReport,
        sequences: float,
        unreported_blocks: int,
        *,
        goes_ahead: bool = False,
    ) -> Lack | None:
        """What the node lacks for a further request; None: it has room.

        `sequences`: all that it has, including our own that it has not reported yet, as of `unreported_blocks`.
        `goes_ahead`: the request goes ahead of those that wait there for seats, see `router.admission.turns`.
        """
        if node.max_num_seqs:
            headroom = node.max_num_seqs // 8 or 1
            if goes_ahead:
                headroom += max(2, headroom)
            if load.waiting >= headroom or sequences >= node.max_num_seqs + headroom:
                return Lack.SEATS
        is_told = load.promised_blocks > 0 or load.running == 0
        blocks = load.promised_blocks + unreported_blocks
        if self.kv_room and is_told and blocks >= self.kv_room * load.total_blocks > 0:
            return Lack.KV
        step = node.max_num_batched_tokens
        return Lack.TOKENS if step and load.uncomputed_tokens >= self.steps_ahead * step else None


DEFAULT_RULES = RoomRules()


class UnreportedBlocks:
    """The blocks of legs that one node was sent and has not reported yet."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._legs: dict[AttemptKey, tuple[int, int]] = {}
        """For each leg its blocks, and in how many more reports of steps it may be missing."""

    def add(self, attempt: AttemptKey, num_blocks: int) -> None:
        """A leg was sent that will need so many blocks. A second message of an attempt changes nothing."""
        if attempt not in self._legs:
            self._legs[attempt] = num_blocks, _STEPS_UNTIL_COUNTED
            self.num_blocks += num_blocks

    def remove(self, attempt: AttemptKey) -> None:
        """A leg has ended. Idempotent."""
        self.num_blocks -= self._legs.pop(attempt, (0, 0))[0]

    def step_reported(self) -> None:
        """The node has reported a step, or that it has nothing to compute."""
        for attempt, (num_blocks, left) in list(self._legs.items()):
            if left == 1:
                self.remove(attempt)
            else:
                self._legs[attempt] = num_blocks, left - 1

    def clear(self) -> None:
        """Nothing that was sent runs any more."""
        self._legs.clear()
        self.num_blocks = 0
