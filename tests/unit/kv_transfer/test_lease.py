"""Conversations about leases, and the bounds of what a sender keeps. The table of states is in test_lease_table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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
    Offer,
    OfferLost,
    PartConfirmed,
    ReadConfirmed,
    ReadProgress,
    Subscribe,
)
from kv_transfer.sender.lease import LeaseBook
from kv_transfer.sender.lease_machine import LeaseState
from kv_transfer.sender.lease_values import LeaseEffect, LeaseTimes, TellReader
from tests.doubles.fake_clock import FakeClock
from tests.support.conversation import lines, names

A = AttemptKey("a", 1)
B = AttemptKey("b", 1)
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


def test_a_whole_hand_off(book: LeaseBook) -> None:
    assert lines(book.received(1, Subscribe(A, 0))) == []
    assert lines(book.offer(A, 0, (5, 6))) == ["OpenLeases 1", "TellReader 1 (Offer a#1 0 [5, 6] 10000 None 0)"]
    assert names(book.received(1, ReadProgress(A, 2))) == ["read_progress"]
    assert lines(book.offer(A, 2, (9,), CLOSING)) == [
        "TellReader 1 (Offer a#1 2 [9] 10000 (Closing 10 [7] False [] None) 0)"
    ]
    assert lines(book.ended(A)) == []
    assert lines(book.received(1, ConfirmRead(A))) == [
        "TellReader 1 (ReadConfirmed a#1 True [])",
        "OpenLeases 0",
        "Released a#1",
    ]
    assert book.state(A) is None
    assert book.next_deadline() is None


def test_a_late_subscription_gets_everything_from_its_first_block_on(book: LeaseBook) -> None:
    book.offer(A, 0, (5, 6))
    book.offer(A, 2, (9,), CLOSING)
    assert lines(book.received(1, Subscribe(A, 1))) == [
        "OpenLeases 1",
        "TellReader 1 (Offer a#1 1 [6, 9] 10000 (Closing 10 [7] False [] None) 0)",
    ]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_subscription_beyond_the_prompt_is_refused(book: LeaseBook, is_early: bool) -> None:
    refused = "TellReader 1 (OfferLost a#1 it was asked for from block 4 on, and has 3 REFUSED)"
    if is_early:
        book.received(1, Subscribe(A, 4))
    assert lines(book.offer(A, 0, (5, 6))) == (["OpenLeases 1"] if is_early else [])
    effects = book.offer(A, 2, (9,), CLOSING)
    effects += [] if is_early else book.received(1, Subscribe(A, 4))
    assert lines(effects) == [*([] if is_early else ["OpenLeases 1"]), refused, "OpenLeases 0"]
    assert lines(book.ended(A)) == ["Released a#1"]
    assert lines(book.received(1, ConfirmRead(A))) == ["TellReader 1 (ReadConfirmed a#1 False [])"]


def test_progress_beyond_what_was_offered_is_counted_and_ignored(book: LeaseBook) -> None:
    book.offer(A, 0, (5, 6))
    book.received(1, Subscribe(A, 0))
    assert names(book.received(1, ReadProgress(A, 2))) == ["read_progress"]
    assert book.received(1, ReadProgress(A, 3)) == []
    assert book.counters["read_progress_bad"] == 1


def test_blocks_before_the_subscription_are_not_offered_to_its_reader(book: LeaseBook) -> None:
    book.received(1, Subscribe(A, 3))
    assert lines(book.offer(A, 0, (5, 6))) == ["OpenLeases 1"]
    assert lines(book.offer(A, 2, (7, 8))) == ["TellReader 1 (Offer a#1 3 [8] 10000 None 0)"]


def test_an_unclaimed_offer_expires_but_not_while_its_prompt_is_computed(book: LeaseBook, clock: FakeClock) -> None:
    book.offer(A, 0, (5, 6))
    assert book.next_deadline() is None
    clock.advance(1000)
    assert book.tick() == []
    book.offer(A, 2, (9,), CLOSING)
    book.ended(A)
    clock.advance(29.9)
    assert book.tick() == []
    clock.advance(0.1)
    effects = book.tick()
    assert lines(effects) == ["Released a#1"]
    assert names(effects) == ["lease_expired"]
    assert lines(book.received(1, Subscribe(A, 0))) == ["TellReader 1 (OfferLost a#1 it is over here LEASE_LOST)"]
    assert lines(book.received(1, ConfirmRead(A))) == ["TellReader 1 (ReadConfirmed a#1 False [])"]


def _reading(book: LeaseBook) -> None:
    book.offer(A, 0, (5, 6, 9), CLOSING)
    book.ended(A)
    book.received(1, Subscribe(A, 0))
    assert book.state(A) is LeaseState.READING


def test_heartbeats_renew_and_never_shorten(book: LeaseBook, clock: FakeClock) -> None:
    _reading(book)
    for _ in range(5):
        clock.advance(9)
        assert book.received(1, Heartbeat(1)) == []
        assert book.tick() == []
        assert book.next_deadline() == clock.monotonic() + 10
    clock.advance(10)
    assert names(book.tick()) == ["lease_suspect"]


def test_a_suspect_on_a_live_link_waits_for_its_reader(book: LeaseBook, clock: FakeClock) -> None:
    _reading(book)
    clock.advance(10)
    book.tick()
    clock.advance(299)
    assert book.tick() == []
    assert book.state(A) is LeaseState.SUSPECT
    # The blocks were kept all the time, so what was read is good.
    assert "TellReader 1 (ReadConfirmed a#1 True [])" in lines(book.received(1, ConfirmRead(A)))


def test_reads_that_never_end_do_not_keep_their_senders_blocks_for_ever(book: LeaseBook, clock: FakeClock) -> None:
    """The reader lives and says that reads go on. What they bring is not used, but the agent keeps making progress."""
    _reading(book)
    book.received(1, Abandon(A, True))
    for _ in range(299):
        clock.advance(1)
        book.received(1, Heartbeat(1))
        assert book.tick() == []
    clock.advance(1)
    assert lines(book.tick()) == ["OpenLeases 0", "Released a#1", "OpenLeases 1"]
    assert lines(book.received(1, ConfirmRead(A))) == ["TellReader 1 (ReadConfirmed a#1 False [])"]
    assert lines(book.received(1, Abandon(A, False))) == ["OpenLeases 0"]
    assert book.next_deadline() is None


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


def test_a_lease_lasts_as_long_as_it_was_promised_though_its_reader_was_heard_before(
    book: LeaseBook, clock: FakeClock
) -> None:
    book.received(1, Subscribe(A, 0))
    clock.advance(9)
    book.offer(A, 0, (5, 6))
    assert book.next_deadline() == clock.monotonic() + 10


def test_a_lost_link_releases_after_the_grace_and_not_before(book: LeaseBook, clock: FakeClock) -> None:
    _reading(book)
    assert names(book.link_closed(1)) == ["lease_suspect"]
    clock.advance(4.9)
    assert book.tick() == []
    clock.advance(0.1)
    assert lines(book.tick()) == ["OpenLeases 0", "Released a#1"]


def test_a_suspect_whose_link_dies_later_gets_its_grace_then(book: LeaseBook, clock: FakeClock) -> None:
    _reading(book)
    book.received(1, Abandon(A, True))
    assert book.next_deadline() == clock.monotonic() + 300
    book.link_closed(1)
    assert book.next_deadline() == clock.monotonic() + 5


def test_an_abandon_with_reads_in_flight_waits_for_the_second(book: LeaseBook) -> None:
    _reading(book)
    assert lines(book.received(1, Abandon(A, True))) == []
    assert book.state(A) is LeaseState.SUSPECT
    assert lines(book.received(1, Abandon(A, False))) == ["OpenLeases 0", "Released a#1"]


def test_the_second_abandon_may_come_on_a_new_link_of_the_same_process(book: LeaseBook) -> None:
    _reading(book)
    book.link_closed(1)
    book.link_opened(2, "d0", "d0.x")
    assert lines(book.received(2, Abandon(A, False))) == ["OpenLeases 0", "Released a#1"]


def test_a_reader_that_is_back_and_still_reads_is_waited_for(book: LeaseBook, clock: FakeClock) -> None:
    _reading(book)
    book.link_closed(1)
    book.link_opened(2, "d0", "d0.x")
    assert lines(book.received(2, Abandon(A, True))) == []
    clock.advance(299)
    assert book.tick() == []
    assert book.state(A) is LeaseState.SUSPECT
    assert lines(book.received(2, Abandon(A, False))) == ["OpenLeases 0", "Released a#1"]


def test_reads_that_outlive_their_lease_make_progress_until_their_reader_says_that_they_are_over(
    book: LeaseBook, clock: FakeClock
) -> None:
    _reading(book)
    book.link_closed(1)
    clock.advance(5)
    assert lines(book.tick()) == ["OpenLeases 0", "Released a#1"]
    book.link_opened(2, "d0", "d0.x")
    assert lines(book.received(2, Abandon(A, True))) == ["OpenLeases 1"]
    assert lines(book.received(2, Abandon(A, True))) == []
    assert lines(book.received(2, ConfirmRead(A))) == ["TellReader 2 (ReadConfirmed a#1 False [])"]
    assert lines(book.received(2, Abandon(A, False))) == ["OpenLeases 0"]
    book.received(2, Abandon(A, True))
    assert lines(book.link_closed(2)) == ["OpenLeases 0"]
    book.link_opened(3, "d0", "d0.x")
    for number in range(3 * TIMES.max_waiting):
        book.received(3, Abandon(AttemptKey("x", number), True))
    assert lines(book.link_closed(3)) == [f"OpenLeases {n}" for n in reversed(range(TIMES.max_waiting))]


def test_a_withdrawn_offer_that_may_be_read_is_lost_and_suspect(book: LeaseBook) -> None:
    _reading(book)
    assert lines(book.withdraw(A, "aborted")) == ["TellReader 1 (OfferLost a#1 aborted LEASE_LOST)"]
    assert book.state(A) is LeaseState.SUSPECT
    assert lines(book.withdraw(A, "aborted")) == []


def test_a_reader_hears_why_its_offer_is_lost(book: LeaseBook) -> None:
    def causes(effects: Sequence[LeaseEffect]) -> list[TransferCause]:
        told = [effect.message for effect in effects if isinstance(effect, TellReader)]
        return [message.cause for message in told if isinstance(message, OfferLost)]

    _reading(book)
    book.link_opened(2, "d1", "d1.x")
    assert causes(book.received(2, Subscribe(A, 0))) == [TransferCause.REFUSED]
    assert causes(book.withdraw(A, "aborted", TransferCause.CANCELLED)) == [TransferCause.CANCELLED]
    book.received(1, ConfirmRead(A))
    assert causes(book.received(2, Subscribe(A, 0))) == [TransferCause.LEASE_LOST], "it is over"
    book.received(1, Expect(B))
    assert causes(book.withdraw(B, "it failed")) == [TransferCause.LEASE_LOST]
    book.received(1, Expect(AttemptKey("x", 1)))
    book.received(1, Expect(AttemptKey("y", 1)))
    assert causes(book.received(1, Expect(AttemptKey("z", 1)))) == [TransferCause.REFUSED]


def test_a_withdrawn_offer_that_nobody_reads_is_released(book: LeaseBook) -> None:
    book.offer(A, 0, (5,))
    assert names(book.withdraw(A, "aborted")) == ["lease_released"]
    assert lines(book.offer(A, 1, (6,))) == []
    assert lines(book.ended(A)) == ["Released a#1"]


def test_a_reader_that_confirms_is_told_of_a_broken_promise(book: LeaseBook) -> None:
    _reading(book)
    book.withdraw(A, "preempted", promise_broken=True)
    assert lines(book.received(1, ConfirmRead(A)))[0] == "TellReader 1 (ReadConfirmed a#1 False [])"


def test_a_prompt_that_is_not_computed_can_not_be_confirmed(book: LeaseBook) -> None:
    book.offer(A, 0, (5,))
    book.received(1, Subscribe(A, 0))
    assert lines(book.received(1, ConfirmRead(A)))[0] == "TellReader 1 (ReadConfirmed a#1 False [])"


def test_the_release_waits_for_the_engine(book: LeaseBook) -> None:
    book.offer(A, 0, (5,))
    book.received(1, Subscribe(A, 0))
    assert lines(book.received(1, Abandon(A, False))) == ["OpenLeases 0"]
    assert lines(book.ended(A)) == ["Released a#1"]


def test_only_its_reader_ends_a_lease(book: LeaseBook) -> None:
    _reading(book)
    book.link_opened(2, "d1", "d1.x")
    assert lines(book.received(2, Subscribe(A, 0))) == ["TellReader 2 (OfferLost a#1 it has another reader REFUSED)"]
    assert lines(book.received(2, ConfirmRead(A))) == ["TellReader 2 (ReadConfirmed a#1 False [])"]
    assert lines(book.received(2, Abandon(A, False))) == []
    assert book.received(2, Heartbeat(1)) == []
    assert book.state(A) is LeaseState.READING
    assert book.counters == {
        "duplicate_subscribe": 1,
        "confirm_read_not_the_reader": 1,
        "abandon_not_the_reader": 1,
    }


def test_a_newer_process_of_the_same_node_ends_the_older_ones_leases(book: LeaseBook) -> None:
    _reading(book)
    assert lines(book.link_opened(2, "d0", "d0.y")) == [
        "CutLink 1 d0 has restarted as d0.y",
        "OpenLeases 0",
        "Released a#1",
    ]
    assert book.received(1, Heartbeat(2)) == []
    assert book.counters["message_on_closed_link"] == 1


def test_a_reader_that_is_wrongly_taken_for_gone_is_told(book: LeaseBook) -> None:
    _reading(book)
    assert book.may_be_read_by("d0.x")
    assert lines(book.reader_gone("d0.x")) == ["CutLink 1 d0.x is gone", "OpenLeases 0", "Released a#1"]
    assert not book.may_be_read_by("d0.x")
    book.link_opened(2, "d0", "d0.x")
    assert lines(book.received(2, ConfirmRead(A))) == ["TellReader 2 (ReadConfirmed a#1 False [])"]


def test_a_newer_link_of_the_same_process_replaces_the_older(book: LeaseBook) -> None:
    _reading(book)
    assert lines(book.link_opened(2, "d0", "d0.x")) == ["CutLink 1 the reader opened a newer link"]
    assert book.state(A) is LeaseState.SUSPECT


def test_early_subscriptions_are_bounded_in_number_and_end_with_their_link(book: LeaseBook) -> None:
    book.received(1, Subscribe(AttemptKey("x", 1), 0))
    book.received(1, Subscribe(AttemptKey("y", 1), 0))
    refused = lines(book.received(1, Subscribe(AttemptKey("z", 1), 0)))
    assert refused == ["TellReader 1 (OfferLost z#1 too many subscriptions wait for their request REFUSED)"]
    assert book.next_deadline() is None, "their requests may be queued here"
    book.link_closed(1)
    book.link_opened(2, "d0", "d0.x")
    assert lines(book.received(2, Subscribe(AttemptKey("z", 1), 0))) == []


def test_an_early_subscription_ends_with_its_link(book: LeaseBook) -> None:
    book.received(1, Subscribe(A, 0))
    book.link_closed(1)
    assert lines(book.offer(A, 0, (5,))) == []
    assert book.state(A) is LeaseState.GRANTED


def test_an_early_subscription_that_was_abandoned_keeps_nothing(book: LeaseBook) -> None:
    book.received(1, Subscribe(A, 0))
    assert lines(book.received(1, Abandon(A, False))) == []
    assert lines(book.offer(A, 0, (5,), CLOSING)) == []
    assert lines(book.ended(A)) == ["Released a#1"]


def test_late_duplicate_and_unknown_messages_change_nothing(book: LeaseBook) -> None:
    _reading(book)
    assert lines(book.received(1, Subscribe(A, 0))) == []
    assert lines(book.received(1, Abandon(B, False))) == []
    assert lines(book.received(1, ReadProgress(B, 1))) == []
    assert lines(book.received(9, Heartbeat(1))) == []
    assert book.state(A) is LeaseState.READING
    book.received(1, ConfirmRead(A))
    assert lines(book.received(1, Abandon(A, False))) == []
    assert sum(book.counters.values()) == 5


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


def test_stats_have_the_age_of_the_oldest_lease(book: LeaseBook, clock: FakeClock) -> None:
    _reading(book)
    clock.advance(3)
    book.offer(B, 0, (1,))
    stats = book.stats()
    assert (stats.granted, stats.reading, stats.suspect, stats.oldest_s) == (1, 1, 0, 3.0)


def with_digests() -> LeaseBook:
    """Three blocks are offered, and read from the second on."""
    book = LeaseBook(FakeClock(), digest_every=1)
    book.offer(A, 0, (5, 6))
    book.digested(A, (50, 60))
    book.link_opened(1, "d0", "d0.x")
    assert lines(book.received(1, Subscribe(A, 1)))[-1] == "TellReader 1 (Offer a#1 1 [6] 10000 None 1)"
    book.offer(A, 2, (9,), CLOSING)
    return book


def test_the_answer_brings_the_digests_of_what_was_read() -> None:
    book = with_digests()
    assert book.digested(A, (90,)) == []
    answer = lines(book.received(1, ConfirmRead(A)))
    assert answer == ["TellReader 1 (ReadConfirmed a#1 True [60, 90])", "OpenLeases 0"]


def test_the_answer_waits_for_digests_that_are_not_known_and_nothing_else_does() -> None:
    book = with_digests()
    book.ended(A)
    assert lines(book.received(1, ConfirmRead(A))) == ["OpenLeases 0", "Released a#1"]
    assert lines(book.digested(A, (90,))) == ["TellReader 1 (ReadConfirmed a#1 True [60, 90])"]
    assert book.digested(A, (91,)) == []
    assert book.counters == {"digested_after_end": 1}


def test_a_reader_that_waits_for_digests_that_can_not_be_computed_gets_a_no() -> None:
    book = with_digests()
    book.received(1, ConfirmRead(A))
    no = ["TellReader 1 (ReadConfirmed a#1 False [])"]
    assert lines(book.withdraw(A, "no digests", promise_broken=True)) == no
    assert book.digested(A, (90,)) == []


def test_an_abort_takes_nothing_back_from_a_reader_that_waits_for_digests() -> None:
    book = with_digests()
    book.received(1, ConfirmRead(A))
    assert book.withdraw(A, "aborted") == []
    assert lines(book.digested(A, (90,))) == ["TellReader 1 (ReadConfirmed a#1 True [60, 90])"]


def test_a_reader_whose_link_has_ended_is_not_answered() -> None:
    book = with_digests()
    book.received(1, ConfirmRead(A))
    book.link_closed(1)
    assert book.digested(A, (90,)) == []


def test_a_broken_promise_needs_no_digests() -> None:
    book = with_digests()
    book.withdraw(A, "preempted", promise_broken=True)
    assert lines(book.received(1, ConfirmRead(A)))[0] == "TellReader 1 (ReadConfirmed a#1 False [])"


def test_null_blocks_are_not_counted(book: LeaseBook) -> None:
    book.offer(A, 0, (5, 0, 6, 0))
    assert [handoff.num_blocks for handoff in book.open_handoffs()] == [2]


# Readers that are to take an attempt in, and have no blocks for it yet.


@pytest.mark.parametrize("order", ["expected first", "begun first", "offered first"])
def test_a_reader_hears_once_that_its_prompt_has_begun(book: LeaseBook, order: str) -> None:
    told = []
    if order == "expected first":
        told += lines(book.received(1, Expect(A)))
    told += lines(book.begun(A)) if order != "offered first" else lines(book.offer(A, 0, (5,)))
    if order != "expected first":
        assert told == []
        told += lines(book.received(1, Expect(A)))
    assert told == ["TellReader 1 (Begun a#1)"]
    assert lines(book.begun(A)) == [], "preempted and admitted again"
    told = lines(book.offer(A, 0, (5,))) if order != "offered first" else []
    assert told == [], "nobody has subscribed"
    assert lines(book.received(1, Subscribe(A, 0))) == [
        "OpenLeases 1",
        "TellReader 1 (Offer a#1 0 [5] 10000 None 0)",
    ]


def test_the_first_offer_tells_a_reader_that_the_prompt_has_begun(book: LeaseBook) -> None:
    book.received(1, Expect(A))
    assert lines(book.offer(A, 0, (5,))) == ["TellReader 1 (Begun a#1)"]


def test_an_expected_prompt_is_kept_as_long_as_the_link_lives(book: LeaseBook, clock: FakeClock) -> None:
    book.begun(A)
    book.offer(A, 0, (5,), CLOSING)
    book.ended(A)
    assert book.next_deadline() == 1030
    book.received(1, Expect(A))
    assert book.next_deadline() is None, "its reader is merely queued"
    clock.advance(1000)
    assert lines(book.tick()) == []
    book.link_closed(1)
    assert book.next_deadline() == 2030
    clock.advance(30)
    assert lines(book.tick()) == ["Released a#1"]


@pytest.mark.parametrize("asks", [Expect(A), Subscribe(A, 0)])
def test_a_prompt_may_be_queued_for_as_long_as_its_readers_link_lives(
    book: LeaseBook, clock: FakeClock, asks: Expect | Subscribe
) -> None:
    book.received(1, asks)
    for _ in range(10_000):
        clock.advance(1)
        book.received(1, Heartbeat(1))
        assert book.tick() == []
    told = book.begun(A) + book.offer(A, 0, (5,), CLOSING)
    assert names(told) == ["lease_granted", "offered", "closing_offered"]
    assert len(lines(told)) == (1 if isinstance(asks, Expect) else 2), "Begun, or the offer"


@pytest.mark.parametrize("end", ["abandoned", "link lost", "withdrawn"])
def test_a_wait_for_a_request_that_never_comes_ends_with_its_reader(book: LeaseBook, end: str) -> None:
    """The router died between its two messages. The reader's own request ends, and the sender remembers nothing."""
    book.received(1, Expect(A))
    match end:
        case "abandoned":
            assert book.received(1, Abandon(A, False)) == []
        case "link lost":
            assert book.link_closed(1) == []
            book.link_opened(1, "d0", "d0.x")
        case "withdrawn":
            assert lines(book.withdraw(A, "aborted")) == ["TellReader 1 (OfferLost a#1 aborted LEASE_LOST)"]
    for name in ("x", "y"):
        assert lines(book.received(1, Expect(AttemptKey(name, 1)))) == [], "there is room for as many as before"


