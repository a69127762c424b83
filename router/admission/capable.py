"""Checks what a request needs of the model beside generating."""

from __future__ import annotations

from baton.messages.capabilities import Capability, check_capable
from baton.messages.generation import ModelCard

_ALL = frozenset(Capability)


def check_can(card: ModelCard, capability: Capability, *, is_taken: bool = True) -> None:
    """Raises UnsupportedRequest for a model that can't do this, or whose router does not take it.

    A model of which no node is known yet may be able to do everything.
    """
    can = card.capabilities or _ALL
    check_capable(card.name, {capability}, can if is_taken else can - {capability})
