"""Answers in the format of Anthropic's API: the message object, its content, and the server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from router.http.answer_items import AnswerItems, Begun, Ended, Grown, ItemChange, ItemKind
from router.http.errors import error_object
from router.http.json_body import quote
from router.http.parsed_text import AnswerPart, NamedCall, ParsedSequence

SIGNATURE = "unsigned"
"""The signature of thinking, which clients send back: it proves nothing, and nothing is checked."""
INVALID_INPUT = "INVALID_JSON"
"""The key of an input that is not JSON as a whole, since an input must be an object; Anthropic recommends this one."""
_CALL_PREFIX, _PREFIX = "call_", "toolu_"


def text_block(text: str) -> str:
    """A block of text."""
    return f'{{"type":"text","text":{quote(text)}}}'


def thinking_block(text: str, signature: str) -> str:
    """A block of reasoning."""
    return f'{{"type":"thinking","thinking":{quote(text)},"signature":{quote(signature)}}}'


def call_block(call: NamedCall, arguments: str) -> str:
    """A block with a call. `arguments`: an object of JSON."""
    name = call.id if not call.id.startswith(_CALL_PREFIX) else _PREFIX + call.id.removeprefix(_CALL_PREFIX)
    return f'{{"type":"tool_use","id":{quote(name)},"name":{quote(call.name)},"input":{arguments}}}'


@dataclass(slots=True)
class ContentBlock:
    """One block of a message."""

    kind: ItemKind
    index: int
    """Its place in the content."""
    call: NamedCall | None
    """The call that the block is; None: it is no call."""
    texts: list[str] = field(default_factory=list)
    is_complete: bool = False
    """Whether the block was not cut off; the arguments of a call are an object of JSON then."""

    def begun(self) -> str:
        """The block before its text."""
        if self.call is not None:
            return call_block(self.call, "{}")
        return text_block("") if self.kind == "text" else thinking_block("", "")

    def as_json(self, *, shows_thinking: bool) -> str:
        """The block with the text that was kept in it."""
        text = "".join(self.texts)
        if self.call is not None:
            return call_block(self.call, text if self.is_complete else f'{{"{INVALID_INPUT}":{quote(text)}}}')
        return text_block(text) if self.kind == "text" else thinking_block(text if shows_thinking else "", SIGNATURE)


class WholeContent:
    """The content of a whole message, made of the parts of its text."""

    def __init__(self) -> None:
        self._blocks = AnswerItems(ContentBlock)

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """Add the next parts."""
        self._keep(self._blocks.take(parts))

    def finish(self, parts: Iterable[AnswerPart], *, is_complete: bool) -> None:
        """Add the last parts. `is_complete`: whether the answer ended by itself."""
        self.add(parts)
        self._keep(self._blocks.finish(is_complete=is_complete))

    def _keep(self, changes: Iterable[ItemChange[ContentBlock]]) -> None:
        for change in changes:
            match change:
                case Grown(block, text):
                    block.texts.append(text)
                case Ended(block, is_complete):
                    block.is_complete = is_complete

    def blocks(self, *, shows_thinking: bool) -> Sequence[str]:
        """The blocks as JSON."""
        return [block.as_json(shows_thinking=shows_thinking) for block in self._blocks.items]


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
