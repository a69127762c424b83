"""A sender as it is published to receivers: the memories of its parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import PeerMemory

MAX_PARTS = 64
"""The most parts of a node."""


def part_name(incarnation: str, index: int) -> str:
    """The name of the transfer agent of one part of a node; the first part's is the incarnation itself."""
    return incarnation if index == 0 else f"{incarnation}/{index}"


def node_of(agent: str) -> str:
    """The incarnation whose part has the transfer agent of this name."""
    return agent.partition("/")[0]


@dataclass(frozen=True, slots=True)
class PeerNode:
    """One incarnation of a sender. Most have one part, whose memory holds all layers."""

    incarnation: str
    parts: Sequence[PeerMemory]
    """The memory of each part, in the order of the layers; `PeerMemory.incarnation` is the name of the part's agent."""

    @classmethod
    def of(cls, memory: PeerMemory) -> PeerNode:
        """A node with one part."""
        return cls(memory.incarnation, (memory,))

    def layers_of_parts(self, num_layers: int) -> Sequence[range]:
        """The layers of each part. Raises TransferFailed unless each of the model's layers is in one part, in order."""
        layers = [range(num_layers) if part.layers is None else part.layers for part in self.parts]
        problem = parts_problem(layers, num_layers)
        if problem is not None:
            raise TransferFailed(TransferCause.LAYOUT_MISMATCH, f"{self.incarnation!r}: {problem}")
        return layers


def parts_problem(layers: Sequence[range], num_layers: int) -> str | None:
    """Why these can't be the layers of a node's parts; None: each of the model's layers is in one of them, in order."""
    if not 1 <= len(layers) <= MAX_PARTS:
        return f"a node has 1 to {MAX_PARTS} parts, not {len(layers)}"
    bounds = [0, *(bound for part in layers for bound in (part.start, part.stop)), num_layers]
    follow = all(before == after for before, after in zip(bounds[::2], bounds[1::2], strict=True))
    if follow and all(part.step == 1 and len(part) for part in layers):
        return None
    named = ", ".join(f"{part.start}..{part.stop - 1}" for part in layers)
    return f"its parts must have the layers 0..{num_layers - 1} once and in order, and have {named}"