@pytest.mark.parametrize("computed", [False, True])
def test_blocks_are_free_at_once_when_their_reader_abandons_an_expected_attempt(
    book: LeaseBook, computed: bool
) -> None:
    book.received(1, Expect(A))
    book.begun(A)
    if computed:
        book.offer(A, 0, (5,), CLOSING)
        book.ended(A)
        assert lines(book.received(1, Abandon(A, False))) == ["Released a#1"]
        return
    assert lines(book.received(1, Abandon(A, False))) == []
    assert lines(book.offer(A, 0, (5,), CLOSING)) == []
    assert lines(book.ended(A)) == ["Released a#1"]


@pytest.mark.parametrize("computed", [False, True])
def test_a_reader_hears_that_what_it_expects_is_withdrawn(book: LeaseBook, computed: bool) -> None:
    book.received(1, Expect(A))
    book.begun(A)
    if computed:
        book.offer(A, 0, (5,))
    assert lines(book.withdraw(A, "aborted")) == ["TellReader 1 (OfferLost a#1 aborted LEASE_LOST)"]
    assert lines(book.received(1, Expect(A))) == ["TellReader 1 (OfferLost a#1 it is over here LEASE_LOST)"]


def test_attempts_that_are_over_are_recognised_for_a_while(book: LeaseBook, clock: FakeClock) -> None:
    over = "TellReader 1 (OfferLost a#1 it is over here LEASE_LOST)"
    book.withdraw(A, "aborted")
    clock.advance(TIMES.remembered_s)
    book.withdraw(B, "aborted")
    assert lines(book.received(1, Expect(A))) == [over]
    clock.advance(1.0)
    book.withdraw(AttemptKey("c", 1), "aborted")
    assert lines(book.received(1, Expect(A))) == []
    assert lines(book.received(1, Expect(B))) == [over.replace("a#1", "b#1")]


