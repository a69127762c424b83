"""The text of a recording in the formats of OpenAI's API: JSON, plain text, and subtitles; and its words.

The words are made of tokens as OpenAI's Whisper makes them (whisper/timing.py, tokenizer.py).
"""

from __future__ import annotations

import codecs
import html
import json
import math
import string
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from baton.model_formats.limits import AUDIO_RATE
from router.http.audio.forms import Granularity, ResponseFormat

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
    for index, spelling in enumerate(spellings):
        is_last = index + 1 == len(spellings)
        text += decoder.decode(spelling, is_last)
        if is_last or not decoder.getstate()[0]:
            yield _Piece(text, times_s[first], times_s[index + 1])
            text, first = "", index + 1


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


_JSON, _TEXT, _VTT = b"application/json", b"text/plain; charset=utf-8", b"text/vtt; charset=utf-8"


SEGMENTS: frozenset[Granularity] = frozenset(("segment",))
"""What has times unless a call says otherwise."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The text of one part of a recording."""

    part: tuple[int, int]
    """The indices of its samples."""
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probabilities of the tokens, where they were asked for."""
    is_silent: bool
    """Whether nothing is to be heard in it, so that the model was not asked."""
    words: Sequence[Word] = ()
    """Its words with their times, where they were asked for."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens; 0: it has none."""
        return fmean(self.logprobs) if self.logprobs else 0.0

    @property
    def compression_ratio(self) -> float:
        """How many times smaller zlib makes the text, as in OpenAI's Whisper; 0: there is none."""
        data = self.text.encode(errors="backslashreplace")
        return len(data) / len(zlib.compress(data)) if data else 0.0

    @property
    def start_s(self) -> float:
        """Where it begins, in seconds."""
        return self.part[0] / AUDIO_RATE

    @property
    def end_s(self) -> float:
        """Where it ends, in seconds."""
        return self.part[1] / AUDIO_RATE


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a recording."""

    task: str
    language: str
    """Code of the language that is spoken."""
    temperature: float
    segments: Sequence[Segment]
    granularities: frozenset[Granularity] = SEGMENTS
    """What has times in verbose_json."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def duration_s(self) -> float:
        """Length of the recording."""
        return self.segments[-1].end_s

    @property
    def usage(self) -> dict[str, Any]:
        """What the answer is counted as: each second that has begun."""
        return {"type": "duration", "seconds": math.ceil(self.duration_s)}


def token_usage(num_prompt: int, num_written: int) -> dict[str, Any]:
    """OpenAI's `usage` in the last event of a stream, which counts tokens."""
    total = num_prompt + num_written
    return {"type": "tokens", "input_tokens": num_prompt, "output_tokens": num_written, "total_tokens": total}


def written(transcript: Transcript, response_format: ResponseFormat) -> tuple[bytes, bytes]:
    """The content type and the body of an answer."""
    match response_format:
        case "json":
            return _JSON, _json({"text": transcript.text, "usage": transcript.usage})
        case "verbose_json":
            return _JSON, _json(_verbose(transcript))
        case "text":
            return _TEXT, f"{transcript.text}\n".encode()
        case "srt":
            return _TEXT, _srt(transcript.segments).encode()
        case "vtt":
            return _VTT, _vtt(transcript.segments).encode()


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + _json(data) + b"\n\n"


def _json(value: dict[str, Any]) -> bytes:
    # Text that is no valid Unicode can't be in UTF-8, but as an escape.
    return json.dumps(value, ensure_ascii=True).encode()


def _verbose(transcript: Transcript) -> dict[str, Any]:
    segments = [
        {
            "id": index,
            "seek": segment.part[0] * 100 // AUDIO_RATE,
            "start": segment.start_s,
            "end": segment.end_s,
            "text": segment.text,
            "tokens": list(segment.token_ids),
            "temperature": transcript.temperature,
            "avg_logprob": segment.mean_logprob,
            "compression_ratio": segment.compression_ratio,
            # The model is not asked for more than whether there is anything to hear.
            "no_speech_prob": float(segment.is_silent),
        }
        for index, segment in enumerate(transcript.segments)
    ]
    words = [
        {"word": word.text, "start": word.start_s, "end": word.end_s}
        for segment in transcript.segments
        for word in segment.words
    ]
    return {
        "task": transcript.task,
        "language": transcript.language,
        "duration": transcript.duration_s,
        "text": transcript.text,
        **({"words": words} if "word" in transcript.granularities else {}),
        **({"segments": segments} if "segment" in transcript.granularities else {}),
        "usage": transcript.usage,
    }


def _cues(segments: Sequence[Segment]) -> list[tuple[Segment, str]]:
    """The segments with text, as one line each: an empty line, or an arrow, would end a subtitle."""
    texts = [(segment, " ".join(segment.text.split()).replace("-->", "->")) for segment in segments]
    return [(segment, text) for segment, text in texts if text]


def _srt(segments: Sequence[Segment]) -> str:
    return "".join(
        f"{number}\n{_time(segment.start_s, ',')} --> {_time(segment.end_s, ',')}\n{text}\n\n"
        for number, (segment, text) in enumerate(_cues(segments), 1)
    )


def _vtt(segments: Sequence[Segment]) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/), in whose texts `&` and `<` are escaped."""
    cues = "".join(
        f"{_time(segment.start_s, '.')} --> {_time(segment.end_s, '.')}\n{html.escape(text, quote=False)}\n\n"
        for segment, text in _cues(segments)
    )
    return "WEBVTT\n\n" + cues


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
