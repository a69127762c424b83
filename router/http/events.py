"""Writes the server-sent events of one stream from the core's events, with as little work for each as possible."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished
from router.http.answer_format import Shape, quote
from router.http.errors import error_body
from router.http.event_id import event_id
from router.http.logprobs import Spelling

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""Sent while there is nothing else to send, so that proxies and clients see a live connection."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a client wants in an answer beside the text."""

    usage: bool = False
    usage_in_all: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """The ids of the output's tokens, and those of the prompt."""
    tokens_as_ids: bool = False
    """Log-probabilities name a token by its id, not by its text."""


@dataclass(frozen=True, slots=True)
class Label:
    """The fields that are the same in every object of one answer."""

    id: str
    model: str
    created: int
    """Seconds since the epoch."""
    fingerprint: str | None = None
    """See `ModelCard.fingerprint`."""

    def head(self, kind: str) -> str:
        """The beginning of an object, up to its choices."""
        name, model = quote(self.id), quote(self.model)
        made = f'"created":{self.created},"model":{model},"system_fingerprint":{json.dumps(self.fingerprint)}'
        return f'{{"id":{name},"object":"{kind}",{made},"choices":['


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, object]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class EventWriter:
    """Writes one stream. `positions`: where each sequence begins."""

    def __init__(
        self,
        shape: Shape,
        label: Label,
        options: AnswerOptions,
        positions: Sequence[int],
        prompt_tokens: int,
        spelling: Spelling,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`prompt_token_ids`: those that the stream returns, once; empty for a stream that goes on."""
        self._shape = shape
        self._options = options
        self._ids = [event_id([position]) for position in positions]
        """The parts of the next event's id: each sequence's position. They are kept as text, since they may be many."""
        self._prompt_tokens = prompt_tokens
        self._num_tokens = sum(positions)
        head = label.head(shape.event)
        self._head = head
        self._heads = [f'{head}{{"index":{index},' for index in range(len(positions))]
        self._end = '],"usage":null}\n\n' if options.usage else "]}\n\n"
        self._plain = f'{shape.text_tail},"logprobs":null,"finish_reason":null}}{self._end}'
        self._is_plain = not (options.logprobs or options.token_ids or options.usage_in_all)
        self._logprobs = [shape.logprobs(spelling) for _ in positions]
        self._rests = [""] * len(positions)
        self._prompt_ids = f',"prompt_token_ids":{json.dumps(list(prompt_token_ids))}' if prompt_token_ids else ""

    @property
    def num_sequences(self) -> int:
        return len(self._ids)

    def opening(self) -> bytes:
        """The events before all text: in chats they have the role."""
        if not self._shape.opening:
            return b""
        behind = f'{self._shape.opening},"logprobs":null,"finish_reason":null}}]'
        ids, self._prompt_ids = self._prompt_ids, ""
        # The prompt's ids are in the first event alone, since a prompt may be long and the sequences many.
        ends = [ids + self._ending()[1:], *[self._ending()[1:]] * (len(self._heads) - 1)]
        return b"".join(self._event(f"{head}{behind}{end}") for head, end in zip(self._heads, ends, strict=True))

    def chunk(self, chunk: Chunk) -> bytes:
        """The event for tokens and their text. Text without tokens is kept for the event that ends its sequence."""
        index = chunk.sequence_index
        self._ids[index] = event_id([chunk.next_position])
        if not chunk.token_ids:
            self._rests[index] += chunk.text
            return b""
        self._num_tokens += len(chunk.token_ids)
        behind = self._plain if self._is_plain else self._behind(chunk)
        return self._event(f"{self._heads[index]}{self._shape.text_head}{quote(chunk.text)}{behind}")

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The event for the end of a sequence."""
        rest, self._rests[index] = self._rests[index], ""
        shape = self._shape
        # A chat's last event has an empty delta, unless there is text.
        text = '"delta":{' if not rest and shape.opening else f"{shape.text_head}{quote(rest)}"
        reasons = f'"finish_reason":{quote(finish_reason)},"stop_reason":{json.dumps(stop_reason)}'
        return self._event(f'{self._heads[index]}{text}{shape.text_tail},"logprobs":null,{reasons}}}{self._ending()}')

    def finish(self, finished: Finished) -> bytes:
        """The last events of a request that ended well: its usage, if that is wanted, and the end."""
        if not self._options.usage:
            return DONE
        usage = usage_of(finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens)
        return self._event(f'{self._head}],"usage":{json.dumps(usage)}}}\n\n') + DONE

    def error(self, error: BatonError) -> bytes:
        """The last event of a request that failed."""
        return b"data: " + error_body(error) + b"\n\n"

    def _event(self, data: str) -> bytes:
        return f"id: {'.'.join(self._ids)}\ndata: {data}".encode()

    def _behind(self, chunk: Chunk) -> str:
        """The part after the text, of an event that has more than text."""
        parts = [self._shape.text_tail]
        logprobs = self._logprobs[chunk.sequence_index].take(chunk.logprobs) if self._options.logprobs else None
        parts.append(f',"logprobs":{json.dumps(logprobs)},"finish_reason":null')
        if self._options.token_ids:
            parts.append(f',"token_ids":{json.dumps(list(chunk.token_ids))}')
            if chunk.sequence_index == 0:
                parts.append(self._prompt_ids)
                self._prompt_ids = ""
        parts.append(f"}}{self._ending()}")
        return "".join(parts)

    def _ending(self) -> str:
        if not self._options.usage_in_all:
            return self._end
        return f'],"usage":{json.dumps(usage_of(self._prompt_tokens, self._num_tokens))}}}\n\n'