@pytest.mark.parametrize("place", range(5))
def test_the_number_of_recognised_attempts_that_are_over_is_bounded(book: LeaseBook, place: int) -> None:
    keys = [AttemptKey(f"r{number}", 1) for number in range(TIMES.max_remembered + 1)]
    for key in keys:
        book.withdraw(key, "aborted")
    assert bool(book.received(1, Expect(keys[place]))) is (place > 0)


def test_expectations_are_bounded_and_counted_once(book: LeaseBook) -> None:
    book.received(1, Expect(A))
    assert lines(book.received(1, Expect(A))) == []
    book.received(1, Expect(B))
    refused = "TellReader 1 (OfferLost c#1 too many readers wait for their requests REFUSED)"
    assert lines(book.received(1, Expect(AttemptKey("c", 1)))) == [refused]
    assert book.counters == {"duplicate_expect": 1, "early_refused": 1}
    book.link_closed(1)
    assert book.next_deadline() is None


@pytest.fixture
def digesting() -> LeaseBook:
    """Two blocks are offered to a reader that has read them, and their digests are known."""
    book = LeaseBook(FakeClock(100.0), digest_every=1)
    book.link_opened(1, "d0", "d0.x")
    book.received(1, Subscribe(A, 0))
    book.offer(A, 0, (5, 6))
    book.digested(A, (50, 60))
    return book


