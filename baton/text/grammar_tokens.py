"""A model's tokens as llguidance needs them: what each stands for in an output, and which tokens make a text.

The rules:

1. A token stands for what it adds to the text of an output. So an added token that is not special, such as Qwen's
   `<tool_call>`, is text like any other. A special token adds none: a text in a constraint, also one that reads like
   its name, is written with other tokens, and only a grammar can ask for the token itself, by its name without quotes.
2. A text that must follow becomes the tokens of the model's own tokenizer, as long as they stand for exactly this text.
   Otherwise it becomes the longest tokens that fit, from its beginning on. Of a long text, only the beginning does:
   the library asks again at each token.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from baton.text.tokenizer import Tokenizer

_DECODERS = ("ByteLevel", "ByteFallback")
"""The decoders of tokenizers whose tokens have known bytes."""
_MAX_CHARS = 1024
"""The longest text that becomes tokens at a time, longer than any token: all of a constant of 64 KB takes 20 ms."""


class GrammarTokens:
    """The tokens of one model, as `TokenizerWrapper` takes them. Its methods may be called from any thread."""

    bos_token_id = None

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: the number of the model's logits. Raises ValueError for tokens whose bytes are not known."""
        spec = json.loads(tokenizer_json)
        decoder = spec.get("decoder") or {}
        if not any(one["type"] in _DECODERS for one in (decoder, *decoder.get("decoders", ()))):
            raise ValueError(f"its decoder is none of {' and '.join(_DECODERS)}")
        parts = {name: _without_prefix(spec.get(name)) for name in ("normalizer", "pre_tokenizer")}
        if any(spec.get(name) != part for name, part in parts.items()):
            tokenizer_json = json.dumps(spec | parts)
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        backend.encode_special_tokens = True  # the names of special tokens are plain text
        self._tokenizer = Tokenizer(backend)
        known = self._tokenizer.tokens()
        if vocab_size <= max(known):
            raise ValueError(f"vocab size too small; {vocab_size} vs {max(known) + 1}")
        if max(eos_token_ids) >= vocab_size:
            raise ValueError(f"end-of-sequence token {max(eos_token_ids)} is out of range")
        self.eos_token_id = min(eos_token_ids)
        self.tokens = [self._tokenizer.spelling(token) if token in known else b"" for token in range(vocab_size)]
        # Some vocabularies have an end token with a text. It ends the output wherever it comes.
        self._special = {token for token in known if not self._tokenizer.is_visible(token)}.union(eos_token_ids)
        self.special_token_ids = sorted(self._special)
        self.library = LLTokenizer(
            TokenizerWrapper(self), eos_token=sorted(eos_token_ids), slices=LLTokenizer.json_slices()
        )

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text; the library calls this."""
        text = text[:_MAX_CHARS]
        content = text.encode()
        tokens = self._tokenizer.encode_rendered(text)
        if self._special.isdisjoint(tokens) and b"".join(self.tokens[token] for token in tokens) == content:
            return tokens
        fitting, place = list[int](), 0
        for token in self.library.greedy_tokenize(text):
            if token in self._special or not content.startswith(self.tokens[token], place):
                break  # it has left out a byte for which there is no token
            fitting.append(token)
            place += len(self.tokens[token])
        # An end token may not come before the text, so where no token can begin it the mask is empty.
        return fitting or [self.eos_token_id]


def _without_prefix(part: Any) -> Any:
    """The normalizer or pre-tokenizer without the blank that it puts before a text; None if it does nothing else."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        bare = map(_without_prefix, part[name])
        return part | {name: [one for one in bare if one is not None]}
    return part | {key: value for key, value in _NO_PREFIX.items() if key in part}


_NO_PREFIX = {"prepend_scheme": "never", "add_prefix_space": False}
