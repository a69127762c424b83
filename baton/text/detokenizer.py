"""Incremental detokenizers: text from a stream of tokens, piece by piece.

Both detokenizers keep one rule: a piece is returned only when no later token can change it, and all pieces together are
exactly what decoding all tokens at once gives. A character that spans several tokens is returned with its last one.
"""

from __future__ import annotations

import codecs
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

    The settled tokens at the window's start, whose text was returned before, are context: decoders treat the first
    token differently (no leading space), so a token must not be decoded as the first one unless it is. Raw-byte tokens
    are held back until the end of their run, because a run that is no valid UTF-8 becomes replacement characters as a
    whole.
    """

    CONTEXT_TOKENS = 4
    MAX_UNFINISHED_TOKENS = 3
    """A character has at most four bytes (RFC 3629) and a visible token at least one, so no more than these can belong
    to a character that is not finished: a text that ends in U+FFFD before them means that character itself."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._settled: list[int] = []
        self._settled_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._vocabulary.is_visible(token_id):
            return ""
        self._held.append(token_id)
        if self._vocabulary.is_byte_fallback(token_id):
            return ""
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

    def _settle(self, window: list[int]) -> None:
        context = window[-self.CONTEXT_TOKENS :]
        # The context must not begin inside a run of raw bytes, whose text depends on the whole run.
        while len(context) < len(window) and self._vocabulary.is_byte_fallback(context[0]):
            context = window[-len(context) - 1 :]
        self._settled = context
        self._settled_text = self._vocabulary.decode_visible(context)
        self._held = []
