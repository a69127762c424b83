"""The words of a transcript, out of its tokens, as OpenAI's Whisper makes them (whisper/timing.py, tokenizer.py)."""

from __future__ import annotations

import codecs
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Languages that put no spaces between words: there each character is a word, or more where a token has several."""
_OPENING = "\"'“¿([{-"
"""Punctuation that belongs to the next word, if a space is before it."""
_CLOSING = "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word before."""
_ENDS = ".。!！?？"
"""Punctuation that ends a sentence."""
_LONGEST_USUAL_S = 0.7


@dataclass(frozen=True, slots=True)
class Word:
    """A word, and when it is spoken, in seconds of the recording."""

    text: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Piece:
    """A word while it is made, with the spaces before it."""

    text: str
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def words_of(spellings: Sequence[bytes], times_s: Sequence[float], language: str) -> list[Word]:
    """The words of one part of a recording.

    `spellings`: the bytes of its tokens. `times_s`: when each begins, and behind them when the last one ends.
    """
    words = list(_divided(spellings, times_s, has_spaces=language not in _WITHOUT_SPACES))
    _shorten(words)
    _join_opening(words)
    _join_closing(words)
    return [Word(text, round(word.start_s, 2), round(word.end_s, 2)) for word in words if (text := word.text.strip())]


def _divided(spellings: Sequence[bytes], times_s: Sequence[float], *, has_spaces: bool) -> Iterator[_Piece]:
    """The words before punctuation is joined to them."""
    word: _Piece | None = None
    for piece in _characters(spellings, times_s):
        begins = piece.text.startswith(" ") or piece.text.strip() in string.punctuation
        if word is None or begins or not has_spaces:
            if word is not None:
                yield word
            word = piece
        else:
            word.text += piece.text
            word.end_s = piece.end_s
    if word is not None:
        yield word


def _characters(spellings: Sequence[bytes], times_s: Sequence[float]) -> Iterator[_Piece]:
    """Tokens, of which several are one where a character is divided among them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, first = "", 0
    for place, spelling in enumerate(spellings):
        is_last = place + 1 == len(spellings)
        text += decoder.decode(spelling, is_last)
        if is_last or not decoder.getstate()[0]:
            yield _Piece(text, times_s[first], times_s[place + 1])
            text, first = "", place + 1


def _shorten(words: Sequence[_Piece]) -> None:
    """Take from the words around the end of a sentence, and from the first one, the silence that is beside them.

    The path of tokens through the recording has no gaps, so a pause is part of a word. It begins with the recording, so
    what is before the first word is part of that.
    """
    lengths = [word.length_s for word in words if word.length_s]
    if not lengths:
        return
    most_s = 2 * min(_LONGEST_USUAL_S, median(lengths))
    if words[0].length_s > most_s:
        words[0].start_s = words[0].end_s - most_s
    for before, word in pairwise(words):
        if word.length_s <= most_s:
            continue
        if word.text in _ENDS:
            word.end_s = word.start_s + most_s
        elif before.text in _ENDS:
            word.start_s = word.end_s - most_s


def _join_opening(words: Sequence[_Piece]) -> None:
    following: _Piece | None = None
    for word in reversed(words):
        if following is not None and word.text.startswith(" ") and word.text.strip() in _OPENING:
            following.text = word.text + following.text
            word.text = ""
        else:
            following = word


def _join_closing(words: Sequence[_Piece]) -> None:
    previous: _Piece | None = None
    for word in words:
        if previous is not None and word.text in _CLOSING and not previous.text.endswith(" "):
            previous.text += word.text
            word.text = ""
        else:
            previous = word
