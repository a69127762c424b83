"""Writes the server-sent events of one response's stream: OpenAI's, each with its number."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from router.http.errors import error_of
from router.http.logprobs import ChatLogprobs, Spelling
from router.http.responses.objects import ResponseDraft
from router.http.shapes import quote


class ResponseWriter:
    """Writes one stream: a response with one message of one text."""

    num_sequences = 1

    def __init__(
        self,
        draft: ResponseDraft,
        spelling: Spelling,
        now: Callable[[], float],
        keep: Callable[[dict[str, Any], str], None],
    ) -> None:
        """`now`: seconds since the epoch. `keep` gets the response that ended well, and its text."""
        self._draft = draft
        self._logprobs = ChatLogprobs(spelling)
        self._now = now
        self._keep = keep
        self._num_events = 0
        self._texts: list[str] = []
        self._positions: list[Any] = []
        """The log-probabilities of the tokens so far."""
        self._finish_reason = ""
        self._place = f'"item_id":{quote(draft.item_id)},"output_index":0,"content_index":0'

    def opening(self) -> bytes:
        """The events before all text."""
        response = {"response": self._draft.in_progress()}
        return (
            self._event("response.created", response)
            + self._event("response.in_progress", response)
            + self._event(
                "response.output_item.added", {"output_index": 0, "item": self._draft.message("in_progress", [])}
            )
            + self._part_event("response.content_part.added", {"part": self._draft.part("", [])})
        )

    def chunk(self, chunk: Chunk) -> bytes:
        """The event for tokens and their text, which is empty while a character is incomplete."""
        self._texts.append(chunk.text)
        logprobs: list[Any] = []
        if self._draft.has_logprobs and chunk.logprobs:
            logprobs = self._logprobs.take(chunk.logprobs)["content"]
            self._positions += logprobs
        if not chunk.text and not logprobs:
            return b""
        written = json.dumps(logprobs) if logprobs else "[]"
        return self._written(
            "response.output_text.delta", f'{self._place},"delta":{quote(chunk.text)},"logprobs":{written}'
        )

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The events for the end of the text."""
        self._finish_reason = finish_reason
        text, status = "".join(self._texts), "incomplete" if finish_reason == "length" else "completed"
        part = self._draft.part(text, self._positions)
        return (
            self._part_event("response.output_text.done", {"text": text, "logprobs": self._positions})
            + self._part_event("response.content_part.done", {"part": part})
            + self._event("response.output_item.done", {"output_index": 0, "item": self._draft.message(status, [part])})
        )

    def finish(self, finished: Finished) -> bytes:
        """The last event of a request that ended well: the whole response."""
        text = "".join(self._texts)
        response = self._draft.ended(text, self._positions, self._finish_reason, finished, self._now())
        self._keep(response, text)
        return self._event(f"response.{response['status']}", {"response": response})

    def error(self, error: BatonError) -> bytes:
        """The last events of a request that failed: the error, and the failed response."""
        found = error_of(error)
        told = {"code": found["code"] or found["type"], "message": found["message"], "param": found["param"]}
        failed = self._draft.failed(str(found["message"]))
        return self._event("error", told) + self._event("response.failed", {"response": failed})

    def _part_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._written(kind, f"{self._place},{_json(fields)[1:-1]}")

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._written(kind, _json(fields)[1:-1])

    def _written(self, kind: str, fields: str) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        # A message may quote text that is not valid Unicode.
        data = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{fields}}}\n\n'
        return data.encode(errors="backslashreplace")


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
