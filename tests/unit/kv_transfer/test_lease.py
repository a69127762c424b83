"""The sender's leases, case by case, and the bounds of what a sender keeps. Conversations with a reader's book are in
test_handoff_conversations, the table of states is in test_lease_table.

Cases are in lease_cases.txt. A line is what happens, and behind `->` all that the book does about it. Attempts have one
letter, and link 1 is that of process d0.x of the reader d0:

  given a read prompt           what GIVEN says happened before
  1: subscribe a 0              a message of the reader over link 1; also expect, progress, confirm, part, abandon,
                                `abandon … reading` and heartbeat
  offer a 0 5 6                 prompt blocks 0 and 1 are computed, in the sender's blocks 5 and 6
  close a 2 9                   and so is the last one
  wait 10                       seconds; then leases that are due end
  state a, deadline, stats, counters    answer what the book shows; the deadline in seconds from now
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from kv_transfer.link.link_messages import (
    Abandon,
    Closing,
    ConfirmPart,
    ConfirmRead,
    Expect,
    Heartbeat,
    LeaseMessage,
    Offer,
    PartConfirmed,
    ReadConfirmed,
    ReadProgress,
    Subscribe,
)
from kv_transfer.sender.lease import LeaseBook
from kv_transfer.sender.lease_values import LeaseState, LeaseTimes, TellReader
from tests.doubles.fake_clock import FakeClock
from tests.support.conversation import lines, names, numbers, read_cases, replay, told

A = AttemptKey("a", 1)
CLOSING = Closing(10, (7,), False)
TIMES = LeaseTimes(lease_s=10, unclaimed_s=30, grace_s=5, max_waiting=2, max_remembered=4)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def book(clock: FakeClock) -> LeaseBook:
    made = LeaseBook(clock, TIMES)
    made.link_opened(1, "d0", "d0.x")
    return made


class Sender:
    """A lease book that a case plays with."""

    def __init__(self, digest_every: int = 0) -> None:
        self.clock = FakeClock(1000.0)
        self.book = LeaseBook(self.clock, TIMES, digest_every=digest_every)
        self.book.link_opened(1, "d0", "d0.x")

    def say(self, line: str) -> list[str]:
        match line.split():
            case [link, *words] if link.endswith(":"):
                return told(self.book.received(int(link[:-1]), message(*words)))
            case ["offer", name, first, *blocks]:
                return told(self.book.offer(AttemptKey(name, 1), int(first), numbers(blocks)))
            case ["close", name, first, *blocks]:
                return told(self.book.offer(AttemptKey(name, 1), int(first), numbers(blocks), CLOSING))
            case ["begun", name]:
                return told(self.book.begun(AttemptKey(name, 1)))
            case ["ended", name]:
                return told(self.book.ended(AttemptKey(name, 1)))
            case ["withdraw", name, why, *more]:
                causes = [TransferCause(word) for word in more if word != "broken"] or [TransferCause.LEASE_LOST]
                return told(self.book.withdraw(AttemptKey(name, 1), why, *causes, promise_broken="broken" in more))
            case ["digested", name, *digests]:
                return told(self.book.digested(AttemptKey(name, 1), numbers(digests)))
            case ["link", number, process]:
                return told(self.book.link_opened(int(number), process.partition(".")[0], process))
            case ["closed", link]:
                return told(self.book.link_closed(int(link)))
            case ["gone", process]:
                return told(self.book.reader_gone(process))
            case ["wait", seconds]:
                self.clock.advance(float(seconds))
                return told(self.book.tick())
            case _:
                return [self.shown(line)]

    def shown(self, line: str) -> str:
        match line.split():
            case ["state", name]:
                state = self.book.state(AttemptKey(name, 1))
                return state.name if state else "none"
            case ["deadline"]:
                deadline = self.book.next_deadline()
                return "none" if deadline is None else f"{deadline - self.clock.monotonic():g}"
            case ["counters"]:
                return str(self.book.counters)
            case ["stats"]:
                stats = self.book.stats()
                return f"{stats.granted} granted, {stats.reading} reading, {stats.suspect} suspect, {stats.oldest_s} s"
            case ["blocks"]:
                return str([handoff.num_blocks for handoff in self.book.open_handoffs()])
            case ["reads", process]:
                return str(self.book.may_be_read_by(process))
        raise ValueError(line)


def message(kind: str, *words: str) -> LeaseMessage:
    match (kind, *words):
        case ("subscribe", name, first):
            return Subscribe(AttemptKey(name, 1), int(first))
        case ("expect", name):
            return Expect(AttemptKey(name, 1))
        case ("progress", name, count):
            return ReadProgress(AttemptKey(name, 1), int(count))
        case ("confirm", name):
            return ConfirmRead(AttemptKey(name, 1))
        case ("part", name, end):
            return ConfirmPart(AttemptKey(name, 1), int(end))
        case ("abandon", name, *reading):
            return Abandon(AttemptKey(name, 1), bool(reading))
        case ("heartbeat",):
            return Heartbeat(1)
    raise ValueError(kind)


GIVEN = {
    "a read prompt": "close a 0 5 6 9; 1: subscribe a 0; ended a",
    "two expectations": "1: expect a; 1: expect b",
    "a confirmation that waits": "close a 0 5 6; 1: subscribe a 0; 1: confirm a",
    "two digested blocks": "1: subscribe a 0; offer a 0 5 6; digested a 50 60",
}


@pytest.mark.parametrize("case", read_cases(Path(__file__).parent / "lease_cases.txt"))
def test_a_sender_keeps_its_leases(case: str) -> None:
    assert replay(case, Sender().say, GIVEN) == case


@pytest.mark.parametrize("case", read_cases(Path(__file__).parent / "digested_lease_cases.txt"))
def test_a_sender_says_which_digests_its_blocks_have(case: str) -> None:
    assert replay(case, Sender(digest_every=1).say, GIVEN) == case


def test_a_heartbeat_costs_the_same_however_many_leases_there_are() -> None:
    class CountingClock(FakeClock):
        """The book asks for the time whenever it sets a deadline."""

        asked = 0

        def monotonic(self) -> float:
            self.asked += 1
            return super().monotonic()

    clock = CountingClock(1000.0)
    book = LeaseBook(clock, TIMES)
    for link in (1, 2):
        book.link_opened(link, f"d{link}", f"d{link}.x")
    attempts = [AttemptKey(f"r{number}", 1) for number in range(100)]
    for number, attempt in enumerate(attempts):
        book.offer(attempt, 0, (5, 6), CLOSING)
        book.received(1 + number % 2, Subscribe(attempt, 0))
    clock.advance(9)
    clock.asked = 0
    book.received(1, Heartbeat(1))
    assert clock.asked == 1
    clock.advance(1)
    assert len(names(book.tick())) == 50, "those of the reader that was not heard"
    assert {book.state(attempt) for attempt in attempts[::2]} == {LeaseState.READING}
    assert {book.state(attempt) for attempt in attempts[1::2]} == {LeaseState.SUSPECT}


def test_reads_that_outlive_their_leases_are_remembered_within_bounds(book: LeaseBook) -> None:
    for number in range(3 * TIMES.max_waiting):
        book.received(1, Abandon(AttemptKey("x", number), True))
    assert lines(book.link_closed(1)) == [f"OpenLeases {n}" for n in reversed(range(TIMES.max_waiting))]


@pytest.mark.parametrize("place", range(5))
def test_the_number_of_recognised_attempts_that_are_over_is_bounded(book: LeaseBook, place: int) -> None:
    keys = [AttemptKey(f"r{number}", 1) for number in range(TIMES.max_remembered + 1)]
    for key in keys:
        book.withdraw(key, "aborted")
    assert bool(book.received(1, Expect(keys[place]))) is (place > 0)


def test_every_end_is_released_once_whatever_came_before(clock: FakeClock) -> None:
    def tick_late(book: LeaseBook) -> Sequence[object]:
        clock.advance(50)
        return book.tick()

    readers: list[Callable[[LeaseBook], Sequence[object]]] = [
        lambda book: book.received(1, ConfirmRead(A)),
        lambda book: book.received(1, Abandon(A, False)),
        lambda book: book.received(1, Abandon(A, True)),
        lambda book: book.link_closed(1),
        lambda book: book.reader_gone("d0.x"),
        lambda book: book.withdraw(A, "aborted"),
        lambda book: book.ended(A),
        tick_late,
    ]
    for order in itertools.permutations(readers, 5):
        book = LeaseBook(clock, TIMES)
        book.link_opened(1, "d0", "d0.x")
        book.offer(A, 0, (5,), CLOSING)
        book.received(1, Subscribe(A, 0))
        said = [line for act in order for line in lines(act(book))]
        ended = readers[6] in order
        said += [] if ended else lines(book.ended(A))
        said += lines(book.link_closed(1))
        clock.advance(50)
        said += lines(book.tick())
        assert said.count("Released a#1") == 1
        assert book.stats().reading == book.stats().suspect == 0
        open_counts = [line for line in said if line.startswith("OpenLeases")]
        assert open_counts[-1] == "OpenLeases 0"


def test_of_each_block_a_reader_gets_as_many_digests_as_the_first_offer_said() -> None:
    book = LeaseBook(FakeClock(0.0), digest_every=1)
    book.link_opened(1, "d0", "d0.x")
    book.received(1, Subscribe(A, 1))
    said = [e.message for e in book.offer(A, 0, (5, 6), digest_parts=2) if isinstance(e, TellReader)]
    assert said == [Offer(A, 1, (6,), 10000, digest_every=1, digest_parts=2)]
    # A reader with smaller blocks was linked meanwhile.
    later = book.offer(A, 2, (7,), Closing(12, (3,), False), digest_parts=4)
    assert [e.message.digest_parts for e in later if isinstance(e, TellReader) and isinstance(e.message, Offer)] == [2]
    assert book.received(1, ConfirmPart(A, 2)) == []
    [part] = [e.message for e in book.digested(A, (1, 2, 3, 4)) if isinstance(e, TellReader)]
    assert part == PartConfirmed(A, 1, (3, 4))
    book.received(1, ConfirmRead(A))
    [yes] = [e.message for e in book.digested(A, (5, 6)) if isinstance(e, TellReader)]
    assert yes == ReadConfirmed(A, True, (3, 4, 5, 6))
