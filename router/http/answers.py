"""Makes answers from the core's events: a stream of server-sent events, or one object at the end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

from baton.errors import BatonError
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    PromptLogprobs,
    SequenceFinished,
    joined,
)
from baton.messages.sampling import TokenLogprobs
from baton.wire.codec.generation import path_to_metadata
from router.flight.event_queue import LONG_TEXT
from router.http.answer_format import AnswerFormat
from router.http.client import Client
from router.http.errors import Headers
from router.http.events import AnswerOptions, Label, final_usage
from router.http.logprobs import ListWriter, Spelling, TokenTexts, prompt_entries, unknown
from router.http.parsed_text import ParsedMessage, ParsedSequence

_log = logging.getLogger(__name__)

Events = AsyncGenerator[GenerateEvent, None]
Pieces = AsyncGenerator[str, None]

_CHUNKS_JOINED = 64
"""So many chunks of a sequence are joined to one while an answer is collected."""
_POSITIONS_A_TURN = 64
"""Positions whose log-probabilities are written in one turn of the event loop: some milliseconds' work."""
_SHORT_ANSWER_BYTES = 1 << 20
"""About how long an answer may be that is sent as one piece, with its length."""
_WRITE_BYTES = 64 << 10
"""About how many bytes of a longer answer are sent at once."""
_json = json.JSONEncoder(ensure_ascii=False).encode


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
                if len(event.text) > LONG_TEXT:
                    await asyncio.sleep(0)  # there may be many, all of which are there at once
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
    latest: list[list[Chunk]] = [[] for _ in range(num_sequences)]
    """Chunks that are not joined yet: a chunk of one token takes ten times the memory of its token."""
    ends: list[tuple[str, int | str | None]] = [("", None)] * num_sequences
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    async for event in events:
        if isinstance(event, Chunk):
            index = event.sequence_index
            latest[index].append(event)
            if len(latest[index]) >= _CHUNKS_JOINED:
                chunks[index].append(joined(latest[index]))
                latest[index].clear()
        elif isinstance(event, PromptLogprobs):
            prompt_logprobs = event.positions
        elif isinstance(event, SequenceFinished):
            ends[event.sequence_index] = (event.finish_reason, event.stop_reason)
        elif isinstance(event, Finished):
            if num_sequences == 1:
                ends[0] = (event.finish_reason, event.stop_reason)
            whole = [[*one, *last] for one, last in zip(chunks, latest, strict=True)]
            return Collected(accepted, whole, ends, event, prompt_logprobs)
    raise BatonError("the stream ended before its request did")


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt with which the text of each of its outputs begins."""

    text: str
    token_ids: Sequence[int] = ()
    """The tokens of which log-probabilities are wanted; empty: none is."""
    num_logprobs: int = 0
    """How many of the most likely tokens are wanted with each: `prompt_logprobs` may have asked for more of them."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The complete answer of one prompt."""

    accepted: Accepted
    chunks: Sequence[Sequence[Chunk]]
    """The chunks of each sequence."""
    ends: Sequence[tuple[str, int | str | None]]
    """Why each sequence ended, and by which stop token or string."""
    finished: Finished
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    fingerprint: str = ""
    """`ModelCard.fingerprint` while it was made; empty: there is none, or it changed meanwhile."""

    async def choice(
        self,
        answer_format: AnswerFormat,
        options: AnswerOptions,
        texts: TokenTexts,
        place: int,
        index: int,
        echo: EchoedPrompt | None = None,
        parsed: ParsedSequence | None = None,
        **more: object,
    ) -> Pieces:
        """A sequence as one of OpenAI's choices, in JSON. `place`: that of the sequence; `more`: further fields.

        `parsed`: the parser of its text, if that is parsed.
        """
        chunks = self.chunks[place] if options.output else ()
        finish_reason, stop_reason = self.ends[place] if options.output else ("length", None)
        if parsed is None:
            text = "".join(chunk.text for chunk in chunks)
            before = {"index": index, **answer_format.choice_of(text if echo is None else echo.text + text)}
        else:
            before = {"index": index, "message": await _message(parsed, chunks)}
            finish_reason = parsed.finish_reason(finish_reason)
        after = {"finish_reason": finish_reason, "stop_reason": stop_reason, **more}
        if options.token_ids:
            after["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
        yield f'{_json(before)[:-1]}, "logprobs": '
        if options.logprobs:
            async for piece in self._logprobs(answer_format, texts, chunks, echo):
                yield piece
        else:
            yield "null"
        if options.prompt_logprobs and place == 0 and not answer_format.has_one_prompt:
            yield ', "prompt_logprobs": '
            async for piece in self.prompt_logprobs_json(texts.spelling):
                yield piece
        yield f", {_json(after)[1:]}"

    async def _logprobs(
        self, answer_format: AnswerFormat, texts: TokenTexts, chunks: Sequence[Chunk], echo: EchoedPrompt | None
    ) -> Pieces:
        """The log-probabilities of a sequence, behind those of an echoed prompt, as one object in JSON."""
        num_echoed = len(self.prompt_logprobs) + 1 if echo is not None and echo.token_ids else 0
        texts = replace(texts, context=self.accepted.contexts[0])
        writer = answer_format.logprobs(texts, num_echoed, 0 if echo is None else len(echo.text))
        brace = "{"
        for name, entries in writer.lists.items():
            yield f'{brace}"{name}": ['
            async for piece in _entries_json(entries, self._runs(chunks, echo)):
                yield piece
            yield "]"
            brace = ", "
        yield "}"

    def _runs(self, chunks: Sequence[Chunk], echo: EchoedPrompt | None) -> Iterator[Sequence[TokenLogprobs]]:
        """The positions of a sequence, behind those of an echoed prompt, a few at a time."""
        if echo is not None and echo.token_ids:
            yield [unknown(echo.token_ids[0])]
            for run in _in_runs(self.prompt_logprobs):
                yield [replace(position, top=position.top[: echo.num_logprobs]) for position in run]
        yield from runs_of(chunks)

    async def prompt_logprobs_json(self, spelling: Spelling) -> Pieces:
        """The log-probabilities of the prompt in vLLM's format. The first token has none."""
        yield "[null"
        for run in _in_runs(self.prompt_logprobs):
            await asyncio.sleep(0)
            yield "".join(f", {_json(entry)}" for entry in prompt_entries(run, spelling))
        yield "]"


async def in_turns(chunks: Sequence[Chunk]) -> AsyncGenerator[Chunk, None]:
    """The chunks of a sequence. They may take long to parse, so other requests get their turns between them."""
    for place, chunk in enumerate(chunks):
        if place:
            await asyncio.sleep(0)
        yield chunk


async def _message(parsed: ParsedSequence, chunks: Sequence[Chunk]) -> Mapping[str, Any]:
    """The message that a sequence's text is."""
    message = ParsedMessage()
    async for chunk in in_turns(chunks):
        parsed.count(chunk.token_ids)
        message.add(parsed.push(chunk.text))
    message.add(parsed.finish())
    return message.fields()


def runs_of(chunks: Sequence[Chunk]) -> Iterator[Sequence[TokenLogprobs]]:
    """The log-probabilities of chunks, as few at a time as are written in one turn of the event loop."""
    for chunk in chunks:
        yield from _in_runs(chunk.logprobs)


def _in_runs(positions: Sequence[TokenLogprobs]) -> Iterator[Sequence[TokenLogprobs]]:
    for first in range(0, len(positions), _POSITIONS_A_TURN):
        yield positions[first : first + _POSITIONS_A_TURN]


async def _entries_json(entries: ListWriter, runs: Iterator[Sequence[TokenLogprobs]]) -> Pieces:
    """The entries of one list in JSON. They may be a million numbers, so other requests get their turns."""
    comma = ""
    for run in runs:
        await asyncio.sleep(0)
        yield comma + _json(entries(run))[1:-1]
        comma = ", "


async def whole_answer(
    answer_format: AnswerFormat,
    label: Label,
    answers: Sequence[Collected],
    options: AnswerOptions,
    texts: TokenTexts,
    prompts: Sequence[Sequence[int]] = (),
    echoed: Sequence[EchoedPrompt] = (),
    parser: Callable[[int], ParsedSequence] | None = None,
) -> Pieces:
    """The answers of all prompts as one JSON object.

    `prompts`: the token ids of the prompts, if they are wanted. `echoed`: the prompts that begin their outputs' texts.
    `parser` makes the parser of a choice, if texts are parsed.
    """
    head = {"id": label.id, "object": answer_format.object_name, "created": label.created, "model": label.model}
    head["system_fingerprint"] = label.fingerprint
    yield f'{_json(head)[:-1]}, "choices": ['
    index = num_reasoning_tokens = 0
    for answer, prompt, echo in zip_longest(answers, prompts, echoed):
        for place in range(len(answer.chunks)):
            if index:
                await asyncio.sleep(0)  # there may be hundreds of long ones
                yield ", "
            # In the first choice of each prompt alone, since a prompt may be long and its choices many.
            more = {"prompt_token_ids": prompt} if prompt and place == 0 and not answer_format.has_one_prompt else {}
            parsed = parser(index) if parser is not None else None
            async for piece in answer.choice(answer_format, options, texts, place, index, echo, parsed, **more):
                yield piece
            num_reasoning_tokens += parsed.num_reasoning_tokens if parsed is not None else 0
            index += 1
    ends = [answer.finished for answer in answers]
    tail: dict[str, object] = {"usage": final_usage(ends, num_reasoning_tokens, has_output=options.output)}
    if prompts and answer_format.has_one_prompt:
        tail["prompt_token_ids"] = prompts[0]
    yield "], "
    if options.prompt_logprobs and answer_format.has_one_prompt:
        yield '"prompt_logprobs": '
        async for piece in answers[0].prompt_logprobs_json(texts.spelling):
            yield piece
        yield ", "
    yield _json(tail)[1:]


async def send_whole(
    client: Client, headers: Headers, pieces: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
) -> None:
    """Send an answer as it is written: at once if it is short, and otherwise in pieces, as fast as the client reads.

    `close` is awaited before the last piece is sent: when a client has its answer, its requests are over.
    """
    waiting: list[bytes] = []
    num_bytes, most = 0, _SHORT_ANSWER_BYTES
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if num_bytes >= most:
                    if not client.has_begun:
                        client.will_answer_in_pieces(headers)
                    await client.write(b"".join(waiting))
                    waiting, num_bytes, most = [], 0, _WRITE_BYTES
                waiting.append(piece)
                num_bytes += len(piece)
        await close()
    except Exception:
        if not client.has_begun:
            raise
        _log.exception("an answer failed while it was sent: its connection is cut")
        return
    if client.has_begun:
        await client.write(b"".join(waiting), more=False)
    else:
        await client.answer(200, headers, b"".join(waiting))


def path_headers(finished: Finished) -> Headers:
    """Headers that name the nodes of the request, with the names of gRPC's trailing metadata."""
    return [(key.encode(), value.encode()) for key, value in path_to_metadata(finished)]


def seed_headers(accepted: Accepted) -> Headers:
    """A header with the seed in use: a request with this seed gives the same tokens."""
    return [(b"baton-seed", b"%d" % accepted.seed)]
