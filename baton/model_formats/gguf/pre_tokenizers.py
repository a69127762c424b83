"""How texts are cut into words before byte-pair merging, for each `tokenizer.ggml.pre` that is known.

The patterns are those of the models' own tokenizer.json files; llama.cpp has the same ones in `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut a text, and what goes with it in the models that use it."""

    steps: tuple[Mapping[str, Any], ...]
    """The steps before bytes become characters, as in tokenizer.json."""
    has_own_words: bool = True
    """Whether the steps find the words; otherwise GPT-2's pattern does, after them."""
    takes_whole_words: bool = False
    """Whether a word that is a token itself is taken without merging."""
    adds_bos: bool = False
    """Whether a text begins with BOS unless the file says otherwise."""
    normalizer: str | None = None
    """The Unicode normal form of texts, such as NFC."""

    def to_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of tokenizer.json."""
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        to_bytes["use_regex"] = not self.has_own_words
        return {"type": "Sequence", "pretokenizers": [*self.steps, to_bytes]}


def _split(pattern: str) -> Mapping[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _cl100k(digits: str) -> Mapping[str, Any]:
    """The pattern of cl100k_base; `digits`: which digits stay together."""
    return _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    )


def _o200k(digits: str, contractions: str) -> Mapping[str, Any]:
    """The pattern of o200k_base, which knows upper and lower case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return _split(rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}")


_ONE_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = PreTokenizer((), has_own_words=False)
_GPT2_ONE_DIGIT = PreTokenizer(({"type": "Digits", "individual_digits": True},), has_own_words=False)
_LLAMA3 = PreTokenizer((_cl100k(_THREE_DIGITS),), takes_whole_words=True, adds_bos=True)
_GPT4 = PreTokenizer((_cl100k(_THREE_DIGITS),))
_QWEN2 = PreTokenizer((_cl100k(_ONE_DIGIT),), normalizer="NFC")
_TEKKEN = PreTokenizer((_o200k(_ONE_DIGIT, ""),), takes_whole_words=True, adds_bos=True)
_GPT4O = PreTokenizer((_o200k(_THREE_DIGITS, f"{_CONTRACTIONS}?"),))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _GPT2_ONE_DIGIT,
    "starcoder": _GPT2_ONE_DIGIT,
    "refact": _GPT2_ONE_DIGIT,
    "command-r": _GPT2_ONE_DIGIT,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _GPT4,
    "smaug-bpe": _GPT4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
"""The known values of `tokenizer.ggml.pre`."""
