"""Calls of other nodes at an encode node: tenants take turns, what waits is bounded, and rows are given back."""

from __future__ import annotations

from random import Random

from baton.engine.encoder_cache import EncoderCache, EncoderInput
from baton.errors import EngineFault, InvalidRequest, QueueFull
from baton.messages.spans import EncoderContent
from baton.node.row_requests import RowRequests, WantedRows


class Desk:
    """Row requests, the cache behind them, and what they answered by the numbers of the calls."""

    def __init__(self, num_rows: int = 100, most_waiting: int = 8, most_bytes: int = 1000) -> None:
        self.cache = EncoderCache(num_rows)
        self.requests = RowRequests(self.cache, most_waiting, most_bytes)
        self.answers: dict[int, str] = {}
        """Calls that were answered, each with the class of its error."""
        self.encoded: list[str] = []
        """All inputs that were to be encoded."""
        self.evicted: set[str] = set()
        self._number = 0

    def ask(self, name: str, tenant: str = "", num_rows: int = 10, data: bytes = b"") -> int:
        self._number += 1
        encoder_input = EncoderInput(EncoderContent(name, data), 0, num_rows, num_rows, tenant)
        self._take(self.requests.add(WantedRows(self._number, encoder_input, lambda error: None)))
        return self._number

    def end(self, number: int) -> None:
        self._take(self.requests.end(number))

    def made(self, name: str = "") -> None:
        """The input that is being encoded is done."""
        name = name or self.encoded[-1]
        self.cache.encoded(name)
        self._take(self.requests.encoded(name))

    def fail(self, name: str, error: Exception) -> None:
        self.cache.failed(name)
        self._take(self.requests.failed(name, error))

    def _take(self, answers: object) -> None:
        for wanted, error in answers:  # type: ignore[attr-defined]
            assert wanted.number not in self.answers
            self.answers[wanted.number] = type(error).__name__ if error else ""
        self.encoded += [each.digest for each in self.cache.take_inputs_to_encode()]
        self.evicted.update(self.cache.take_evicted())


def test_an_input_is_made_once_for_all_that_ask() -> None:
    desk = Desk()
    calls = [desk.ask("a") for _ in range(3)]
    assert (desk.encoded, desk.answers) == (["a"], {})
    desk.made()
    assert desk.answers == dict.fromkeys(calls, "")
    later = desk.ask("a")
    assert (desk.encoded, desk.answers[later]) == (["a"], "")


def test_a_tenant_with_one_input_waits_for_one_of_a_flood() -> None:
    desk = Desk(most_waiting=32)
    for number in range(8):
        desk.ask(f"flood{number}", "flood")
    desk.ask("one", "small")
    desk.made()
    assert desk.encoded == ["flood0", "one"]
    desk.made()
    desk.ask("two", "small")
    desk.made()
    # By rows: a tenant with larger inputs gets fewer of them.
    assert desk.encoded == ["flood0", "one", "flood1", "two"]
    desk = Desk(1000, most_waiting=64)
    for number in range(8):
        desk.ask(f"large{number}", "large", num_rows=40)
        desk.ask(f"small{number}", "small", num_rows=10)
    for _ in range(9):
        desk.made()
    assert sum(name.startswith("large") for name in desk.encoded[:10]) in (2, 3)


def test_a_flood_leaves_room_in_the_queue_for_other_tenants() -> None:
    desk = Desk(most_waiting=8, most_bytes=1000)
    flood = [desk.ask(f"flood{number}", "flood") for number in range(5)]
    assert desk.answers == {flood[3]: QueueFull.__name__, flood[4]: QueueFull.__name__}
    desk.ask("one", "small", data=bytes(250))
    assert len(desk.answers) == 2
    large = desk.ask("two", "small", data=bytes(1))
    assert desk.answers[large] == QueueFull.__name__
    alone = Desk(most_waiting=8, most_bytes=1000)
    for number in range(9):
        alone.ask(f"input{number}")
    assert alone.answers == {}
    assert alone.answers.get(alone.ask("more")) == QueueFull.__name__


def test_what_is_held_is_not_evicted_and_the_next_input_waits_for_room() -> None:
    desk = Desk(num_rows=20)
    first = desk.ask("a")
    desk.made()
    second = desk.ask("b", num_rows=20)
    assert desk.encoded == ["a"]
    desk.end(first)
    assert (desk.encoded, desk.evicted) == (["a", "b"], {"a"})
    desk.made()
    assert desk.answers[second] == ""
    too_large = desk.ask("c", num_rows=21)
    assert desk.answers[too_large] == InvalidRequest.__name__


def test_a_caller_that_leaves_holds_nothing_up() -> None:
    desk = Desk()
    first, second, third = desk.ask("a"), desk.ask("b"), desk.ask("c")
    desk.end(second)
    desk.end(first)
    # Nobody wants the first one any more, and the second one had left before its turn.
    assert (desk.encoded, desk.evicted) == (["a", "c"], {"a"})
    desk.fail("c", EngineFault("x"))
    assert desk.answers == {third: EngineFault.__name__}
    assert desk.cache.num_used_rows == 0


def test_every_call_is_answered_once_and_all_is_given_back() -> None:
    for seed in range(200):
        rng = Random(seed)
        desk = Desk(num_rows=60, most_waiting=rng.choice((4, 40)))
        open_calls: set[int] = set()
        for _ in range(120):
            pick = rng.random()
            if pick < 0.45:
                name = f"i{rng.randrange(12)}"
                open_calls.add(
                    desk.ask(name, rng.choice(("", "a", "b")), num_rows=10 + 5 * (len(name) + int(name[1:]) % 7))
                )
            elif pick < 0.75 and open_calls:
                number = rng.choice(sorted(open_calls))
                open_calls.discard(number)
                desk.end(number)
            else:
                for name in desk.encoded[-2:]:
                    if desk.cache.awaits(name):
                        desk.made(name) if rng.random() < 0.8 else desk.fail(name, EngineFault("x"))
        for _ in range(100):
            for name in desk.encoded:
                if desk.cache.awaits(name):
                    desk.made(name)
            for number in [number for number in open_calls if number in desk.answers]:
                open_calls.discard(number)
                desk.end(number)
        for number in open_calls:
            desk.end(number)
        assert desk.requests.num_waiting == desk.requests.num_running == 0
        # Nothing is held: all rows can go for others.
        full = desk.ask("full", num_rows=60)
        desk.made("full")
        assert desk.answers[full] == ""
