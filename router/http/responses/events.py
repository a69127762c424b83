"""Writes the server-sent events of one response's stream: OpenAI's, each with its number."""

from __future__ import annotations

import json
from collections.abc import Callable

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from router.http.answer_format import quote
from router.http.errors import error_of
from router.http.logprobs import ChatLogprobs, Spelling
from router.http.responses.objects import ResponseDraft, as_text, status_of


class ResponseWriter:
    """Writes one stream: a response with one message of one text."""

    num_sequences = 1

    def __init__(
        self,
        draft: ResponseDraft,
        spelling: Spelling,
        now: Callable[[], float],
        keep: Callable[[str, str], object],
    ) -> None:
        """`now`: seconds since the epoch. `keep` gets the response that ended well, in JSON, and its text."""
        self._draft = draft
        self._logprobs = ChatLogprobs(spelling)
        self._now = now
        self._keep = keep
        self._num_events = 0
        self._texts: list[str] = []
        self._logprobs_so_far: list[str] = []
        """The log-probabilities of the tokens so far, as the entries of lists in JSON."""
        self._finish_reason = ""
        self._place = f'"item_id":{quote(draft.item_id)},"output_index":0,"content_index":0'

    def opening(self) -> bytes:
        """The events before all text."""
        response = f'"response":{self._draft.in_progress()}'
        return (
            self._event("response.created", response)
            + self._event("response.in_progress", response)
            + self._item_event("response.output_item.added", self._draft.message("in_progress"))
            + self._part_event("response.content_part.added", f'"part":{self._draft.part("", "[]")}')
        )

    def chunk(self, chunk: Chunk) -> bytes:
        """The event for tokens and their text, which is empty while a character is incomplete."""
        self._texts.append(chunk.text)
        written = ""
        if self._draft.has_logprobs and chunk.logprobs:
            written = json.dumps(self._logprobs.take(chunk.logprobs)["content"])[1:-1]
            self._logprobs_so_far.append(written)
        if not chunk.text and not written:
            return b""
        return self._part_event("response.output_text.delta", f'"delta":{quote(chunk.text)},"logprobs":[{written}]')

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The events for the end of the text."""
        self._finish_reason = finish_reason
        text, logprobs = "".join(self._texts), self._all_logprobs()
        part = self._draft.part(text, logprobs)
        return (
            self._part_event("response.output_text.done", f'"text":{quote(text)},"logprobs":{logprobs}')
            + self._part_event("response.content_part.done", f'"part":{part}')
            + self._item_event("response.output_item.done", self._draft.message(status_of(finish_reason), part))
        )

    def finish(self, finished: Finished) -> bytes:
        """The last event of a request that ended well: the whole response."""
        text = "".join(self._texts)
        response = self._draft.ended(text, self._all_logprobs(), self._finish_reason, finished, self._now())
        self._keep(response, text)
        return self._event(f"response.{status_of(self._finish_reason)}", f'"response":{response}')

    def error(self, error: BatonError) -> bytes:
        """The last events of a request that failed: the error, and the failed response."""
        found = error_of(error)
        error_fields = {"code": found["code"] or found["type"], "message": found["message"], "param": found["param"]}
        failed = self._draft.failed(str(found["message"]))
        return self._event("error", as_text(error_fields)[1:-1]) + self._event(
            "response.failed", f'"response":{failed}'
        )

    def _all_logprobs(self) -> str:
        return f"[{', '.join(self._logprobs_so_far)}]"

    def _part_event(self, kind: str, fields: str) -> bytes:
        return self._event(kind, f"{self._place},{fields}")

    def _item_event(self, kind: str, item: str) -> bytes:
        return self._event(kind, f'"output_index":0,"item":{item}')

    def _event(self, kind: str, fields: str) -> bytes:
        """The event with these fields, which are the inside of an object in JSON."""
        number, self._num_events = self._num_events, self._num_events + 1
        # A message may quote text that is not valid Unicode.
        data = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{fields}}}\n\n'
        return data.encode(errors="backslashreplace")
