"""Refuses what is longer than the model takes, in words by which clients know that they have to shorten it."""

from __future__ import annotations

from baton.errors import ContextLengthExceeded
from baton.messages.generation import ModelCard


def too_long(field: str, num_tokens: int, longest: int, card: ModelCard, what: str = "tokens") -> ContextLengthExceeded:
    """The refusal of a prompt with so many tokens, of which the model takes at most `longest`."""
    reason = f"has {num_tokens} {what}; {card.name} takes at most {longest}"
    return ContextLengthExceeded(field, reason, num_tokens, longest, card.max_model_len)
