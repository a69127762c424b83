"""How a node's model is divided among processes. It stands apart since operators' commands need no more of a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class NodeShape:
    """A node's numbers of ranks and of stages; as text `tp2` or `tp2 pp2`."""

    tp: int = 1
    """Ranks that compute each layer together, each its own columns and attention heads."""
    pp: int = 1
    """Stages, each of which has consecutive layers and `tp` ranks."""

    @classmethod
    def of(cls, tp: int, pp: int) -> NodeShape:
        """The shape that a message says; 0 is that of a version that does not say it."""
        return cls(max(1, tp), max(1, pp))

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp{self.tp}" if self.pp == 1 else f"tp{self.tp} pp{self.pp}"


ONE_RANK = NodeShape()
"""The shape of a node whose model is computed by its own process alone."""
