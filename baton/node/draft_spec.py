"""Finds the model that drafts beside the node's own, and checks that both have the same tokens."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError
from baton.messages.speculation import SpeculationConfig
from baton.runner import DraftSpec
from baton.text.tokenizer import Tokenizer


def draft_spec(speculation: SpeculationConfig | None, model: Path) -> DraftSpec | None:
    """What to load for drafts beside the model in a directory; None: no model drafts.

    Raises ConfigError if the two models don't have the same tokens.
    """
    if speculation is None or speculation.method != "draft_model":
        return None
    directory = Path(speculation.model)
    if (difference := _difference(Tokenizer.load(directory), Tokenizer.load(model))) is not None:
        raise ConfigError(
            f"the draft model in {directory} has other tokens than the model in {model} ({difference}); choose a draft "
            "model with the same tokenizer"
        )
    quantization = None if speculation.quantization == "off" else speculation.quantization
    return DraftSpec(directory, speculation.num_speculative_tokens, quantization)


def _difference(drafting: Tokenizer, own: Tokenizer) -> str | None:
    """The first token id that two tokenizers have different texts for; None: they have the same tokens."""
    theirs, ours = drafting.tokens(), own.tokens()
    if theirs == ours:
        return None
    first = min(id for id in theirs.keys() | ours.keys() if theirs.get(id) != ours.get(id))
    return f"token {first} is {theirs.get(first)!r:.40} there and {ours.get(first)!r:.40} here"
