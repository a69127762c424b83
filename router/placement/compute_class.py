"""Which nodes are assumed to compute equally fast, and how fast one kind is by what is known of another. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.messages.node import ONE_RANK, NodeDescription, NodeShape
from router.placement.rates import StepRates


@dataclass(frozen=True, slots=True)
class ComputeClass:
    """What nodes have in common that are assumed to compute equally fast until their steps show otherwise."""

    model_fingerprint: str = ""
    numerics: str = ""
    shape: NodeShape = ONE_RANK
    num_threads: int = 0
    """Threads that compute the model; 0: not known."""

    @classmethod
    def of(cls, node: NodeDescription) -> ComputeClass:
        """The class of a node."""
        return cls(node.model_fingerprint, node.numerics, node.shape, node.num_threads)

    def is_like(self, other: ComputeClass) -> bool:
        """Whether both compute the same model by the same kernels, so that only their sizes differ."""
        return (self.model_fingerprint, self.numerics) == (other.model_fingerprint, other.numerics)

    def assumed(self, known: StepRates, of: ComputeClass) -> StepRates:
        """The rates that this class is assumed to have, from those of another one.

        Work is divided among threads, which the ranks of a node share; where their number is not known, each rank
        counts as much. A step of several stages is computed in as many micro-batches, each of which reads all weights.
        """
        if not self.is_like(of):
            return known
        if self.num_threads and of.num_threads:
            slower = of.num_threads / self.num_threads
        else:
            slower = of.shape.num_ranks / self.shape.num_ranks
        return replace(
            known,
            step_ms=known.step_ms * slower * self.shape.pp / of.shape.pp,
            token_ms=known.token_ms * slower,
            sequence_ms=known.sequence_ms * slower,
            context_ms=known.context_ms * slower,
        )
