"""A response while the model writes it: tokens become items, and at the end the whole object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.messages.generation import Chunk, Finished
from router.http.parsed_text import ParsedSequence
from router.http.responses.objects import ResponseDraft, status_of
from router.http.responses.output import Change, Output, OutputItem


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """A response that ended well."""

    json: str
    """The whole object, which may have text that is not valid Unicode."""
    status: str
    items: Sequence[OutputItem]


class ResponseInProgress:
    """One response, whose client gets it as a stream or as a whole."""

    def __init__(self, draft: ResponseDraft, sequence: ParsedSequence, output: Output) -> None:
        """`sequence` parses the text, `output` gets its parts."""
        self.draft = draft
        self._sequence = sequence
        self._output = output
        self._finish_reason = ""

    def take_logprobs(self, logprobs: str) -> None:
        """Take the log-probabilities of the next tokens, as the entries of a list in JSON."""
        self._output.take_logprobs(logprobs)

    def take(self, chunk: Chunk) -> list[Change]:
        """Take tokens and their text, which is empty while a character is incomplete."""
        self._sequence.count(chunk.token_ids)
        return self._output.take(self._sequence.parts(chunk.text))

    def finish(self, finish_reason: str) -> list[Change]:
        """Take the end of the text."""
        self._finish_reason = finish_reason
        return self._output.finish(self._sequence.last_parts(), finish_reason)

    def ended(self, finished: Finished, now: float) -> EndedResponse:
        """The response after its end. `now`: seconds since the epoch."""
        items = self._output.items
        written = ",".join(item.ended() for item in items)
        num_reasoning_tokens = self._sequence.num_reasoning_tokens
        whole = self.draft.ended(written, self._finish_reason, finished, num_reasoning_tokens, now)
        return EndedResponse(whole, status_of(self._finish_reason), items)
