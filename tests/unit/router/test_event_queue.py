"""The queue of events for a client: in order, waiting chunks merged, the end last."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.errors import EngineFault
from baton.messages.generation import Accepted, Chunk, GenerateEvent, KnownText, SequenceFinished
from baton.messages.sampling import TokenLogprobs
from router.flight.event_queue import (
    LONG_TEXT,
    MANY_LOGPROBS,
    MAX_JOINED_LOGPROBS,
    MAX_JOINED_TOKENS,
    EventQueue,
    FairQueue,
)


def chunk(first_index: int, text: str, sequence_index: int = 0) -> Chunk:
    tokens = tuple(map(ord, text))
    return Chunk(first_index, tokens, text, [TokenLogprobs(t, 0.5, 1, ()) for t in tokens], sequence_index)


async def all_of(queue: EventQueue) -> list[GenerateEvent]:
    events = []
    while (event := await queue.get()) is not None:
        events.append(event)
    return events


async def test_waiting_chunks_are_merged_into_one() -> None:
    queue = EventQueue()
    queue.put_all([chunk(0, "ab"), chunk(2, "c"), chunk(3, "def")])
    assert queue.backlog == 6
    whole = await queue.get()
    assert isinstance(whole, Chunk)
    assert (whole.first_index, whole.token_ids, whole.text) == (0, tuple(map(ord, "abcdef")), "abcdef")
    assert [position.token_id for position in whole.logprobs] == list(whole.token_ids)
    assert queue.backlog == 0


async def test_only_adjacent_chunks_of_one_sequence_are_merged() -> None:
    queue = EventQueue()
    accepted, ended, rest = Accepted("r", 1, 3), SequenceFinished(1, "stop", None, 1), Chunk(2, (), "!")
    queue.put_all([accepted, chunk(0, "a"), chunk(0, "x", 1), chunk(1, "y", 1), ended, chunk(1, "b"), rest])
    queue.end()
    events = await all_of(queue)
    assert [event for event in events if not isinstance(event, Chunk)] == [accepted, ended]
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [(one.sequence_index, one.text) for one in chunks] == [(0, "a"), (1, "xy"), (0, "b"), (0, "!")]


async def test_long_texts_are_left_to_the_reader() -> None:
    """The reader may let others have their turn between two of them."""
    queue, taken = EventQueue(), list[Chunk]()
    queue.pass_chunks_to(lambda chunk: not taken.append(chunk))  # type: ignore[func-returns-value]
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(chunk(0, "a"))
    queue.put(KnownText(0, (), "b" * (LONG_TEXT + 1), (), 1))
    assert isinstance(await reader, KnownText)
    assert [one.text for one in taken] == ["a"]


@pytest.mark.parametrize("most", [MAX_JOINED_TOKENS, MAX_JOINED_LOGPROBS])
async def test_a_long_backlog_is_delivered_in_messages_of_bounded_size(most: int) -> None:
    queue = EventQueue()
    chunks = [chunk(index, "a") for index in range(2 * most + 5)]
    if most == MAX_JOINED_TOKENS:
        chunks = [replace(one, logprobs=()) for one in chunks]
    queue.put_all(chunks)
    queue.end()
    sizes = [len(event.token_ids) for event in await all_of(queue) if isinstance(event, Chunk)]
    assert sizes == [most, most, 5]


async def test_many_log_probabilities_are_left_to_the_reader_and_use_up_the_turn() -> None:
    turns = FairQueue()
    many, other = EventQueue(turns), EventQueue(turns)
    taker = Taker(many)
    await asyncio.sleep(0)
    many.put(chunk(0, "a" * MANY_LOGPROBS))
    assert taker.num_woken == 0
    many.put(chunk(MANY_LOGPROBS, "a" * MAX_JOINED_LOGPROBS))
    other.put(chunk(0, "b"))
    await asyncio.sleep(0)
    assert (taker.num_woken, len(taker.text)) == (1, MANY_LOGPROBS + MAX_JOINED_LOGPROBS)
    assert not turns.may_go()
    many.end()
    await taker.task


async def test_a_waiting_reader_is_woken_and_may_be_cancelled() -> None:
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


async def test_an_error_comes_after_all_events_and_only_the_first_end_counts() -> None:
    queue = EventQueue()
    queue.put(chunk(0, "a"))
    queue.end(EngineFault("first"))
    queue.end()
    assert isinstance(await queue.get(), Chunk)
    for _ in range(2):
        with pytest.raises(EngineFault, match="first"):
            await queue.get()


class Taker:
    """A reader that takes chunks directly as long as it has room."""

    def __init__(self, queue: EventQueue) -> None:
        self.taken: list[GenerateEvent] = []
        self.has_room = True
        self.is_broken = False
        self.num_woken = 0
        self._queue = queue
        queue.pass_chunks_to(self._take)
        self.task = asyncio.create_task(self._read())

    def _take(self, chunk: Chunk) -> bool:
        if self.is_broken:
            raise RuntimeError("it can't")
        if self.has_room:
            self.taken.append(chunk)
        return self.has_room

    async def _read(self) -> None:
        while (event := await self._queue.get()) is not None:
            self.num_woken += 1
            self.taken.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.taken if isinstance(event, Chunk))


async def test_a_waiting_reader_takes_chunks_in_the_same_call_and_other_events_in_order() -> None:
    queue = EventQueue()
    queue.put(chunk(0, "a"))
    taker = Taker(queue)
    await asyncio.sleep(0)
    assert (taker.text, taker.num_woken) == ("a", 1)  # it was there before anybody waited
    queue.put(chunk(1, "bc"))
    assert (taker.text, taker.num_woken, queue.backlog) == ("abc", 1, 0)
    ended = SequenceFinished(0, "stop", None, 3)
    queue.put(ended)
    queue.put(chunk(3, "d"))
    queue.end()
    await taker.task
    assert taker.text == "abcd"
    assert taker.taken[2] is ended


async def test_a_reader_that_can_not_take_a_chunk_at_once_is_woken_for_it() -> None:
    queue = EventQueue()
    taker = Taker(queue)
    await asyncio.sleep(0)
    taker.has_room = False
    queue.put(chunk(0, "ab"))
    assert queue.backlog == 2
    queue.put(chunk(2, "c"))
    await asyncio.sleep(0)
    assert (taker.text, taker.num_woken, queue.backlog) == ("abc", 1, 0)
    await asyncio.sleep(0)
    taker.is_broken = True
    queue.put(chunk(3, "d"))
    queue.end()
    await taker.task
    assert (taker.text, taker.num_woken) == ("abcd", 2)


async def test_chunks_that_wait_for_their_turn_of_the_loop_are_merged() -> None:
    turns = FairQueue(per_turn=1)
    queues = [EventQueue(turns) for _ in range(3)]
    takers = [Taker(queue) for queue in queues]
    await asyncio.sleep(0)
    for queue in queues:
        queue.put(chunk(0, "a"))
        queue.put(chunk(1, "b"))
    assert [taker.text for taker in takers] == ["a", "", ""]
    for _ in range(8):
        await asyncio.sleep(0)
    assert [taker.text for taker in takers] == ["ab"] * 3
    assert [len(taker.taken) for taker in takers] == [2, 1, 1]
    assert all(taker.num_woken == 0 for taker in takers)
    for queue, taker in zip(queues, takers, strict=True):
        queue.end()
        await taker.task


async def test_a_turn_after_everything_was_taken_wakes_no_reader() -> None:
    turns = FairQueue(per_turn=1)
    queue = EventQueue(turns)
    events: list[GenerateEvent] = []

    async def read() -> None:
        while (event := await queue.get()) is not None:
            events.append(event)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    queue.put(chunk(0, "a"))  # it is woken, and runs only later
    queue.put(chunk(1, "b"))  # this turn of the loop is used up: another one is asked for
    for _ in range(8):
        await asyncio.sleep(0)
    assert not reader.done()
    queue.put(chunk(2, "c"))
    queue.end()
    await reader
    assert "".join(event.text for event in events if isinstance(event, Chunk)) == "abc"


async def test_the_end_wakes_a_reader_that_has_taken_everything() -> None:
    queue = EventQueue()
    taker = Taker(queue)
    await asyncio.sleep(0)
    queue.put(chunk(0, "a"))
    queue.end(EngineFault("over"))
    with pytest.raises(EngineFault, match="over"):
        await taker.task
    assert taker.text == "a"


async def test_a_slow_reader_of_many_sequences_makes_no_long_list() -> None:
    queue, count, steps = EventQueue(), 128, 300
    for step in range(steps):
        queue.put_all(Chunk(step, (97,), "a", (), index) for index in range(count))
    queue.put_all(SequenceFinished(index, "length", None, steps) for index in range(count))
    queue.end()
    assert queue.backlog == count * steps
    events = await all_of(queue)
    assert len(events) < 4 * count
    received = [0] * count
    for event in events:
        if isinstance(event, SequenceFinished):
            assert received[event.sequence_index] == steps, "its end comes behind all of its tokens"
        elif isinstance(event, Chunk):
            assert event.first_index == received[event.sequence_index]
            received[event.sequence_index] += len(event.token_ids)
            assert len(event.token_ids) <= MAX_JOINED_TOKENS
    assert received == [steps] * count


async def reader(name: int, queue: EventQueue, order: list[tuple[int, int]]) -> None:
    while (event := await queue.get()) is not None:
        assert isinstance(event, Chunk)
        order.append((name, len(event.token_ids)))


def tell_all(queues: list[EventQueue], index: int) -> None:
    for queue in queues:
        queue.put(Chunk(index, (index,), "x"))


async def test_a_bounded_number_of_readers_goes_on_per_turn_of_the_loop() -> None:
    turns = FairQueue(per_turn=2)
    queues = [EventQueue(turns) for _ in range(6)]
    order: list[tuple[int, int]] = []
    tasks = [asyncio.create_task(reader(name, queue, order)) for name, queue in enumerate(queues)]
    await asyncio.sleep(0)
    tell_all(queues, 0)
    await asyncio.sleep(0)
    assert order == [(0, 1), (1, 1)]
    tell_all(queues, 1)
    for queue in queues:
        queue.end()
    await asyncio.gather(*tasks)
    # Readers that had to wait also take what came meanwhile.
    assert order[2:] == [(2, 2), (3, 2), (4, 2), (5, 2), (0, 1), (1, 1)]


async def test_a_cancelled_reader_uses_no_turn() -> None:
    turns = FairQueue(per_turn=1)
    queues = [EventQueue(turns) for _ in range(4)]
    order: list[tuple[int, int]] = []
    tasks = [asyncio.create_task(reader(name, queue, order)) for name, queue in enumerate(queues)]
    await asyncio.sleep(0)
    tell_all(queues, 0)
    tasks[1].cancel()
    tasks[2].cancel()
    for queue in queues:
        queue.end()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [(0, 1), (3, 1)]
    again = EventQueue(turns)
    again.put(Chunk(0, (1,), "x"))
    assert await again.get() is not None


async def test_a_reader_that_fails_in_its_turn_does_not_affect_others() -> None:
    turns = FairQueue(per_turn=1)
    first = EventQueue(turns)
    first.put(Chunk(0, (1,), "x"))
    assert await first.get() is not None

    def broken() -> bool:
        raise ValueError("of one reader")

    turns.serve(broken)  # the turn is spent: it waits for the next one
    for _ in range(2):
        behind = EventQueue(turns)
        behind.put(Chunk(0, (1,), "x"))
        assert await behind.get() is not None
        turns.serve(broken)
