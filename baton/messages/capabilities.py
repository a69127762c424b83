"""What a model can be asked to do: decided when it is loaded, published by its nodes, and checked by routers.

A request needs one or several capabilities. It is placed only on nodes that have all of them; if no node has one, the
request is refused with `UnsupportedRequest`, which names it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

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
        raise UnsupportedRequest("model", f"{model!r} can't do {', '.join(lacking)}; it can {', '.join(in_order(can))}")
