"""The differences between the answers of the two endpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.messages.sampling import TokenLogprobs
from router.http.logprobs import ChatLogprobs, CompletionLogprobs, Spelling

quote: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode
"""A string as JSON; much quicker than `json.dumps` with the same setting."""


class LogprobWriter(Protocol):
    """Writes the log-probabilities of one sequence, piece by piece."""

    def take(self, positions: Sequence[TokenLogprobs]) -> dict[str, list[Any]]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """The format of one endpoint's answers."""

    id_prefix: str
    whole: str
    """The name of the object that is a whole answer."""
    event: str
    """The name of the object of each event of a stream."""
    text_head: str
    text_tail: str
    """JSON before (`text_head`) and after the text in an event's choice."""
    opening: str
    """The content of an event before any text; empty: there is no such event."""
    logprobs: Callable[[Spelling], LogprobWriter]
    in_choice: Callable[[str], dict[str, Any]]
    """The text in a choice of a whole answer."""

    @property
    def has_one_prompt(self) -> bool:
        """Whether a call has one prompt, which therefore belongs to the whole answer and to no choice."""
        return bool(self.opening)


COMPLETION = Shape(
    id_prefix="cmpl-",
    whole="text_completion",
    event="text_completion",
    text_head='"text":',
    text_tail="",
    opening="",
    logprobs=CompletionLogprobs,
    in_choice=lambda text: {"text": text},
)
CHAT = Shape(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    event="chat.completion.chunk",
    text_head='"delta":{"content":',
    text_tail="}",
    opening='"delta":{"role":"assistant","content":""}',
    logprobs=ChatLogprobs,
    in_choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
)
