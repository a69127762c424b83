"""Incremental detokenizers: text from a stream of tokens, piece by piece.

Both detokenizers keep one rule: a piece is returned only when no later token can change it, and all pieces together are
exactly what decoding all tokens at once gives, behind those of the prompt. A character that spans several tokens is
returned with its last one.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Vocabulary(Protocol):
    """The methods of a tokenizer that a detokenizer needs."""

    def is_visible(self, token_id: int) -> bool: ...

    def is_byte_fallback(self, token_id: int) -> bool: ...

    def decode_visible(self, token_ids: list[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def whole_text(self, token_id: int) -> str | None:
        """The text of a byte-level token whose bytes are whole characters, empty for an invisible token; else None."""
        ...


class Detokenizer(Protocol):
    """Turns one stream of tokens into text. It has state, so each stream needs its own."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is final now; may be empty."""
        ...

    def finish(self) -> str:
        """Return the remaining text at the end of the stream. Idempotent."""
        ...


class TextCodec(Protocol):
    """A tokenizer as all that serves text uses it; `baton.text.tokenizer.Tokenizer` is the real one."""

    def encode(self, text: str) -> list[int]: ...

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        ...

    def num_special_tokens(self, *, pair: bool) -> int:
        """How many special tokens are put around a text, or a pair of texts."""
        ...

    def with_special_tokens(self, first: Sequence[int], second: Sequence[int] | None) -> tuple[list[int], int]:
        """The tokens of a text or a pair with special ones, and where those of the second type begin, or 0."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def context_of(self, prompt: Sequence[int], first: int = 0) -> tuple[int, ...]:
        """The last few tokens of a prompt on which the text behind it depends. Those before `first` have no text."""
        ...

    def detokenizer(self, shown_tokens: Sequence[int] = (), context: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for one stream. `shown_tokens`: special tokens that have a text in it, too. `context`: what
        `context_of` gives of the prompt.
        """
        ...

    def spelling(self, token_id: int) -> bytes:
        """The bytes of a token as part of a text."""
        ...

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        """The ids of those texts that are special tokens."""
        ...

    def added_id(self, text: str) -> int | None:
        """The id of the added token with this text; None: there is none."""
        ...


class ByteLevelDetokenizer:
    """For byte-level vocabularies: every token is a string of bytes, and only an unfinished character is held back."""

    __slots__ = ("_decoder", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder: codecs.IncrementalDecoder | None = None
        """Decoder of the unfinished character; None if there is none."""

    def push(self, token_id: int) -> str:
        text = self._vocabulary.whole_text(token_id)
        if text is not None and (self._decoder is None or not text):
            return text
        decoder = self._decoder or _UTF8(errors="replace")
        text = decoder.decode(self._vocabulary.token_bytes(token_id))
        self._decoder = decoder if decoder.getstate()[0] else None
        return text

    def finish(self) -> str:
        rest = "" if self._decoder is None else self._decoder.decode(b"", final=True)
        self._decoder = None
        return rest


class WindowDetokenizer:
    """For all other vocabularies: decodes a window of tokens and returns the text behind the window's settled part.

    The settled tokens at the window's start, which are the prompt's last ones and then those whose text was returned
    before, are context: decoders treat the first token differently (no leading space), so a token must not be decoded
    as the first one unless it is. Raw-byte tokens are held back until the end of their run, because a run that is no
    valid UTF-8 becomes replacement characters as a whole.
    """

    CONTEXT_TOKENS = 4
    MAX_UNFINISHED_TOKENS = 3
    """A character has at most four bytes (RFC 3629) and a visible token at least one, so no more than these can belong
    to a character that is not finished: a text that ends in U+FFFD before them means that character itself."""

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = ()) -> None:
        """`context`: what `context_of` gives of the prompt."""
        self._vocabulary = vocabulary
        self._settled = list(context)
        self._settled_text = vocabulary.decode_visible(self._settled) if context else ""
        self._held: list[int] = []

    @classmethod
    def context_of(cls, vocabulary: Vocabulary, prompt: Sequence[int], first: int = 0) -> tuple[int, ...]:
        """The last tokens of a prompt, at most CONTEXT_TOKENS, that the text behind it continues.

        A text begins anew behind a token that is not visible. `first`: the tokens before this position have no text.
        """
        context: list[int] = []
        for token in reversed(prompt[max(first, len(prompt) - cls.CONTEXT_TOKENS) :]):
            if not vocabulary.is_visible(token):
                break
            context.insert(0, token)
        # The text of a character that the prompt does not finish would change with the next token.
        while (
            context
            and not vocabulary.is_byte_fallback(context[-1])
            and vocabulary.decode_visible(context).endswith("\ufffd")
        ):
            context.pop()
        return tuple(context)

    def push(self, token_id: int) -> str:
        if not self._vocabulary.is_visible(token_id):
            return ""
        if self._vocabulary.is_byte_fallback(token_id):
            if not self._held:
                self._end_run_of_prompt()
            self._held.append(token_id)
            return ""
        self._held.append(token_id)
        window = self._settled + self._held
        text = self._vocabulary.decode_visible(window)
        if not text.startswith(self._settled_text):
            return ""
        last = len(window)
        if text.endswith("\ufffd"):
            last -= self.MAX_UNFINISHED_TOKENS
            is_byte = self._vocabulary.is_byte_fallback
            while last > len(self._settled) and is_byte(window[last - 1]) and is_byte(window[last]):
                last -= 1  # A run of raw bytes must not be split.
            if last <= len(self._settled):
                return ""
            certain = self._vocabulary.decode_visible(window[:last])
            if not text.startswith(certain) or not certain.startswith(self._settled_text):
                return ""
            text = certain
        piece = text[len(self._settled_text) :]
        self._settle(window[:last])
        self._held = window[last:]
        return piece

    def finish(self) -> str:
        window = self._settled + self._held
        piece = self._vocabulary.decode_visible(window)[len(self._settled_text) :]
        self._settle(window)
        return piece

    def _end_run_of_prompt(self) -> None:
        """Let a run of raw bytes at the prompt's end, of which the context may have a part, end there.

        Only a prompt leaves the settled tokens with such an end while no token is held.
        """
        if self._settled and self._vocabulary.is_byte_fallback(self._settled[-1]):
            while self._settled and self._vocabulary.is_byte_fallback(self._settled[-1]):
                self._settled.pop()
            self._settled_text = self._vocabulary.decode_visible(self._settled)

    def _settle(self, window: list[int]) -> None:
        context = window[-self.CONTEXT_TOKENS :]
        # The context must not begin inside a run of raw bytes, whose text depends on the whole run.
        while len(context) < len(window) and self._vocabulary.is_byte_fallback(context[0]):
            context = window[-len(context) - 1 :]
        self._settled = context
        self._settled_text = self._vocabulary.decode_visible(context)
        self._held = []