def test_a_reader_hears_part_by_part_what_it_has_read(digesting: LeaseBook) -> None:
    assert lines(digesting.received(1, ConfirmPart(A, 2))) == ["TellReader 1 (PartConfirmed a#1 0 [50, 60])"]
    assert lines(digesting.received(1, ConfirmPart(A, 2))) == [], "it knows"
    digesting.offer(A, 2, (7, 8))
    assert lines(digesting.received(1, ConfirmPart(A, 4))) == [], "their digests are being computed"
    assert lines(digesting.digested(A, (70, 80))) == ["TellReader 1 (PartConfirmed a#1 2 [70, 80])"]
    assert digesting.state(A) is LeaseState.READING, "the lease goes on"
    digesting.offer(A, 4, (9,), CLOSING)
    digesting.digested(A, (90,))
    held = lines(digesting.received(1, ConfirmRead(A)))
    assert "TellReader 1 (ReadConfirmed a#1 True [50, 60, 70, 80, 90])" in held


def test_a_reader_hears_of_what_it_subscribed_to(digesting: LeaseBook) -> None:
    digesting.offer(B, 0, (5, 6, 7))
    digesting.digested(B, (50, 60, 70))
    digesting.received(1, Subscribe(B, 1))
    assert lines(digesting.received(1, ConfirmPart(B, 3))) == ["TellReader 1 (PartConfirmed b#1 1 [60, 70])"]


