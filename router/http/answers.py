"""Makes answers from the core's events: a stream of server-sent events, or one object at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from baton.background import gather_all
from baton.errors import BatonError
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, PromptLogprobs, SequenceFinished, joined
from baton.messages.sampling import TokenLogprobs
from baton.messages.speculation import DraftCounts
from baton.wire.codec.generation import path_to_metadata
from router.flight.event_queue import LONG_TEXT
from router.http.client import Client
from router.http.errors import Headers

_log = logging.getLogger(__name__)

Events = AsyncGenerator[GenerateEvent, None]

_CHUNKS_JOINED = 64
"""So many chunks of a sequence are joined to one while an answer is collected."""
_POSITIONS_A_TURN = 64
"""Positions whose log-probabilities are written in one turn of the event loop: some milliseconds' work."""
_SHORT_ANSWER_BYTES = 1 << 20
"""About how long an answer may be that is sent as one piece, with its length."""
_WRITE_BYTES = 64 << 10
"""About how many bytes of a longer answer are sent at once."""


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


@asynccontextmanager
async def ending_with_errors(client: Client, last_events: Callable[[BatonError], bytes]) -> AsyncGenerator[None, None]:
    """A stream is sent meanwhile. An error before anything was sent is raised; a later one ends the stream with
    `last_events`.
    """
    try:
        yield
    except Exception as error:
        if not client.has_begun:
            raise
        if not isinstance(error, BatonError):
            _log.exception("a stream failed")
            error = BatonError("internal error; the log of the server has it")
        await client.write(last_events(error), more=False)


async def stream(client: Client, events: Events, writer: StreamWriter, opening: bytes) -> None:
    """Send events as they come. `opening` is sent with the first tokens, so that a failure before them is answered with
    its own status.
    """
    pending = opening
    async with ending_with_errors(client, lambda error: pending + writer.error(error)):
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
            all_chunks = [[*earlier, *last] for earlier, last in zip(chunks, latest, strict=True)]
            return Collected(accepted, all_chunks, ends, event, prompt_logprobs)
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
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    fingerprint: str = ""
    """`ModelCard.fingerprint` while it was made; empty: there is none, or it changed meanwhile."""


async def in_turns(chunks: Sequence[Chunk]) -> AsyncGenerator[Chunk, None]:
    """The chunks of a sequence. They may take long to parse, so other requests get their turns between them."""
    for index, chunk in enumerate(chunks):
        if index:
            await asyncio.sleep(0)
        yield chunk


def runs_of(chunks: Sequence[Chunk]) -> Iterator[Sequence[TokenLogprobs]]:
    """The log-probabilities of chunks, as few at a time as are written in one turn of the event loop."""
    for chunk in chunks:
        yield from in_runs(chunk.logprobs)


def in_runs(positions: Sequence[TokenLogprobs]) -> Iterator[Sequence[TokenLogprobs]]:
    for first in range(0, len(positions), _POSITIONS_A_TURN):
        yield positions[first : first + _POSITIONS_A_TURN]


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


def path_headers(finished: Finished, *others: Finished) -> Headers:
    """Headers that name the nodes of the request, with the names of gRPC's trailing metadata. `others`: the ends of its
    further prompts, all of which the header about bits is about."""
    finished = replace(finished, bit_exact=are_bit_exact([finished, *others]))
    return [(key.encode(), value.encode()) for key, value in path_to_metadata(finished)]


def are_bit_exact(ends: Sequence[Finished]) -> bool:
    """Whether no part of an answer says that it is not bit-exact."""
    return all(end.bit_exact is not False for end in ends)


def seed_headers(accepted: Accepted) -> Headers:
    """A header with the seed in use: a request with this seed gives the same tokens."""
    return [(b"baton-seed", b"%d" % accepted.seed)]


async def merged(request_id: str, streams: Sequence[Events], num_sequences: int) -> AsyncGenerator[GenerateEvent, None]:
    """Accepted, chunks and ends of all sequences, Finished with the sums; the first error ends all.

    `num_sequences`: of each prompt. A reader that is slow holds up all streams.
    """
    async with AsyncExitStack() as stack:
        for events in streams:
            await stack.enter_async_context(aclosing(events))
        accepted = await gather_all([accepted_of(events) for events in streams])
        contexts = [context for answer in accepted for context in answer.contexts]
        yield Accepted(request_id, accepted[0].seed, sum(answer.prompt_tokens for answer in accepted), contexts)
        queue: asyncio.Queue[tuple[int, GenerateEvent | Exception]] = asyncio.Queue(1)
        pumps = [asyncio.create_task(_pump(index, events, queue)) for index, events in enumerate(streams)]
        stack.push_async_callback(_cancelled, pumps)
        ends: dict[int, Finished] = {}
        while len(ends) < len(streams):
            index, event = await queue.get()
            first = index * num_sequences
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Chunk | SequenceFinished):
                yield replace(event, sequence_index=first + event.sequence_index)
            elif isinstance(event, Finished):
                ends[index] = event
                if num_sequences == 1:
                    yield SequenceFinished(first, event.finish_reason, event.stop_reason, event.completion_tokens)
        yield _sum_of([ends[index] for index in range(len(streams))])


async def _pump(index: int, events: Events, queue: asyncio.Queue[tuple[int, GenerateEvent | Exception]]) -> None:
    try:
        async for event in events:
            await queue.put((index, event))
            if isinstance(event, Finished):
                return
        raise BatonError("the stream ended before its request did")
    except Exception as error:
        await queue.put((index, error))


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _sum_of(ends: Sequence[Finished]) -> Finished:
    """The first end, with the tokens of all."""
    return replace(
        ends[0],
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=sum(end.cached_tokens for end in ends),
        draft_counts=DraftCounts(
            sum(end.draft_counts.num_drafted for end in ends), sum(end.draft_counts.num_accepted for end in ends)
        ),
        bit_exact=are_bit_exact(ends),
    )
