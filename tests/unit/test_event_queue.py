"""What waits for a client: in order, chunks that wait joined, the end last."""

from __future__ import annotations

import asyncio

import pytest

from baton.engine.outputs import TokenLogprobs
from baton.errors import EngineFault
from baton.rpc.messages import Accepted, Chunk, GenerateEvent, SequenceFinished
from router.event_queue import MAX_JOINED_TOKENS, EventQueue


def chunk(first_index: int, text: str, sequence_index: int = 0) -> Chunk:
    tokens = tuple(map(ord, text))
    return Chunk(first_index, tokens, text, [TokenLogprobs(t, 0.5, 1, ()) for t in tokens], sequence_index)


async def all_of(queue: EventQueue) -> list[GenerateEvent]:
    events = []
    while (event := await queue.get()) is not None:
        events.append(event)
    return events


async def test_chunks_that_wait_are_taken_as_one() -> None:
    queue = EventQueue()
    queue.put_all([chunk(0, "ab"), chunk(2, "c"), chunk(3, "def")])
    assert queue.backlog == 6
    whole = await queue.get()
    assert isinstance(whole, Chunk)
    assert (whole.first_index, whole.token_ids, whole.text) == (0, tuple(map(ord, "abcdef")), "abcdef")
    assert [position.token_id for position in whole.logprobs] == list(whole.token_ids)
    assert queue.backlog == 0


async def test_only_what_belongs_together_is_joined() -> None:
    queue = EventQueue()
    accepted, ended, rest = Accepted("r", 1, 3), SequenceFinished(1, "stop", None, 1), Chunk(2, (), "!")
    queue.put_all([accepted, chunk(0, "a"), chunk(0, "x", 1), chunk(1, "y", 1), ended, chunk(1, "b"), rest])
    queue.end()
    events = await all_of(queue)
    assert [event for event in events if not isinstance(event, Chunk)] == [accepted, ended]
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [(one.sequence_index, one.text) for one in chunks] == [(0, "a"), (1, "xy"), (0, "b"), (0, "!")]


async def test_a_long_backlog_comes_in_messages_of_bounded_size() -> None:
    queue = EventQueue()
    count = 2 * MAX_JOINED_TOKENS + 5
    queue.put_all(chunk(index, "a") for index in range(count))
    queue.end()
    sizes = [len(event.token_ids) for event in await all_of(queue) if isinstance(event, Chunk)]
    assert sizes == [MAX_JOINED_TOKENS, MAX_JOINED_TOKENS, 5]


async def test_a_reader_that_waits_is_woken_and_may_give_up() -> None:
    queue = EventQueue()
    given_up = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(chunk(0, "a"))
    queue.put(chunk(1, "b"))
    event = await waiting
    assert isinstance(event, Chunk)
    assert event.text == "ab"


async def test_the_error_of_the_end_comes_after_all_events_and_only_the_first_end_counts() -> None:
    queue = EventQueue()
    queue.put(chunk(0, "a"))
    queue.end(EngineFault("first"))
    queue.end()
    assert isinstance(await queue.get(), Chunk)
    for _ in range(2):
        with pytest.raises(EngineFault, match="first"):
            await queue.get()