@pytest.mark.parametrize("why", ["silent", "withdrawn", "promise broken", "link lost", "beyond the offer"])
def test_no_part_is_confirmed_of_a_lease_that_is_not_held(why: str) -> None:
    clock = FakeClock(100.0)
    book = LeaseBook(clock, digest_every=1)
    book.link_opened(1, "d0", "d0.x")
    book.received(1, Subscribe(A, 0))
    book.offer(A, 0, (5, 6))
    book.digested(A, (50, 60))
    link, end = 1, 2
    match why:
        case "silent":
            clock.advance(20)
            book.tick()
        case "withdrawn" | "promise broken":
            book.withdraw(A, why, promise_broken=why == "promise broken")
        case "link lost":
            book.link_closed(1)
            book.link_opened(2, "d0", "d0.x")
            link = 2
        case "beyond the offer":
            end = 3
    assert lines(book.received(link, ConfirmPart(A, end))) == []


def test_a_part_is_not_confirmed_once_its_lease_is_lost_though_its_digests_come(digesting: LeaseBook) -> None:
    digesting.offer(A, 2, (7,))
    digesting.received(1, ConfirmPart(A, 3))
    digesting.withdraw(A, "preempted", promise_broken=True)
    assert lines(digesting.digested(A, (70,))) == []


