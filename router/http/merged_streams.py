"""The streams of several prompts as one, whose sequences are those of all prompts, in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from baton.background import gather_all
from baton.errors import BatonError
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, SequenceFinished
from baton.messages.speculation import DraftCounts
from router.http.answers import Events, accepted_of


async def merged(request_id: str, streams: Sequence[Events], num_sequences: int) -> AsyncGenerator[GenerateEvent, None]:
    """Accepted, chunks and ends of all sequences, Finished with the sums; the first error ends all.

    `num_sequences`: of each prompt. A reader that is slow holds up all streams.
    """
    async with AsyncExitStack() as stack:
        for events in streams:
            await stack.enter_async_context(aclosing(events))
        accepted = await gather_all([accepted_of(events) for events in streams])
        contexts = [context for one in accepted for context in one.contexts]
        yield Accepted(request_id, accepted[0].seed, sum(one.prompt_tokens for one in accepted), contexts)
        queue: asyncio.Queue[tuple[int, GenerateEvent | Exception]] = asyncio.Queue(1)
        pumps = [asyncio.create_task(_pump(place, events, queue)) for place, events in enumerate(streams)]
        stack.push_async_callback(_cancelled, pumps)
        ends: dict[int, Finished] = {}
        while len(ends) < len(streams):
            place, event = await queue.get()
            first = place * num_sequences
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Chunk | SequenceFinished):
                yield replace(event, sequence_index=first + event.sequence_index)
            elif isinstance(event, Finished):
                ends[place] = event
                if num_sequences == 1:
                    yield SequenceFinished(first, event.finish_reason, event.stop_reason, event.completion_tokens)
        yield _sum_of([ends[place] for place in range(len(streams))])


async def _pump(place: int, events: Events, queue: asyncio.Queue[tuple[int, GenerateEvent | Exception]]) -> None:
    try:
        async for event in events:
            await queue.put((place, event))
            if isinstance(event, Finished):
                return
        raise BatonError("the stream ended before its request did")
    except Exception as error:
        await queue.put((place, error))


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
    )
