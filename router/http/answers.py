"""Makes answers from the core's events: a stream of server-sent events, or one object at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.errors import BatonError
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, SequenceFinished
from baton.wire.codec.generation import path_to_metadata
from router.http.client import Client
from router.http.errors import Headers
from router.http.events import AnswerOptions, Label, usage_of
from router.http.logprobs import Spelling
from router.http.shapes import Shape

_log = logging.getLogger(__name__)

Events = AsyncGenerator[GenerateEvent, None]


class StreamWriter(Protocol):
    """Writes the server-sent events of one stream in the format of one API, from the core's events."""

    @property
    def num_sequences(self) -> int: ...

    def opening(self) -> bytes:
        """The events before all text."""
        ...

    def chunk(self, chunk: Chunk) -> bytes:
        """The events for tokens and their text; empty if there is nothing to send for them."""
        ...

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The events for the end of a sequence."""
        ...

    def finish(self, finished: Finished) -> bytes:
        """The last events of a request that ended well."""
        ...

    def error(self, error: BatonError) -> bytes:
        """The last events of a request that failed."""
        ...


async def stream(client: Client, events: Events, writer: StreamWriter, opening: bytes) -> None:
    """Send events as they come. An error before anything was sent is raised; a later one becomes the last event.

    `opening` is sent with the first tokens, so that a failure before them is answered with its own status.
    """
    pending = opening
    try:
        async for event in events:
            if isinstance(event, Chunk):
                pending += writer.chunk(event)
            elif isinstance(event, SequenceFinished):
                pending += writer.end(event.sequence_index, event.finish_reason, event.stop_reason)
            elif isinstance(event, Finished):
                if writer.num_sequences == 1:
                    pending += writer.end(0, event.finish_reason, event.stop_reason)
                await client.write(pending + writer.finish(event), more=False)
                return
            if pending:
                data, pending = pending, b""
                await client.write(data)
        raise BatonError("the stream ended before its request did")
    except BatonError as error:
        if not client.has_begun:
            raise
        await client.write(pending + writer.error(error), more=False)
    except Exception:
        if not client.has_begun:
            raise
        _log.exception("a stream failed")
        await client.write(writer.error(BatonError("internal error; the log of the server has it")), more=False)


async def accepted_of(events: Events) -> Accepted:
    """The first event of a stream; raises the error with which the request is refused."""
    first = await anext(events, None)
    if not isinstance(first, Accepted):
        raise BatonError(f"the stream began with {type(first).__name__} instead of Accepted")
    return first


async def collect(accepted: Accepted, events: Events, num_sequences: int) -> Collected:
    """Collect the complete answer of one prompt; raises the error of the stream."""
    chunks: list[list[Chunk]] = [[] for _ in range(num_sequences)]
    ends: list[tuple[str, int | str | None]] = [("", None)] * num_sequences
    async for event in events:
        if isinstance(event, Chunk):
            chunks[event.sequence_index].append(event)
        elif isinstance(event, SequenceFinished):
            ends[event.sequence_index] = (event.finish_reason, event.stop_reason)
        elif isinstance(event, Finished):
            if num_sequences == 1:
                ends[0] = (event.finish_reason, event.stop_reason)
            return Collected(accepted, chunks, ends, event)
    raise BatonError("the stream ended before its request did")


@dataclass(frozen=True, slots=True)
class Collected:
    """The complete answer of one prompt."""

    accepted: Accepted
    chunks: Sequence[Sequence[Chunk]]
    """The chunks of each sequence."""
    ends: Sequence[tuple[str, int | str | None]]
    """Why each sequence ended, and by which stop token or string."""
    finished: Finished

    def choices(
        self, shape: Shape, options: AnswerOptions, spelling: Spelling, first_index: int
    ) -> list[dict[str, Any]]:
        """The sequences as OpenAI's choices."""
        return [self._choice(shape, options, spelling, place, first_index + place) for place in range(len(self.chunks))]

    def _choice(
        self, shape: Shape, options: AnswerOptions, spelling: Spelling, place: int, index: int
    ) -> dict[str, Any]:
        chunks = self.chunks[place]
        finish_reason, stop_reason = self.ends[place]
        positions = [position for chunk in chunks for position in chunk.logprobs]
        choice = {
            "index": index,
            **shape.in_choice("".join(chunk.text for chunk in chunks)),
            "logprobs": shape.logprobs(spelling).take(positions) if options.logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if options.token_ids:
            choice["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
        return choice


def whole_answer(
    shape: Shape,
    label: Label,
    choices: Sequence[dict[str, Any]],
    ends: Sequence[Finished],
    prompts: Sequence[Sequence[int]] = (),
) -> bytes:
    """The answer as one JSON object. `prompts`: the token ids of the prompts, if they are wanted."""
    usage = usage_of(
        sum(end.prompt_tokens for end in ends),
        sum(end.completion_tokens for end in ends),
        sum(end.cached_tokens for end in ends),
    )
    head = {"id": label.id, "object": shape.whole, "created": label.created, "model": label.model}
    answer = {**head, "system_fingerprint": label.fingerprint, "choices": choices, "usage": usage}
    if prompts and shape.has_one_prompt:
        answer["prompt_token_ids"] = prompts[0]
    # In the first choice of each prompt alone, since a prompt may be long and its choices many.
    for place, prompt in enumerate(() if shape.has_one_prompt else prompts):
        choices[place * len(choices) // len(prompts)]["prompt_token_ids"] = prompt
    return json.dumps(answer, ensure_ascii=False).encode()


def path_headers(finished: Finished) -> Headers:
    """Headers that name the nodes of the request, with the names of gRPC's trailing metadata."""
    return [(key.encode(), value.encode()) for key, value in path_to_metadata(finished)]


def seed_headers(accepted: Accepted) -> Headers:
    """A header with the seed in use: a request with this seed gives the same tokens."""
    return [(b"baton-seed", b"%d" % accepted.seed)]
