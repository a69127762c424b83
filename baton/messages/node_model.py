"""A node's model: what it can be asked to do, and how it is divided among processes.

Nodes publish both. A request needs one or several capabilities. It is placed only on nodes that have all of them; if no
node has one, the request is refused with `UnsupportedRequest`, which names it. Operators' commands import this module,
so it imports little.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from baton.errors import UnsupportedRequest


class Capability(enum.StrEnum):
    """One thing that a model can do, under the name by which clients, operators and messages know it."""

    GENERATE = "generate"
    """Generates tokens."""
    EMBED = "embed"
    """Gives a vector for a text."""
    SCORE = "score"
    """Gives a number for a pair of texts."""
    CLASSIFY = "classify"
    """Gives a number for each of its classes."""
    LORA = "lora"
    """Computes with low-rank adapters."""
    PROMPT_EMBEDS = "prompt_embeds"
    """Takes rows of numbers in place of a prompt's tokens."""
    IMAGE = "image"
    """Takes images beside text."""
    TRANSCRIBE = "transcribe"
    """Writes down speech."""
    ALIGN = "align"
    """Says when the tokens of a transcript are spoken."""


GENERATES = frozenset((Capability.GENERATE,))
TRANSCRIBES = frozenset((Capability.TRANSCRIBE,))
EMBEDS = frozenset((Capability.EMBED,))
GENERATES_AND_EMBEDS = GENERATES | EMBEDS

_KNOWN = frozenset(Capability)


def known_capabilities(names: Iterable[str]) -> frozenset[Capability]:
    """The capabilities of these names, without those that only a newer version knows."""
    return frozenset(Capability(name) for name in names if name in _KNOWN)


def in_order(capabilities: Collection[Capability]) -> list[str]:
    """The names of capabilities in the order in which they are shown."""
    return [capability.value for capability in Capability if capability in capabilities]


def check_capable(model: str, needs: Collection[Capability], can: Collection[Capability]) -> None:
    """Raises UnsupportedRequest, which names what is needed and lacking, unless the model can do all that is needed."""
    lacking = in_order([capability for capability in needs if capability not in can])
    if lacking:
        is_of_text = lacking == [Capability.IMAGE] and Capability.GENERATE in can
        of_text = ": it is served for its text alone" if is_of_text else ""
        raise UnsupportedRequest(
            "model", f"{model!r} can't do {', '.join(lacking)}; it can {', '.join(in_order(can))}{of_text}"
        )


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
