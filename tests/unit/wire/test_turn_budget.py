"""All connections together use a bounded part of each turn of the loop."""

from __future__ import annotations

import asyncio

from baton.wire.turn_budget import TurnBudget
from tests.doubles.fake_clock import FakeClock


class Source:
    """Has this number of steps to do, each of one millisecond."""

    def __init__(self, name: str, steps: int, clock: FakeClock, done: list[str]) -> None:
        self._name, self._steps, self._clock, self._done = name, steps, clock, done

    def step(self) -> bool:
        self._clock.advance(0.001)
        self._done.append(self._name)
        self._steps -= 1
        return self._steps > 0


async def test_a_turn_takes_no_more_than_its_budget_however_many_sources_wait() -> None:
    clock, done = FakeClock(), list[str]()
    budget = TurnBudget(asyncio.get_running_loop(), 0.0045, clock.monotonic)
    for place in range(80):
        budget.step(Source(str(place), 3, clock, done))
    in_each_turn = []
    while budget.num_waiting:
        before = len(done)
        await asyncio.sleep(0)
        in_each_turn.append(len(done) - before)
    assert len(done) == 240
    # The fifth step begins within the time.
    assert max(in_each_turn) == 5


async def test_sources_take_turns_and_a_lone_one_does_not_wait() -> None:
    clock, done = FakeClock(), list[str]()
    budget = TurnBudget(asyncio.get_running_loop(), 1.0, clock.monotonic)
    budget.step(Source("alone", 1, clock, done))
    assert done == ["alone"]
    budget.step_later(Source("a", 2, clock, done))
    budget.step_later(Source("b", 2, clock, done))
    assert done == ["alone"]
    await asyncio.sleep(0)
    assert done == ["alone", "a", "b", "a", "b"]


async def test_unused_time_of_a_turn_is_not_saved() -> None:
    clock, done = FakeClock(), list[str]()
    budget = TurnBudget(asyncio.get_running_loop(), 0.0015, clock.monotonic)
    budget.step(Source("a", 1, clock, done))
    for _ in range(100):
        await asyncio.sleep(0)
    budget.step(Source("b", 9, clock, done))
    assert done == ["a", "b", "b"]


async def test_sources_with_little_input_go_before_flooding_ones() -> None:
    clock, done = FakeClock(), list[str]()
    budget = TurnBudget(asyncio.get_running_loop(), 0.0045, clock.monotonic)
    for place in range(80):
        budget.step(Source(f"flooder {place}", 1_000, clock, done))
    for _ in range(100):
        await asyncio.sleep(0)
    done.clear()
    budget.step(Source("victim", 1, clock, done))
    await asyncio.sleep(0)
    assert "victim" in done, "in the next turn, though eighty wait for theirs"


async def test_a_stream_of_new_sources_does_not_starve_older_ones() -> None:
    clock, done = FakeClock(), list[str]()
    budget = TurnBudget(asyncio.get_running_loop(), 0.0045, clock.monotonic)
    budget.step(Source("busy", 50, clock, done))
    while done.count("busy") < 50:
        for place in range(8):
            budget.step(Source(f"newcomer {place}", 1, clock, done))
        before = done.count("busy")
        await asyncio.sleep(0)
        assert done.count("busy") > before