@pytest.mark.parametrize(
    "end",
    [
        lambda book: book.withdraw(A, "aborted"),
        lambda book: book.received(1, Abandon(A, False)),
        lambda book: book.received(1, Subscribe(A, 0)),
        lambda book: [*book.begun(A), *book.withdraw(A, "aborted")],
        lambda book: [*book.offer(A, 0, (5,)), *book.received(1, Subscribe(A, 0))],
        lambda book: [*book.offer(A, 0, (5,), CLOSING), *book.withdraw(A, "aborted")],
    ],
    ids=["withdrawn", "abandoned", "subscribed", "begun and withdrawn", "read", "computed and withdrawn"],
)
def test_an_expectation_that_has_ended_makes_room_for_another(
    book: LeaseBook, end: Callable[[LeaseBook], list[LeaseEffect]]
) -> None:
    book.received(1, Expect(A))
    book.received(1, Expect(B))
    end(book)
    assert lines(book.received(1, Expect(AttemptKey("c", 1)))) == []
    assert book.counters == {}


def test_an_early_subscription_that_has_ended_makes_room_for_another(book: LeaseBook) -> None:
    book.received(1, Subscribe(A, 0))
    book.received(1, Subscribe(B, 0))
    book.withdraw(A, "aborted")
    book.offer(B, 0, (5,))
    assert lines(book.received(1, Subscribe(AttemptKey("c", 1), 0))) == []
    assert lines(book.received(1, Subscribe(AttemptKey("d", 1), 0))) == []
    assert book.counters == {}


