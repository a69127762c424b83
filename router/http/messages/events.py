"""Answers in the format of Anthropic's API: the message object, and the server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from router.http.answer_format import quote
from router.http.answer_items import AnswerItems, Begun, Ended, Grown, ItemChange
from router.http.messages.content import SIGNATURE, ContentBlock
from router.http.messages.errors import error_object
from router.http.parsed_text import ParsedSequence


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
        self._blocks = AnswerItems(ContentBlock)

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
        return self._changes(self._blocks.take(self._sequence.parts(chunk.text)))

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The events for what was held, and for the end of the last block."""
        changes = [
            *self._blocks.take(self._sequence.last_parts()),
            *self._blocks.finish(is_complete=finish_reason != "length"),
        ]
        self._stop = self._label.stop(self._sequence.finish_reason(finish_reason), stop_reason)
        return self._changes(changes)

    def finish(self, finished: Finished) -> bytes:
        """The last events of a request that ended well: why it ended, and its usage."""
        delta: dict[str, Any] = {"delta": self._stop, "usage": usage_of(finished)}
        return event("message_delta", json.dumps(delta, ensure_ascii=False)[1:-1]) + event("message_stop")

    def error(self, error: BatonError) -> bytes:
        """The last event of a request that failed."""
        return b"event: error\ndata: " + error_object(error, self._label.request_id) + b"\n\n"

    def _changes(self, changes: Iterable[ItemChange[ContentBlock]]) -> bytes:
        return b"".join(map(self._change, changes))

    def _change(self, change: ItemChange[ContentBlock]) -> bytes:
        match change:
            case Begun(block):
                return event("content_block_start", f'"index":{block.index},"content_block":{block.begun()}')
            case Grown(block, text):
                return self._grown(block, text)
            case Ended(block):
                is_thinking = block.kind == "reasoning"
                signature = _delta(block, "signature_delta", "signature", SIGNATURE) if is_thinking else b""
                return signature + event("content_block_stop", f'"index":{block.index}')

    def _grown(self, block: ContentBlock, text: str) -> bytes:
        match block.kind:
            case "reasoning":
                return _delta(block, "thinking_delta", "thinking", text) if self._shows_thinking else b""
            case "text":
                return _delta(block, "text_delta", "text", text)
            case "call":
                return _delta(block, "input_json_delta", "partial_json", text) if text else b""


def _delta(block: ContentBlock, kind: str, field: str, text: str) -> bytes:
    delta = f'"delta":{{"type":"{kind}","{field}":{quote(text)}}}'
    return event("content_block_delta", f'"index":{block.index},{delta}')
