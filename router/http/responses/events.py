"""Writes the server-sent events of one response's stream: OpenAI's, each with its number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from router.http.answer_items import Begun
from router.http.completions.logprobs import ChatLogprobs
from router.http.errors import error_of
from router.http.json_body import quote
from router.http.parsed_text import Spelling
from router.http.responses.output import (
    Change,
    EndedResponse,
    Kind,
    OutputEnded,
    OutputGrown,
    OutputItem,
    ResponseInProgress,
    as_text,
)

_TEXT_EVENTS: Mapping[Kind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
"""The events of an item's text, without their last word."""


class ResponseWriter:
    """Writes one stream: a response with its items, one after the other."""

    num_sequences = 1

    def __init__(
        self,
        response: ResponseInProgress,
        spelling: Spelling,
        now: Callable[[], float],
        keep: Callable[[EndedResponse], object],
    ) -> None:
        """`now`: seconds since the epoch. `keep` gets the response if it ends well."""
        self._response = response
        self._draft = response.draft
        self._logprobs = ChatLogprobs(spelling)
        self._now = now
        self._keep = keep
        self._num_events = 0

    def opening(self) -> bytes:
        """The events before all items."""
        response = f'"response":{self._draft.in_progress()}'
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def chunk(self, chunk: Chunk) -> bytes:
        """The events for tokens and their text, which is empty while a character is incomplete."""
        if self._draft.has_logprobs and chunk.logprobs:
            entries = self._logprobs.take(chunk.logprobs)["content"]
            self._response.take_logprobs(json.dumps(entries)[1:-1])
        return self._changes(self._response.take(chunk))

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The events for the end of the text."""
        return self._changes(self._response.finish(finish_reason))

    def finish(self, finished: Finished) -> bytes:
        """The last event of a request that ended well: the whole response."""
        ended = self._response.ended(finished, self._now())
        self._keep(ended)
        return self._event(f"response.{ended.status}", f'"response":{ended.json}')

    def error(self, error: BatonError) -> bytes:
        """The last events of a request that failed: the error, and the failed response."""
        error_body = error_of(error)
        error_fields = {
            "code": error_body["code"] or error_body["type"],
            "message": error_body["message"],
            "param": error_body["param"],
        }
        failed = self._draft.failed(str(error_body["message"]))
        return self._event("error", as_text(error_fields)[1:-1]) + self._event(
            "response.failed", f'"response":{failed}'
        )

    def _changes(self, changes: Iterable[Change]) -> bytes:
        return b"".join(map(self._change, changes))

    def _change(self, change: Change) -> bytes:
        match change:
            case Begun(item):
                begun = self._item_event("added", item, item.begun())
                if item.kind == "function_call":
                    return begun
                return begun + self._text_event("response.content_part.added", item, f'"part":{item.part("")}')
            case OutputGrown(item, text, logprobs):
                if not text and not logprobs:
                    return b""
                more = f',"logprobs":[{logprobs}]' if item.kind == "message" else ""
                return self._text_event(f"{_TEXT_EVENTS[item.kind]}.delta", item, f'"delta":{quote(text)}{more}')
            case OutputEnded(item):
                return self._ended(item) + self._item_event("done", item, item.ended())

    def _ended(self, item: OutputItem) -> bytes:
        """The events for the end of an item's text."""
        kind, text = f"{_TEXT_EVENTS[item.kind]}.done", item.text
        if item.kind == "function_call":
            return self._text_event(kind, item, f'"name":{quote(item.name)},"arguments":{quote(text)}')
        logprobs = item.all_logprobs
        more = f',"logprobs":{logprobs}' if item.kind == "message" else ""
        part = f'"part":{item.part(text, logprobs)}'
        return self._text_event(kind, item, f'"text":{quote(text)}{more}') + self._text_event(
            "response.content_part.done", item, part
        )

    def _text_event(self, kind: str, item: OutputItem, fields: str) -> bytes:
        content_index = "" if item.kind == "function_call" else ',"content_index":0'
        return self._event(kind, f'"item_id":{quote(item.id)},"output_index":{item.place}{content_index},{fields}')

    def _item_event(self, what: str, item: OutputItem, written: str) -> bytes:
        return self._event(f"response.output_item.{what}", f'"output_index":{item.place},"item":{written}')

    def _event(self, kind: str, fields: str) -> bytes:
        """The event with these fields, which are the inside of an object in JSON."""
        number, self._num_events = self._num_events, self._num_events + 1
        # A message may quote text that is not valid Unicode.
        data = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{fields}}}\n\n'
        return data.encode(errors="backslashreplace")
