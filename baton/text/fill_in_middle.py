"""Prompts of which a model writes the middle: text before the gap, and text behind it (fill-in-the-middle, FIM).

Models that were trained for that have special tokens around both texts. Which they are is found by the tokenizer's
added tokens. llama.cpp's `/infill` orders the texts in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_MARKERS = (
    # Qwen2.5-Coder, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek-Coder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""For each family of models the tokens before the first text, before the second one, and before what the model writes.

CodeLlama's are pieces of its vocabulary, no added tokens, and Mistral's are in the tokenizers of models that were not
trained for it, too: neither is here.
"""


class AddedTokens(Protocol):
    """The added tokens of a tokenizer."""

    def added_id(self, text: str) -> int | None:
        """The id of the added token with this text; None: there is none."""
        ...


@dataclass(frozen=True, slots=True)
class GapTokens:
    """The ids of a model's tokens for fill-in-the-middle."""

    prefix: int
    suffix: int
    middle: int

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The token ids of a prompt from those of both texts."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_gap_tokens(tokenizer: AddedTokens) -> GapTokens | None:
    """The tokens for fill-in-the-middle that a tokenizer has; None if it has not all three of a family."""
    for markers in _MARKERS:
        ids = [token for text in markers if (token := tokenizer.added_id(text)) is not None]
        if len(ids) == len(markers):
            return GapTokens(*ids)
    return None
