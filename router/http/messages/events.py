"""Answers in the format of Anthropic's API: the message object, and the server-sent events of a stream.

The parts of an answer are blocks of its content, in the order in which the model wrote them. An answer without any text
has one block of text, which is empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from baton.text.tool_calls.events import CallEnded, Content
from router.http.answer_format import quote
from router.http.messages.content import SIGNATURE, call_block, text_block, thinking_block
from router.http.messages.errors import error_object
from router.http.parsed_text import AnswerPart, CallArguments, NamedCall, ParsedSequence, Reasoning


@dataclass(frozen=True, slots=True)
class MessageLabel:
    """What is known of a message before its text."""

    request_id: str
    model: str
    is_shortened: bool
    """Whether the model's length leaves less than the `max_tokens` that the client asked for."""

    def message(self, content: Sequence[str], usage: Mapping[str, int | None], stop: Mapping[str, str | None]) -> bytes:
        """The message object as JSON. `content`: its blocks as JSON."""
        head = {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "model": self.model}
        tail = json.dumps({**stop, "usage": usage}, ensure_ascii=False)
        return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "content": [{", ".join(content)}], {tail[1:]}'.encode()

    def stop(self, finish_reason: str, stop_reason: int | str | None) -> Mapping[str, str | None]:
        """Why a message ended, in Anthropic's words. `finish_reason`: that of `ParsedSequence`."""
        if isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        if finish_reason == "length":
            reason = "model_context_window_exceeded" if self.is_shortened else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        return {"stop_reason": "tool_use" if finish_reason == "tool_calls" else "end_turn", "stop_sequence": None}


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
    """Writes one stream."""

    num_sequences = 1

    def __init__(
        self, label: MessageLabel, prompt_tokens: int, sequence: ParsedSequence, *, shows_thinking: bool
    ) -> None:
        self._label = label
        self._prompt_tokens = prompt_tokens
        self._sequence = sequence
        self._shows_thinking = shows_thinking
        self._stop = _NO_STOP
        self._num_blocks = 0
        self._open = ""
        """The type of the block that is open; empty: none is."""

    def opening(self) -> bytes:
        """The events before all text. It is not known yet how much of the prompt is in a cache."""
        usage = {
            "input_tokens": self._prompt_tokens,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": None,
            "output_tokens": 0,
        }
        message = self._label.message((), usage, _NO_STOP).decode()
        return event("message_start", f'"message":{message}') + PING

    def chunk(self, chunk: Chunk) -> bytes:
        """The events for the text of tokens; none while a character, or what may become a call, is incomplete."""
        return b"".join(map(self._part, self._sequence.parts(chunk.text)))

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The events for what was held, and for the end of the last block."""
        last = b"".join(map(self._part, self._sequence.last_parts()))
        self._stop = self._label.stop(self._sequence.finish_reason(finish_reason), stop_reason)
        if not self._num_blocks:
            last += self._opened("text")
        return last + self._closed()

    def finish(self, finished: Finished) -> bytes:
        """The last events of a request that ended well: why it ended, and its usage."""
        delta: dict[str, Any] = {"delta": self._stop, "usage": usage_of(finished)}
        return event("message_delta", json.dumps(delta, ensure_ascii=False)[1:-1]) + event("message_stop")

    def error(self, error: BatonError) -> bytes:
        """The last event of a request that failed."""
        return b"event: error\ndata: " + error_object(error, self._label.request_id) + b"\n\n"

    def _part(self, part: AnswerPart) -> bytes:
        match part:
            case Reasoning(text):
                opened = self._opened("thinking")
                return opened + self._delta("thinking_delta", "thinking", text) if self._shows_thinking else opened
            case Content(text):
                return self._opened("text") + self._delta("text_delta", "text", text)
            case NamedCall():
                return self._begun("tool_use", call_block(part, "{}"))
            case CallArguments(_, text):
                return self._delta("input_json_delta", "partial_json", text) if text else b""
            case CallEnded():
                return self._closed()

    def _opened(self, kind: str) -> bytes:
        """The events that begin a block of text or thinking, unless it is open."""
        if self._open == kind:
            return b""
        return self._begun(kind, thinking_block("", "") if kind == "thinking" else text_block(""))

    def _begun(self, kind: str, block: str) -> bytes:
        before = self._closed()
        self._open = kind
        self._num_blocks += 1
        return before + event("content_block_start", f'"index":{self._num_blocks - 1},"content_block":{block}')

    def _closed(self) -> bytes:
        """The events that end the open block."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signature = self._delta("signature_delta", "signature", SIGNATURE) if kind == "thinking" else b""
        return signature + event("content_block_stop", f'"index":{self._num_blocks - 1}')

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        delta = f'"delta":{{"type":"{kind}","{field}":{quote(text)}}}'
        return event("content_block_delta", f'"index":{self._num_blocks - 1},{delta}')
