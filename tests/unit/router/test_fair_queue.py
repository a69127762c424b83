"""Readers continue in order, a bounded number per turn of the event loop, and none is forgotten."""

from __future__ import annotations

import asyncio

from baton.messages.generation import Chunk
from router.flight.event_queue import EventQueue, FairQueue


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
    # Those who had to wait take what came meanwhile along.
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