def test_a_reader_that_has_subscribed_expects_nothing_more(book: LeaseBook) -> None:
    book.received(1, Subscribe(A, 0))
    assert lines(book.received(1, Expect(A))) == []
    assert book.counters == {"duplicate_expect": 1}
    book.offer(A, 0, (5,))
    assert lines(book.withdraw(A, "aborted")) == ["TellReader 1 (OfferLost a#1 aborted LEASE_LOST)"]


def test_of_each_block_a_reader_gets_as_many_digests_as_the_first_offer_said() -> None:
    book = LeaseBook(FakeClock(0.0), digest_every=1)
    book.link_opened(1, "d0", "d0.x")
    book.received(1, Subscribe(A, 1))
    told = [e.message for e in book.offer(A, 0, (5, 6), digest_parts=2) if isinstance(e, TellReader)]
    assert told == [Offer(A, 1, (6,), 10000, digest_every=1, digest_parts=2)]
    # A reader with smaller blocks was linked meanwhile.
    later = book.offer(A, 2, (7,), Closing(12, (3,), False), digest_parts=4)
    assert [e.message.digest_parts for e in later if isinstance(e, TellReader) and isinstance(e.message, Offer)] == [2]
    assert book.received(1, ConfirmPart(A, 2)) == []
    [part] = [e.message for e in book.digested(A, (1, 2, 3, 4)) if isinstance(e, TellReader)]
    assert part == PartConfirmed(A, 1, (3, 4))
    book.received(1, ConfirmRead(A))
    [yes] = [e.message for e in book.digested(A, (5, 6)) if isinstance(e, TellReader)]
    assert yes == ReadConfirmed(A, True, (3, 4, 5, 6))
