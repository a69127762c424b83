"""How answers of /v1/completions and of /v1/chat/completions differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.messages.sampling import TokenLogprobs
from router.http.logprobs import ChatLogprobs, CompletionLogprobs, ListWriter, TokenTexts

quote: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode
"""A string as JSON; much quicker than `json.dumps` with the same setting."""


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
