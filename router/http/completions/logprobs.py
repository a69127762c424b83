"""Writes log-probabilities in the formats of OpenAI's two endpoints, and says how their answers differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.messages.sampling import TokenLogprobs
from baton.text.detokenizer import Detokenizer
from router.http.parsed_text import Spelling

LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have; as in vLLM."""

ListWriter = Callable[[Sequence[TokenLogprobs]], list[Any]]
"""Makes the entries of a list for the next positions."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """How the tokens of a model are shown, and what text they make."""

    spelling: Spelling
    """How a token is shown."""
    bytes_of: Spelling
    """The bytes that it stands for."""
    detokenizer: Callable[[Sequence[int]], Detokenizer | None]
    """Makes the detokenizer of a text behind tokens; None: the model is served without a tokenizer, and its text is
    empty."""
    context: Sequence[int] = ()
    """The prompt's tokens that the text continues."""


class TextOffsets:
    """Where each token begins in the text, in characters; one that continues a character begins where that does."""

    def __init__(self, texts: TokenTexts, begin: int = 0, context: Sequence[int] = ()) -> None:
        """`begin`: where the first token begins. `context`: the tokens that the text continues."""
        self._texts = texts
        self._detokenizer = texts.detokenizer(context)
        self._begin = begin
        """The length of the text so far, without what its detokenizer holds back."""
        self._held = b""

    def next(self, token_id: int) -> int:
        """The offset of the next token. Those that are no part of the text have the one of what follows them."""
        offset = self._begin + len(self._held.decode(errors="ignore"))
        piece = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
        if piece:
            self._begin += len(piece)
            self._held = b""
        elif len(raw := self._texts.bytes_of(token_id)) == 1 and raw != b" ":
            # Tokens of one byte may be held back until the end of their run, with characters that are whole. A blank is
            # not: one without a text is that with which the text would begin.
            self._held += raw
        return offset


def unknown(token_id: int) -> TokenLogprobs:
    """The position of a token that has no log-probability, as the first one of a prompt: its rank is 0."""
    return TokenLogprobs(token_id, 0.0, 0, ())


def prompt_entries(positions: Sequence[TokenLogprobs], spelling: Spelling) -> list[dict[int, dict[str, Any]]]:
    """Log-probabilities of a prompt as vLLM writes them: at each position the token itself, then the likeliest."""
    entries = []
    for position in positions:
        ranked = {position.token_id: (position.rank, position.logprob)}
        for rank, (token_id, logprob) in enumerate(position.top, 1):
            ranked.setdefault(token_id, (rank, logprob))
        entries.append(
            {
                token_id: {"logprob": _finite(logprob), "rank": rank, "decoded_token": _text(spelling(token_id))}
                for token_id, (rank, logprob) in ranked.items()
            }
        )
    return entries


class CompletionLogprobs:
    """The log-probabilities of one sequence of /v1/completions, piece by piece, as parallel lists."""

    def __init__(self, texts: TokenTexts, num_echoed: int = 0, echoed_chars: int = 0) -> None:
        """The first `num_echoed` positions are those of a prompt, whose text has `echoed_chars`."""
        self._texts = texts
        self._spelling = texts.spelling
        self._num_echoed, self._echoed_chars = num_echoed, echoed_chars
        self._offsets = TextOffsets(texts, context=() if num_echoed else texts.context)
        self.lists: Mapping[str, ListWriter] = {
            "tokens": lambda positions: [_text(self._spelling(position.token_id)) for position in positions],
            "token_logprobs": lambda positions: [
                _finite(position.logprob) if position.rank else None for position in positions
            ],
            "top_logprobs": lambda positions: [
                self._top(position) if position.rank else None for position in positions
            ],
            "text_offset": lambda positions: [self._offset(position.token_id) for position in positions],
        }

    def take(self, positions: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The lists for the next positions; some may be `unknown`."""
        positions = list(positions)  # packed ones are read once
        return {name: entries(positions) for name, entries in self.lists.items()}

    def _offset(self, token_id: int) -> int:
        if self._num_echoed == 0:
            return self._offsets.next(token_id)
        offset = min(self._offsets.next(token_id), self._echoed_chars)
        self._num_echoed -= 1
        if self._num_echoed == 0:
            # The echoed text may be the client's, and not that of the tokens.
            self._offsets = TextOffsets(self._texts, self._echoed_chars, self._texts.context)
        return offset

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        by_spelling: dict[str, float] = {}
        for token_id, logprob in _top_and_drawn(position):
            # Among tokens with the same text, the most likely one counts.
            by_spelling.setdefault(_text(self._spelling(token_id)), _finite(logprob))
        return by_spelling


class ChatLogprobs:
    """The log-probabilities of one sequence of /v1/chat/completions, piece by piece, as an object for each token."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self.lists: Mapping[str, ListWriter] = {"content": self._content}

    def take(self, positions: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The list for the next positions."""
        return {"content": self._content(positions)}

    def _content(self, positions: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._entry(position.token_id, position.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in position.top]}
            for position in positions
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelling = self._spelling(token_id)
        return {"token": _text(spelling), "logprob": _finite(logprob), "bytes": list(spelling)}


def _top_and_drawn(position: TokenLogprobs) -> Sequence[tuple[int, float]]:
    """The most likely tokens of a position, and the token that was drawn, each with its log-probability."""
    if any(token == position.token_id for token, _ in position.top):
        return position.top
    return (*position.top, (position.token_id, position.logprob))


def _text(spelling: bytes) -> str:
    return spelling.decode(errors="replace")


def _finite(logprob: float) -> float:
    # NaN becomes the least one, too.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


class LogprobWriter(Protocol):
    """Writes the log-probabilities of one sequence, piece by piece."""

    @property
    def lists(self) -> Mapping[str, ListWriter]:
        """The lists of the format, by name. Each is to be given all positions, in order."""
        ...

    def take(self, positions: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """All lists, by name, for the next positions."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of one endpoint's answers."""

    id_prefix: str
    object_name: str
    """OpenAI's name (`object`) of an answer that is no stream."""
    event_name: str
    """OpenAI's name (`object`) of each event of a stream."""
    text_head: str
    text_tail: str
    """JSON before (`text_head`) and after the text in an event's choice."""
    opening: str
    """What the first event of a sequence has in its choice, before any text; empty: there is no such event."""
    logprobs: Callable[[TokenTexts, int, int], LogprobWriter]
    """Its arguments: how tokens are shown, and how many tokens and characters of the prompt come first."""
    choice_of: Callable[[str], dict[str, Any]]
    """The fields with the text, in a choice of an answer that is no stream."""

    @property
    def has_one_prompt(self) -> bool:
        """Whether a call has one prompt, which therefore belongs to the whole answer and to no choice."""
        return bool(self.opening)


COMPLETION = AnswerFormat(
    id_prefix="cmpl-",
    object_name="text_completion",
    event_name="text_completion",
    text_head='"text":',
    text_tail="",
    opening="",
    logprobs=CompletionLogprobs,
    choice_of=lambda text: {"text": text},
)
CHAT = AnswerFormat(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    event_name="chat.completion.chunk",
    text_head='"delta":{"content":',
    text_tail="}",
    opening='"delta":{"role":"assistant","content":""}',
    logprobs=lambda texts, _num_echoed, _echoed_chars: ChatLogprobs(texts.spelling),
    choice_of=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
)
