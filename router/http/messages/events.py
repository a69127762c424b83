"""Answers in the format of Anthropic's API: the message object, and the server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from router.http.answer_format import quote
from router.http.messages.errors import error_object


@dataclass(frozen=True, slots=True)
class MessageLabel:
    """What is known of a message before its text."""

    request_id: str
    model: str
    is_shortened: bool
    """Whether the model's length leaves less than the `max_tokens` that the client asked for."""

    def message(self, text: str | None, usage: Mapping[str, int | None], stop: Mapping[str, str | None]) -> bytes:
        """The message object as JSON. `text`: None if it is still to come."""
        content = [] if text is None else [{"type": "text", "text": text, "citations": None}]
        found = {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "model": self.model}
        return json.dumps({**found, "content": content, **stop, "usage": usage}, ensure_ascii=False).encode()

    def stop(self, finish_reason: str, stop_reason: int | str | None) -> Mapping[str, str | None]:
        """Why a message ended, in Anthropic's words."""
        if isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        if finish_reason == "length":
            reason = "model_context_window_exceeded" if self.is_shortened else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_of(finished: Finished) -> Mapping[str, int | None]:
    """Anthropic's usage object, where `input_tokens` are those that were not in a cache."""
    return {
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": finished.cached_tokens,
        "output_tokens": finished.completion_tokens,
    }


def event(kind: str, data: str = "") -> bytes:
    """One server-sent event. `data`: its fields as JSON, without the braces and the type."""
    return f'event: {kind}\ndata: {{"type":"{kind}"{"," if data else ""}{data}}}\n\n'.encode()


PING = event("ping")
_NO_STOP: Mapping[str, str | None] = {"stop_reason": None, "stop_sequence": None}


class MessageWriter:
    """Writes one stream: a message with one block of text."""

    num_sequences = 1

    def __init__(self, label: MessageLabel, prompt_tokens: int) -> None:
        self._label = label
        self._prompt_tokens = prompt_tokens
        self._stop = _NO_STOP

    def opening(self) -> bytes:
        """The events before all text. It is not known yet how much of the prompt is in a cache."""
        usage = {
            "input_tokens": self._prompt_tokens,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": None,
            "output_tokens": 0,
        }
        message = self._label.message(None, usage, _NO_STOP).decode()
        block = '"index":0,"content_block":{"type":"text","text":"","citations":null}'
        return event("message_start", f'"message":{message}') + event("content_block_start", block) + PING

    def chunk(self, chunk: Chunk) -> bytes:
        """The event for the text of tokens, which is empty while a character is incomplete."""
        if not chunk.text:
            return b""
        return event("content_block_delta", f'"index":0,"delta":{{"type":"text_delta","text":{quote(chunk.text)}}}')

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The event for the end of the text."""
        self._stop = self._label.stop(finish_reason, stop_reason)
        return event("content_block_stop", '"index":0')

    def finish(self, finished: Finished) -> bytes:
        """The last events of a request that ended well: why it ended, and its usage."""
        delta: dict[str, Any] = {"delta": self._stop, "usage": usage_of(finished)}
        return event("message_delta", json.dumps(delta, ensure_ascii=False)[1:-1]) + event("message_stop")

    def error(self, error: BatonError) -> bytes:
        """The last event of a request that failed."""
        return b"event: error\ndata: " + error_object(error, self._label.request_id) + b"\n\n"
