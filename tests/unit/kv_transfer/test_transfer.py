"""Transfers: every transition, the conversations that matter, and messages of a peer that must do no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from baton.errors import TransferCause
from baton.machine import Machine
from baton.messages.ids import AttemptKey, Peer
from kv_transfer.backends.base import check_ranges
from kv_transfer.effects import Recorded
from kv_transfer.link.link_messages import (
    Begun,
    Closing,
    Expect,
    Heartbeat,
    Offer,
    OfferLost,
    OfferMessage,
    PartConfirmed,
    ReadConfirmed,
)
from kv_transfer.receiver.block_map import BlockMap
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.receiver.transfer_machine import TRANSFER_TABLE, TransferEvent, TransferState
from kv_transfer.receiver.transfer_values import Arrived, Failed, StartRead, TellSender, TransferEffect, TransferPlan
from tests.support.conversation import lines, names
from tests.support.transitions import check_pair, every_pair, row

A = AttemptKey("a", 1)
B = AttemptKey("b", 1)
SOURCE = Peer("p0", "p0.x", "host:1")
PLAN = TransferPlan(A, SOURCE, 18, (40, 41, 42, 43, 10), 0)
CLOSING = Closing(18, (7,), False)
S, E = TransferState, TransferEvent


@pytest.fixture
def book() -> TransferBook:
    return TransferBook(max_quarantined_blocks=4)


PATHS: dict[TransferState, list[TransferEvent]] = {
    S.PLANNED: [],
    S.RESERVED: [E.SUBSCRIBED],
    S.READING: [E.SUBSCRIBED, E.OFFER],
    S.CONFIRMING: [E.SUBSCRIBED, E.OFFER, E.ALL_READ],
    S.QUARANTINED: [E.SUBSCRIBED, E.OFFER, E.FAIL_READING],
    S.ARRIVED: [E.SUBSCRIBED, E.OFFER, E.ALL_READ, E.HELD],
    S.FAILED: [E.FAIL],
    S.ABANDONED: [E.ABANDON],
}


@every_pair(S, E)
def test_every_pair_moves_as_the_table_says_or_changes_nothing(state: TransferState, event: TransferEvent) -> None:
    machine = Machine("transfer", S.PLANNED, TRANSFER_TABLE)
    for step in PATHS[state]:
        machine.feed(step)
    assert machine.state is state
    check_pair(machine.feed, lambda: machine.state, event, row(TRANSFER_TABLE, state))


def test_the_one_way_to_arrive_is_a_confirmed_lease() -> None:
    assert [pair for pair, after in TRANSFER_TABLE.items() if after is S.ARRIVED] == [(S.CONFIRMING, E.HELD)]
    assert not any(state in (S.ARRIVED, S.FAILED, S.ABANDONED) for state, _ in TRANSFER_TABLE)


def test_the_one_way_out_of_quarantine_is_the_end_of_the_reads() -> None:
    out = {event for (state, event), after in TRANSFER_TABLE.items() if state is S.QUARANTINED and after is not state}
    assert out == {E.READS_ENDED_FAILED, E.READS_ENDED_ABANDONED}


def test_a_whole_transfer(book: TransferBook) -> None:
    assert lines(book.plan(PLAN)) == ["OpenLink (Peer p0 p0.x host:1)"]
    assert lines(book.peer_ready("p0.x", 100)) == ["TellSender p0.x (Subscribe a#1 0)"]
    assert lines(book.received("p0.x", Offer(A, 0, (5, 6), 1000))) == ["StartRead 1 p0.x [(ReadRange 40 5 2)] []"]
    assert lines(book.read_done(1, 128, 2.0)) == ["TellSender p0.x (ReadProgress a#1 2)"]
    assert lines(book.received("p0.x", Offer(A, 2, (7, 20, 21), 1000, CLOSING))) == [
        "StartRead 2 p0.x [(ReadRange 42 7 1), (ReadRange 43 20 1), (ReadRange 10 21 1)] []"
    ]
    assert lines(book.read_done(2, 192, 3.0)) == [
        "TellSender p0.x (ConfirmRead a#1)",
    ]
    effects = book.received("p0.x", ReadConfirmed(A, True))
    assert names(effects) == ["confirmed", "kv_arrived"]
    (arrived,) = (effect for effect in effects if isinstance(effect, Arrived))
    assert arrived.closing == CLOSING
    assert (arrived.stats.num_bytes, arrived.stats.num_blocks, arrived.stats.read_s) == (320, 5, 5.0)
    assert lines(book.ended(A)) == ["Released a#1"]


def test_counts_tell_how_far_transfers_are(book: TransferBook) -> None:
    def counted() -> tuple[int, int, int]:
        counts = book.counts()
        assert counts.live == counts.waiting_to_start + counts.in_progress
        return counts.waiting_to_start, counts.in_progress, counts.quarantined

    book.plan(PLAN)
    assert counted() == (1, 0, 0)
    book.peer_ready("p0.x", 100)
    assert counted() == (1, 0, 0)
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 8, 9), 1000, CLOSING))
    assert counted() == (0, 1, 0)
    book.read_done(1, 320)
    assert counted() == (0, 1, 0), "it is being confirmed"
    book.received("p0.x", ReadConfirmed(A, True))
    assert counted() == (0, 0, 0)
    book.plan(TransferPlan(B, SOURCE, 4, (1,), 0))
    book.received("p0.x", Offer(B, 0, (5,), 1000))
    book.received("p0.x", OfferLost(B, "aborted"))
    assert counted() == (0, 0, 1)


def _reading(book: TransferBook, closing: Closing | None = None) -> None:
    """Offer five blocks, so that read 1 is in flight."""
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 8, 9), 1000, closing))
    assert book.state(A) is S.READING


def _confirming(book: TransferBook) -> None:
    _reading(book, CLOSING)
    book.read_done(1, 320)
    assert book.state(A) is S.CONFIRMING


def test_a_second_plan_for_a_peer_uses_the_same_link(book: TransferBook) -> None:
    book.plan(PLAN)
    second = TransferPlan(B, SOURCE, 4, (1,), 0)
    assert lines(book.plan(second)) == []
    assert len(lines(book.peer_ready("p0.x", 100))) == 2
    third = TransferPlan(AttemptKey("c", 1), SOURCE, 4, (2,), 0)
    assert lines(book.plan(third)) == ["TellSender p0.x (Subscribe c#1 0)"]


def test_cached_blocks_are_neither_asked_for_nor_read(book: TransferBook) -> None:
    book.peer_ready("p0.x", 100)
    assert lines(book.plan(TransferPlan(A, SOURCE, 18, PLAN.block_ids, 3))) == ["TellSender p0.x (Subscribe a#1 3)"]
    assert lines(book.received("p0.x", Offer(A, 3, (5, 6), 1000, CLOSING))) == [
        "StartRead 1 p0.x [(ReadRange 43 5 1), (ReadRange 10 6 1)] []"
    ]


def test_nothing_is_confirmed_before_the_last_of_several_reads(book: TransferBook) -> None:
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6), 1000))
    book.received("p0.x", Offer(A, 2, (7, 8, 9), 1000, CLOSING))
    assert lines(book.read_done(2, 192)) == ["TellSender p0.x (ReadProgress a#1 3)"]
    assert "TellSender p0.x (ConfirmRead a#1)" in lines(book.read_done(1, 128))


def test_a_closing_offer_without_blocks_confirms_what_was_read(book: TransferBook) -> None:
    _reading(book)
    book.read_done(1, 320)
    assert lines(book.received("p0.x", Offer(A, 5, (), 1000, CLOSING))) == ["TellSender p0.x (ConfirmRead a#1)"]


def test_a_transfer_fails_if_the_lease_was_not_held(book: TransferBook) -> None:
    _confirming(book)
    effects = book.received("p0.x", ReadConfirmed(A, False))
    failed = [effect for effect in effects if isinstance(effect, Failed)]
    assert [effect.cause for effect in failed] == [TransferCause.LEASE_LOST]
    assert not [effect for effect in effects if isinstance(effect, Arrived)]


@pytest.mark.parametrize("closing", [None, CLOSING])
def test_a_transfer_whose_offer_is_lost_during_a_read_is_quarantined(
    book: TransferBook, closing: Closing | None
) -> None:
    _reading(book, closing)
    effects = book.received("p0.x", OfferLost(A, "aborted"))
    assert lines(effects) == [
        "Failed a#1 LEASE_LOST aborted 0",
        "TellSender p0.x (Abandon a#1 True)",
        "CancelRead 1",
    ]
    assert names(effects) == ["kv_failed", "quarantined"]
    assert book.counts().quarantined_blocks == 5
    assert lines(book.ended(A)) == []
    assert lines(book.read_done(1, 320)) == ["TellSender p0.x (Abandon a#1 False)", "Released a#1"]
    assert book.counts().quarantined == 0


@pytest.mark.parametrize("cause", TransferCause)
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_lost_offer_fails_for_the_senders_reason(book: TransferBook, cause: TransferCause, is_planned: bool) -> None:
    book.expect(A, SOURCE)
    book.peer_ready("p0.x", 100)
    if is_planned:
        book.plan(PLAN)
    effects = book.received("p0.x", OfferLost(A, "why", cause))
    assert [effect for effect in effects if isinstance(effect, Failed)] == [Failed(A, cause, "why")]
    assert book.failures == {("p0", cause): 1}


def test_quarantine_ends_with_the_last_read_and_not_before(book: TransferBook) -> None:
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6), 1000))
    book.received("p0.x", Offer(A, 2, (7,), 1000))
    assert lines(book.ended(A)) == ["TellSender p0.x (Abandon a#1 True)", "CancelRead 1", "CancelRead 2"]
    assert lines(book.read_failed(2, TransferCause.CANCELLED, "")) == []
    assert lines(book.read_done(1, 128)) == ["TellSender p0.x (Abandon a#1 False)", "Released a#1"]


def test_the_release_waits_for_the_engine(book: TransferBook) -> None:
    _reading(book)
    book.received("p0.x", OfferLost(A, "aborted"))
    assert "Released a#1" not in lines(book.read_done(1, 320))
    assert lines(book.ended(A)) == ["Released a#1"]


def test_requests_that_wait_for_a_sender_are_refused_and_its_link_stays(book: TransferBook) -> None:
    book.expect(A, SOURCE)
    book.expect(B, Peer("p1", "p1.x", "host:2"))
    effects = book.refuse_waiting("p0.x", TransferCause.PROBE_FAILED, "no probe block is left")
    failed = Failed(A, TransferCause.PROBE_FAILED, "no probe block is left")
    assert [effect for effect in effects if isinstance(effect, Failed)] == [failed]
    assert book.open(SOURCE) == []
    later = AttemptKey("later", 1)
    # Only one that comes later is expected, once the sender can be used.
    book.expect(later, SOURCE)
    assert [effect for effect in book.peer_ready("p0.x", 100) if isinstance(effect, TellSender)] == [
        TellSender("p0.x", Expect(later))
    ]


def test_a_lost_link_fails_everything_that_it_carried_and_nothing_else(book: TransferBook) -> None:
    _reading(book, CLOSING)
    other = TransferPlan(B, Peer("p1", "p1.x", "host:2"), 4, (1,), 0)
    book.plan(other)
    assert lines(book.peer_lost("p0.x", TransferCause.PEER_GONE, "cut")) == [
        "Failed a#1 PEER_GONE cut 0",
        "CancelRead 1",
        "ReopenLink (Peer p0 p0.x host:1)",
    ]
    assert book.state(A) is S.QUARANTINED
    assert book.state(B) is S.PLANNED
    book.read_failed(1, TransferCause.PEER_GONE, "gone")
    assert book.state(A) is None


def test_reads_that_outlive_their_link_are_reported_to_the_sender_on_a_new_one(book: TransferBook) -> None:
    _reading(book)
    book.peer_lost("p0.x", TransferCause.PEER_GONE, "cut")
    assert lines(book.reopen(SOURCE)) == ["OpenLink (Peer p0 p0.x host:1)"]
    assert lines(book.reopen(SOURCE)) == [], "it is being opened"
    assert lines(book.peer_lost("p0.x", TransferCause.PEER_GONE, "refused")) == ["ReopenLink (Peer p0 p0.x host:1)"]
    book.reopen(SOURCE)
    assert lines(book.peer_ready("p0.x", 100)) == ["TellSender p0.x (Abandon a#1 True)"]
    assert lines(book.read_done(1, 320)) == ["TellSender p0.x (Abandon a#1 False)"]
    assert lines(book.peer_lost("p0.x", TransferCause.PEER_GONE, "cut")) == []
    assert lines(book.reopen(SOURCE)) == []


def test_a_link_that_can_not_be_opened_fails_its_plans_and_the_next_tries_again(book: TransferBook) -> None:
    book.plan(PLAN)
    failed = lines(book.peer_lost("p0.x", TransferCause.LAYOUT_MISMATCH, "differ"))
    assert failed == ["Failed a#1 LAYOUT_MISMATCH differ 0"]
    assert lines(book.plan(TransferPlan(B, SOURCE, 4, (1,), 0))) == ["OpenLink (Peer p0 p0.x host:1)"]


def test_a_failed_read_fails_the_transfer_and_a_gone_peer_its_link(book: TransferBook) -> None:
    _reading(book)
    assert lines(book.read_failed(1, TransferCause.PEER_GONE, "gone")) == [
        "Failed a#1 PEER_GONE gone 0",
        "TellSender p0.x (Abandon a#1 False)",
        "CutLink p0.x gone",
    ]


def test_a_stalled_read_fails_its_transfer_and_keeps_its_blocks_until_it_has_ended(book: TransferBook) -> None:
    _reading(book)
    assert lines(book.read_stalled(1, "nothing arrived")) == [
        "Failed a#1 STALLED nothing arrived 0",
        "TellSender p0.x (Abandon a#1 True)",
        "CancelRead 1",
    ]
    assert book.state(A) is S.QUARANTINED
    assert lines(book.ended(A)) == []
    assert book.read_stalled(1, "nothing arrived") == []
    assert book.read_stalled(99, "nothing arrived") == []
    assert lines(book.read_done(1, 320)) == ["TellSender p0.x (Abandon a#1 False)", "Released a#1"]
    assert book.failures == {("p0", TransferCause.STALLED): 1}


def test_one_of_two_sibling_reads_fails(book: TransferBook) -> None:
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6), 1000))
    book.received("p0.x", Offer(A, 2, (7, 8, 9), 1000, CLOSING))
    assert "Failed a#1 REFUSED bad 0" in lines(book.read_failed(1, TransferCause.REFUSED, "bad"))
    assert book.state(A) is S.QUARANTINED
    assert "ConfirmRead" not in "".join(lines(book.read_done(2, 192)))


def test_abandon_in_each_state_tells_the_sender_and_keeps_what_may_be_written(book: TransferBook) -> None:
    book.plan(PLAN)
    assert lines(book.ended(A)) == ["Released a#1"]
    book.peer_ready("p0.x", 100)
    book.plan(PLAN)
    assert lines(book.ended(A)) == ["TellSender p0.x (Abandon a#1 False)", "Released a#1"]
    _reading(book)
    book.read_done(1, 320)
    assert lines(book.ended(A)) == ["TellSender p0.x (Abandon a#1 False)", "Released a#1"]
    book.plan(PLAN)
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 8, 9), 1000, CLOSING))
    book.read_done(2, 320)
    assert book.state(A) is S.CONFIRMING
    assert lines(book.ended(A)) == ["TellSender p0.x (Abandon a#1 False)", "Released a#1"]
    assert lines(book.received("p0.x", ReadConfirmed(A, True))) == []
    assert book.counters["ReadConfirmed_unknown"] == 1


def test_the_router_may_give_up_before_the_engine(book: TransferBook) -> None:
    _reading(book)
    assert lines(book.abandon(A)) == ["TellSender p0.x (Abandon a#1 True)", "CancelRead 1"]
    assert lines(book.abandon(A)) == []
    assert lines(book.ended(A)) == []
    assert lines(book.read_done(1, 320)) == ["TellSender p0.x (Abandon a#1 False)", "Released a#1"]


def test_messages_from_another_incarnation_change_nothing(book: TransferBook) -> None:
    _confirming(book)
    assert book.received("p0.old", ReadConfirmed(A, True)) == []
    assert book.received("p0.old", OfferLost(A, "stale")) == []
    assert book.state(A) is S.CONFIRMING
    assert book.counters == {"ReadConfirmed_unknown": 1, "OfferLost_unknown": 1}


def test_an_earlier_attempt_changes_nothing(book: TransferBook) -> None:
    book.peer_ready("p0.x", 100)
    book.plan(TransferPlan(AttemptKey("a", 2), SOURCE, 18, PLAN.block_ids, 0))
    assert book.received("p0.x", Offer(A, 0, (5,), 1000)) == []
    assert book.state(AttemptKey("a", 2)) is S.RESERVED


def test_late_and_duplicate_messages_change_nothing(book: TransferBook) -> None:
    _reading(book)
    assert book.received("p0.x", Offer(A, 0, (5, 6), 1000)) == []
    assert book.received("p0.x", ReadConfirmed(A, True)) == []
    book.received("p0.x", Offer(A, 5, (), 1000, CLOSING))
    assert book.received("p0.x", Offer(A, 5, (), 1000, CLOSING)) == []
    book.read_done(1, 320)
    assert book.read_done(1, 320) == []
    assert book.read_failed(1, TransferCause.PEER_GONE, "") == []
    assert book.received("p0.x", Offer(A, 0, (5, 6), 1000)) == []
    assert book.state(A) is S.CONFIRMING
    assert sum(book.counters.values()) == 6


def test_no_transfer_begins_from_a_sender_with_too_many_quarantined_blocks(book: TransferBook) -> None:
    _reading(book)
    book.ended(A)
    effects = lines(book.plan(TransferPlan(B, SOURCE, 4, (1,), 0)))
    assert effects == [
        "Failed b#1 REFUSED 5 blocks still wait for earlier reads from p0.x 0",
        "TellSender p0.x (Abandon b#1 False)",
    ], "the sender may keep its blocks for it"
    book.read_done(1, 320)
    assert lines(book.plan(TransferPlan(B, SOURCE, 4, (1,), 0))) == ["TellSender p0.x (Subscribe b#1 0)"]


def test_a_plan_for_a_live_attempt_is_a_fault_of_the_caller(book: TransferBook) -> None:
    book.plan(PLAN)
    with pytest.raises(ValueError, match="being transferred"):
        book.plan(PLAN)


@pytest.mark.parametrize("seed", range(300))
def test_a_transfer_ends_once_and_no_block_is_released_under_a_read(seed: int) -> None:
    rng, book = Random(seed), TransferBook(max_quarantined_blocks=1000)
    flying: dict[int, int] = {}
    told: list[str] = []
    ended = released = False

    def take(effects: list) -> None:  # type: ignore[type-arg]
        nonlocal released
        for effect in effects:
            if isinstance(effect, StartRead):
                flying[effect.read_id] = sum(r.count for r in effect.ranges)
            elif type(effect).__name__ in ("Arrived", "Failed"):
                told.append(type(effect).__name__)
            elif type(effect).__name__ == "Released":
                assert ended
                assert not released
                assert not flying
                released = True

    def end_a_read(done: bool) -> None:
        if flying:
            read_id = rng.choice(list(flying))
            num_blocks = flying.pop(read_id)
            ok = book.read_done(read_id, num_blocks * 64) if done else book.read_failed(read_id, rng.choice(causes), "")
            take(ok)

    causes = list(TransferCause)
    next_block = 0
    take(book.plan(PLAN))
    for _ in range(rng.randrange(4, 40)):
        match rng.randrange(9):
            case 0 | 1:
                take(book.peer_ready("p0.x", 100))
            case 2 | 3:
                count = rng.randrange(0, 6 - next_block)
                closing = CLOSING if next_block + count == 5 else None
                ids = tuple(range(next_block + 5, next_block + 5 + count))
                if book.state(A) in (S.RESERVED, S.READING):
                    take(book.received("p0.x", Offer(A, next_block, ids, 1000, closing)))
                    next_block += count
            case 4 | 5:
                end_a_read(rng.random() < 0.9)
            case 6:
                take(book.received("p0.x", ReadConfirmed(A, rng.random() < 0.8)))
            case 7 if rng.random() < 0.3:
                take(book.received("p0.x", OfferLost(A, "")))
            case 8 if rng.random() < 0.3:
                take(book.peer_lost("p0.x", TransferCause.PEER_GONE, ""))
    if not told or rng.random() < 0.5:
        ended = True
        take(book.ended(A))
    while flying:
        assert not released
        end_a_read(rng.random() < 0.5)
    if not ended:
        ended = True
        take(book.ended(A))
    assert released
    assert len(told) <= 1
    assert book.counts().live == book.counts().quarantined == 0


@pytest.mark.parametrize("seed", range(200))
def test_reads_stay_within_the_plan_and_the_pool_whatever_a_sender_sends(seed: int) -> None:
    rng, book = Random(seed), TransferBook(max_quarantined_blocks=1000, vocab_size=100)
    edges = [0, 1, 4, 5, 6, 99, 100, 2**31, 2**32 - 1, -1]
    filled: list[int] = []

    def number() -> int:
        return rng.choice(edges) if rng.random() < 0.3 else rng.randrange(10)

    def offer() -> Offer:
        left = len(PLAN.block_ids) - len(filled)
        ids = rng.sample(range(1, 100), rng.randint(0, left)) if rng.random() < 0.9 else [number() for _ in range(left)]
        at = len(filled) if rng.random() < 0.8 else rng.choice([len(filled) - 1, len(filled) + 1, number()])
        first_token = (7,) if rng.random() < 0.7 else tuple(number() for _ in range(rng.randrange(3)))
        closing = Closing(18 if rng.random() < 0.9 else number(), first_token, False)
        closes = rng.random() < (0.9 if len(ids) == left else 0.1)
        return Offer(A, at, ids, number(), closing if closes else None, 0 if rng.random() < 0.9 else number())

    def message() -> OfferMessage:
        match rng.randrange(12):
            case 0:
                return Begun(A)
            case 1:
                return Heartbeat(number())
            case 2 if rng.random() < 0.1:
                return OfferLost(A, "", rng.choice(list(TransferCause)))
            case 3 | 4 | 5:
                return ReadConfirmed(A, rng.random() < 0.8, [number() for _ in range(rng.randrange(7))])
        return offer()

    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    for _ in range(12):
        effects = book.received("p0.x", message())
        for read in [effect for effect in effects if isinstance(effect, StartRead)]:
            check_ranges(read.ranges, 64, 100)
            filled += [r.local_block + offset for r in read.ranges for offset in range(r.count)]
            if rng.random() < 0.9:
                effects += book.read_done(read.read_id, 64)
        arrived = [effect for effect in effects if isinstance(effect, Arrived)]
        assert all(sorted(filled) == sorted(PLAN.block_ids) for _ in arrived)
        assert all(0 <= token < 100 for effect in arrived for token in effect.closing.first_token_ids)
    assert len(filled) == len(set(filled)) <= len(PLAN.block_ids)
    assert set(filled) <= set(PLAN.block_ids)


def test_blocks_outside_of_every_window_are_neither_offered_nor_read(book: TransferBook) -> None:
    book.plan(TransferPlan(A, SOURCE, 18, (40, 0, 41, 0, 43), 0))
    book.peer_ready("p0.x", 100)
    # The second block is offered and not wanted; the fourth is neither.
    assert lines(book.received("p0.x", Offer(A, 0, (5, 6, 7), 1000))) == [
        "StartRead 1 p0.x [(ReadRange 40 5 1), (ReadRange 41 7 1)] []"
    ]
    assert lines(book.received("p0.x", Offer(A, 3, (0, 9), 1000, CLOSING))) == [
        "StartRead 2 p0.x [(ReadRange 43 9 1)] []"
    ]
    book.read_done(1, 128)
    assert lines(book.read_done(2, 64))[-1] == "TellSender p0.x (ConfirmRead a#1)"


def test_an_offer_of_which_no_block_is_wanted_starts_no_read(book: TransferBook) -> None:
    book.plan(TransferPlan(A, SOURCE, 18, (0, 0, 0, 0, 43), 0))
    book.peer_ready("p0.x", 100)
    assert lines(book.received("p0.x", Offer(A, 0, (0, 0), 1000))) == []
    assert lines(book.received("p0.x", Offer(A, 2, (0, 0, 9), 1000, CLOSING))) == [
        "StartRead 1 p0.x [(ReadRange 43 9 1)] []"
    ]


def test_a_wanted_block_must_be_offered(book: TransferBook) -> None:
    book.plan(TransferPlan(A, SOURCE, 18, (40, 0, 41, 0, 43), 0))
    book.peer_ready("p0.x", 100)
    effects = book.received("p0.x", Offer(A, 0, (5, 0, 0), 1000))
    assert Failed(A, TransferCause.REFUSED, "a block that is wanted is not offered") in effects


def with_digests(book: TransferBook) -> None:
    """Finish both reads of an attempt: the second's digests are not known, and the sender was asked to confirm."""
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6), 1000, None, 1))
    book.received("p0.x", Offer(A, 2, (7, 20, 21), 1000, CLOSING, 1))
    assert lines(book.read_done(1, 128)) == ["TellSender p0.x (ReadProgress a#1 2)"]
    assert lines(book.digested(1, {40: 50, 41: 60})) == []
    assert lines(book.read_done(2, 192)) == ["TellSender p0.x (ConfirmRead a#1)"]


DIGESTS = (50, 60, 70, 200, 210)
LAST = {42: 70, 43: 200, 10: 210}


@pytest.mark.parametrize("digested_first", [True, False])
def test_a_prompt_arrives_when_its_lease_was_held_and_its_digests_are_equal(
    book: TransferBook, digested_first: bool
) -> None:
    with_digests(book)
    answers: list[Callable[[], list[TransferEffect]]] = [
        lambda: book.digested(2, LAST),
        lambda: book.received("p0.x", ReadConfirmed(A, True, DIGESTS)),
    ]
    first, second = answers if digested_first else reversed(answers)
    assert lines(first()) == []
    assert lines(second())[0].startswith("Arrived a#1 (Closing 18 [7]")
    assert book.counts().live == 0


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("digested_first", [True, False])
def test_a_block_that_is_not_what_was_computed_fails_its_prompt(
    book: TransferBook, place: int, digested_first: bool
) -> None:
    with_digests(book)
    said = tuple(digest + (index == place) for index, digest in enumerate(DIGESTS))
    effects = book.digested(2, LAST) if digested_first else []
    effects += book.received("p0.x", ReadConfirmed(A, True, said))
    effects += book.digested(2, LAST) if not digested_first else []
    assert lines(effects) == [
        f"Failed a#1 DIGEST_MISMATCH block {PLAN.block_ids[place]} is not what p0 computed {place}",
        "TellSender p0.x (Abandon a#1 False)",
    ]
    assert book.failures == {("p0", TransferCause.DIGEST_MISMATCH): 1}
    assert book.counts().live == 0


@pytest.mark.parametrize("said", [(), DIGESTS[:4], (*DIGESTS, 7)])
def test_digests_of_other_than_all_blocks_prove_nothing(book: TransferBook, said: tuple[int, ...]) -> None:
    with_digests(book)
    book.digested(2, LAST)
    assert Failed(A, TransferCause.DIGEST_MISMATCH, f"p0 sent {len(said)} digests of 5 blocks") in book.received(
        "p0.x", ReadConfirmed(A, True, said)
    )


def failed_with(effects: list[TransferEffect]) -> int:
    """The number of valid blocks of the one failure among these effects."""
    (failed,) = (effect for effect in effects if isinstance(effect, Failed))
    return failed.num_valid_blocks


@pytest.fixture
def keeping() -> TransferBook:
    """A book that keeps valid blocks: two blocks are read and digested, and three are being read."""
    book = TransferBook(keeps_valid_blocks=True)
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6), 1000, None, 1))
    book.received("p0.x", Offer(A, 2, (7, 20, 21), 1000, CLOSING, 1))
    assert lines(book.read_done(1, 128)) == [
        "TellSender p0.x (ReadProgress a#1 2)",
        "TellSender p0.x (ConfirmPart a#1 2)",
    ]
    book.digested(1, {40: 50, 41: 60})
    return book


FAILURES: dict[str, Callable[[TransferBook], list[TransferEffect]]] = {
    "read failed": lambda book: book.read_failed(2, TransferCause.REFUSED, "bad"),
    "read stalled": lambda book: book.read_stalled(2, "nothing arrived"),
    "sender gone": lambda book: book.peer_lost("p0.x", TransferCause.PEER_GONE, "cut"),
    "offer lost": lambda book: book.received("p0.x", OfferLost(A, "aborted")),
}


@pytest.mark.parametrize("fails", FAILURES.values(), ids=FAILURES)
def test_blocks_that_were_read_and_confirmed_and_compared_outlive_a_failure(
    keeping: TransferBook, fails: Callable[[TransferBook], list[TransferEffect]]
) -> None:
    effects = keeping.received("p0.x", PartConfirmed(A, 0, DIGESTS[:2]))
    assert effects == [Recorded("prefix_verified", A, 2)]
    assert failed_with(fails(keeping)) == 2


@pytest.mark.parametrize("fails", FAILURES.values(), ids=FAILURES)
def test_blocks_that_the_sender_did_not_confirm_are_not_valid(
    keeping: TransferBook, fails: Callable[[TransferBook], list[TransferEffect]]
) -> None:
    assert failed_with(fails(keeping)) == 0
    assert lines(keeping.received("p0.x", PartConfirmed(A, 0, DIGESTS[:2]))) == [], "it is too late"


def test_a_block_counts_only_once_its_own_digest_is_known() -> None:
    book = TransferBook(keeps_valid_blocks=True)
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6, 7), 1000, None, 1))
    book.read_done(1, 192)
    assert not book.awaits_digests
    assert book.received("p0.x", PartConfirmed(A, 0, DIGESTS[:3])) == []
    assert book.awaits_digests, "more would be valid with them"
    assert book.digested(1, {40: 50}) == [Recorded("prefix_verified", A, 1)]
    assert book.digested(1, {42: 70}) == []
    assert failed_with(book.received("p0.x", OfferLost(A, "aborted"))) == 1, "what lies behind a gap does not count"


def test_no_block_is_valid_from_a_wrong_digest_on(keeping: TransferBook) -> None:
    assert keeping.received("p0.x", PartConfirmed(A, 0, (50, 61))) == [Recorded("prefix_verified", A, 1)]
    assert failed_with(keeping.received("p0.x", OfferLost(A, "aborted"))) == 1


@pytest.mark.parametrize("part", [PartConfirmed(A, 1, (60,)), PartConfirmed(A, 0, DIGESTS[:3])], ids=["gap", "unasked"])
def test_a_confirmation_of_other_blocks_than_were_asked_about_is_ignored(
    keeping: TransferBook, part: PartConfirmed
) -> None:
    assert keeping.received("p0.x", part) == []
    assert keeping.counters["PartConfirmed_bad"] == 1
    assert failed_with(keeping.received("p0.x", OfferLost(A, "aborted"))) == 0


def test_the_confirmation_of_all_blocks_replaces_those_of_parts(keeping: TransferBook) -> None:
    keeping.received("p0.x", PartConfirmed(A, 0, DIGESTS[:2]))
    keeping.read_done(2, 192)
    keeping.digested(2, LAST)
    assert failed_with(keeping.received("p0.x", ReadConfirmed(A, True, (50, 1, 70, 200, 210)))) == 1


def test_confirmed_parts_stay_valid_when_the_lease_is_lost_later(keeping: TransferBook) -> None:
    keeping.received("p0.x", PartConfirmed(A, 0, DIGESTS[:2]))
    keeping.read_done(2, 192)
    assert failed_with(keeping.received("p0.x", ReadConfirmed(A, False))) == 2


def test_the_sender_is_asked_about_leading_blocks_alone() -> None:
    book = TransferBook(keeps_valid_blocks=True)
    book.plan(TransferPlan(A, SOURCE, 18, (30, 0, 41, 0, 43), 1))
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 1, (0, 7), 1000, None, 1))
    book.received("p0.x", Offer(A, 3, (0, 9), 1000, None, 1))
    assert lines(book.read_done(2, 64)) == ["TellSender p0.x (ReadProgress a#1 1)"], "the first is still being read"
    assert "TellSender p0.x (ConfirmPart a#1 5)" in lines(book.read_done(1, 64))
    book.digested(1, {41: 70})
    book.digested(2, {43: 210})
    # Blocks that were here already are valid, and so are those where nothing is wanted.
    assert book.received("p0.x", PartConfirmed(A, 1, (0, 70, 0, 210))) == [Recorded("prefix_verified", A, 5)]


@pytest.mark.parametrize(("keeps", "every"), [(False, 1), (True, 16), (True, 0)])
def test_no_parts_are_confirmed_without_all_digests_or_if_valid_blocks_are_not_kept(keeps: bool, every: int) -> None:
    book = TransferBook(keeps_valid_blocks=keeps, digest_every=every)
    _reading(book)
    assert lines(book.read_done(1, 320)) == ["TellSender p0.x (ReadProgress a#1 5)"]


def test_a_confirmed_prompt_arrives_even_if_its_sender_is_lost(book: TransferBook) -> None:
    with_digests(book)
    book.received("p0.x", ReadConfirmed(A, True, DIGESTS))
    assert lines(book.received("p0.x", OfferLost(A, "gone"))) == []
    lost = book.peer_lost("p0.x", TransferCause.PEER_GONE, "cut")
    assert not [effect for effect in lost if isinstance(effect, Failed)]
    assert lines(book.digested(2, LAST))[0].startswith("Arrived a#1")


def test_digests_of_transfers_that_are_over_change_nothing(book: TransferBook) -> None:
    with_digests(book)
    book.abandon(A)
    assert lines(book.digested(2, LAST)) == []
    assert lines(book.digested(7, {1: 1})) == []
    assert book.counters["digested_unknown"] == 2
    assert not book.failures


def test_digests_begin_where_the_plan_does_and_leave_out_what_is_not_wanted(book: TransferBook) -> None:
    book.plan(TransferPlan(A, SOURCE, 18, (30, 0, 41, 0, 43), 1))
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 1, (6, 7, 0, 9), 1000, CLOSING, 1))
    book.read_done(1, 192)
    book.digested(1, {41: 70, 43: 90})
    assert lines(book.received("p0.x", ReadConfirmed(A, True, (60, 70, 0, 90))))[0].startswith("Arrived a#1")


def test_a_book_that_compares_nothing_asks_for_no_digests() -> None:
    book = TransferBook(digest_every=0)
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 20, 21), 1000, CLOSING, 1))
    book.read_done(1, 320)
    assert lines(book.received("p0.x", ReadConfirmed(A, True, DIGESTS)))[0].startswith("Arrived a#1")


def test_a_transfer_whose_digests_can_not_be_computed_has_failed(book: TransferBook) -> None:
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6), 1000, None, 1))
    book.received("p0.x", Offer(A, 2, (7, 8, 9), 1000, CLOSING, 1))
    book.read_done(1, 128)
    assert lines(book.digests_failed(1, "no memory")) == [
        "Failed a#1 DIGEST_MISMATCH no memory 0",
        "TellSender p0.x (Abandon a#1 True)",
        "CancelRead 2",
    ]
    assert lines(book.digests_failed(1, "no memory")) == []
    book.read_done(2, 192)
    assert lines(book.digests_failed(2, "no memory")) == []
    assert book.counters["digested_unknown"] == 1


def test_digests_may_come_in_parts_and_before_the_read_is_done(book: TransferBook) -> None:
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 20, 21), 1000, CLOSING, 1))
    assert lines(book.digested(1, {40: 50, 10: 210})) == []
    book.read_done(1, 320)
    assert not book.awaits_digests
    assert lines(book.received("p0.x", ReadConfirmed(A, True, DIGESTS))) == []
    assert book.awaits_digests
    assert lines(book.digested(1, {41: 60, 42: 70, 43: 200}))[0].startswith("Arrived a#1")
    assert not book.awaits_digests


def test_a_transfer_that_is_over_awaits_no_digests(book: TransferBook) -> None:
    with_digests(book)
    book.received("p0.x", ReadConfirmed(A, True, DIGESTS))
    assert book.awaits_digests
    book.abandon(A)
    assert not book.awaits_digests


@pytest.mark.parametrize(
    ("ours", "theirs", "flight", "to_digest"),
    [
        (1, 1, 3, [40, 41, 42, 43, 10]),
        (2, 1, 0, [40, 42, 10]),
        (2, 1, 3, [41, 43]),
        (1, 3, 0, [40, 43]),
        (2, 3, 0, [40]),
        (2, 3, 4, [42]),
        (0, 1, 0, []),
        (1, 0, 0, []),
    ],
)
def test_the_blocks_that_are_compared_have_a_digest_on_both_sides(
    ours: int, theirs: int, flight: int, to_digest: list[int]
) -> None:
    book, attempt = TransferBook(digest_every=ours), A._replace(flight=flight)
    book.plan(replace(PLAN, attempt=attempt))
    book.peer_ready("p0.x", 100)
    effects = book.received("p0.x", Offer(attempt, 0, (5, 6, 7), 1000, None, theirs))
    effects += book.received("p0.x", Offer(attempt, 3, (20, 21), 1000, CLOSING, theirs))
    assert [block for e in effects if isinstance(e, StartRead) for block in e.to_digest] == to_digest
    book.read_done(1, 192)
    book.read_done(2, 128)
    known = {e.read_id: dict.fromkeys(e.to_digest, 7) for e in effects if isinstance(e, StartRead) and e.to_digest}
    for read_id, digests in known.items():
        book.digested(read_id, digests)
    said = [7 if block in to_digest else 0 for block in PLAN.block_ids]
    assert lines(book.received("p0.x", ReadConfirmed(attempt, True, said)))[0].startswith("Arrived")


# Attempts that wait for blocks.


def test_blocks_are_planned_when_the_sender_has_begun(book: TransferBook) -> None:
    assert lines(book.expect(A, SOURCE)) == ["OpenLink (Peer p0 p0.x host:1)"]
    assert lines(book.expect(B, SOURCE)) == [], "the link is being opened"
    assert lines(book.peer_ready("p0.x", 100)) == [
        "TellSender p0.x (Expect a#1)",
        "TellSender p0.x (Expect b#1)",
    ]
    assert lines(book.received("p1.x", Begun(A))) == [], "that is not its sender"
    assert lines(book.received("p0.x", Begun(A))) == ["MayPlan a#1"]
    assert lines(book.plan(PLAN)) == ["TellSender p0.x (Subscribe a#1 0)"]
    assert lines(book.received("p0.x", Begun(A))) == [], "it is planned"
    assert book.counters == {"Begun_unknown": 1, "Begun_in_reserved": 1}
    c = AttemptKey("c", 1)
    assert lines(book.expect(c, SOURCE)) == ["TellSender p0.x (Expect c#1)"], "the link is there"


def test_the_sender_is_told_when_an_expected_attempt_is_abandoned(book: TransferBook) -> None:
    book.expect(A, SOURCE)
    assert lines(book.abandon(A)) == [], "nobody was told"
    book.peer_ready("p0.x", 100)
    book.expect(B, SOURCE)
    assert lines(book.abandon(B)) == ["TellSender p0.x (Abandon b#1 False)"]
    assert lines(book.abandon(B)) == []
    assert lines(book.received("p0.x", Begun(B))) == []


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_attempt_can_fail_before_it_has_blocks(book: TransferBook, has_begun: bool) -> None:
    book.expect(A, SOURCE)
    book.expect(B, SOURCE)
    book.peer_ready("p0.x", 100)
    if has_begun:
        book.received("p0.x", Begun(A))
        book.received("p0.x", Begun(B))
    assert lines(book.received("p0.x", OfferLost(A, "aborted"))) == ["Failed a#1 LEASE_LOST aborted 0"]
    assert lines(book.peer_lost("p0.x", TransferCause.PEER_GONE, "reset")) == ["Failed b#1 PEER_GONE reset 0"]
    assert book.failures == {("p0", TransferCause.LEASE_LOST): 1, ("p0", TransferCause.PEER_GONE): 1}
    assert lines(book.abandon(A) + book.abandon(B)) == []


def test_nothing_is_read_for_an_attempt_without_blocks(book: TransferBook) -> None:
    book.expect(A, SOURCE)
    book.peer_ready("p0.x", 100)
    assert lines(book.received("p0.x", Offer(A, 0, (5, 6), 1000))) == []
    assert lines(book.received("p0.x", ReadConfirmed(A, True))) == []
    assert book.counters == {"Offer_expected": 1, "ReadConfirmed_expected": 1}


# Blocks of another size than the sender's


def test_a_sender_with_smaller_blocks_is_told_its_own_counts_and_valid_blocks_are_the_readers() -> None:
    book = TransferBook(keeps_valid_blocks=True)
    # 30 tokens in blocks of 8, of which the first is here; the sender has blocks of 4.
    book.plan(TransferPlan(A, SOURCE, 30, (40, 41, 42, 43), 1))
    assert lines(book.peer_ready("p0.x", 100, BlockMap(4, 8))) == ["TellSender p0.x (Subscribe a#1 2)"]
    started = lines(book.received("p0.x", Offer(A, 2, (5, 6, 7), 1000, digest_every=1)))
    assert started == ["StartRead 1 p0.x [(ReadRange 82 5 3)] [82, 83, 84] 2"]
    assert book.counts().quarantined_blocks == 0
    assert "TellSender p0.x (ReadProgress a#1 3)" in lines(book.read_done(1, 48))
    book.digested(1, {82: 1, 83: 2, 84: 3})
    book.received("p0.x", PartConfirmed(A, 2, (1, 2, 3)))
    # Block 42 is half there.
    [failed] = [e for e in book.peer_lost("p0.x", TransferCause.PEER_GONE, "gone") if isinstance(e, Failed)]
    assert failed.num_valid_blocks == 2


@pytest.mark.parametrize("arrives", [True, False])
def test_blocks_that_were_filled_in_part_are_named_whatever_becomes_of_the_transfer(arrives: bool) -> None:
    book = TransferBook(digest_every=0)
    # 30 tokens in blocks of 8; the query at 29 sees 19 to 29, so of block 42 the first half is not read.
    book.plan(TransferPlan(A, SOURCE, 30, (0, 0, 42, 43), 0))
    book.peer_ready("p0.x", 100, BlockMap(4, 8, (10,)))
    offer = Offer(A, 0, (0, 0, 0, 0, 0, 5, 6, 7), 1000, Closing(30, (7,), False))
    assert lines(book.received("p0.x", offer)) == ["StartRead 1 p0.x [(ReadRange 85 5 3)] [] 2"]
    book.read_done(1, 48)
    effects = (
        book.received("p0.x", ReadConfirmed(A, True))
        if arrives
        else book.peer_lost("p0.x", TransferCause.PEER_GONE, "gone")
    )
    (outcome,) = (effect for effect in effects if isinstance(effect, (Arrived, Failed)))
    assert outcome.partly_filled == (2,)


def test_a_sender_with_larger_blocks_gives_a_digest_for_each_of_the_readers() -> None:
    book = TransferBook(keeps_valid_blocks=True)
    # 20 tokens in blocks of 4, of which the first is here; the sender has blocks of 8.
    book.plan(TransferPlan(A, SOURCE, 20, (40, 41, 42, 43, 44), 1))
    assert lines(book.peer_ready("p0.x", 100, BlockMap(8, 4))) == ["TellSender p0.x (Subscribe a#1 0)"]
    offer = Offer(A, 0, (5, 6), 1000, digest_every=1, digest_parts=4)
    started = lines(book.received("p0.x", offer))
    assert started == ["StartRead 1 p0.x [(ReadRange 41 11 3)] [82, 83, 84, 85, 86, 87] 2"]
    book.read_done(1, 48)
    last = Offer(A, 2, (9,), 1000, Closing(20, (7,), False), 1, 4)
    assert lines(book.received("p0.x", last)) == ["StartRead 2 p0.x [(ReadRange 44 18 1)] [88, 89] 2"]
    book.read_done(2, 16)
    book.digested(1, {82: 2, 83: 3, 84: 4, 85: 5, 86: 6, 87: 7})
    book.digested(2, {88: 8, 89: 9})
    # What is not wanted (block 40, and what is behind the prompt) is not compared.
    effects = book.received("p0.x", ReadConfirmed(A, True, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)))
    assert [type(effect) for effect in effects if not isinstance(effect, Recorded)] == [Arrived]


@pytest.mark.parametrize("digest_parts", [0, 1, 3, 16, 1 << 31])
def test_digests_that_cant_be_compared_are_refused_before_anything_is_read(digest_parts: int) -> None:
    book = TransferBook()
    book.plan(TransferPlan(A, SOURCE, 20, (40, 41, 42, 43, 44), 0))
    book.peer_ready("p0.x", 100, BlockMap(8, 4))
    effects = book.received("p0.x", Offer(A, 0, (5,), 1000, digest_every=1, digest_parts=digest_parts))
    [failed] = [effect for effect in effects if isinstance(effect, Failed)]
    assert (failed.cause, f"{digest_parts} digests for each block" in failed.detail) == (TransferCause.REFUSED, True)
    assert not any(isinstance(effect, StartRead) for effect in effects)


def test_all_offers_of_an_attempt_have_the_same_number_of_digests() -> None:
    book = TransferBook()
    book.plan(TransferPlan(A, SOURCE, 16, (40, 41, 42, 43), 0))
    book.peer_ready("p0.x", 100, BlockMap(4, 4))
    book.received("p0.x", Offer(A, 0, (5, 6), 1000, digest_every=1))
    book.digested(1, {40: 666, 41: 666})
    last = Offer(A, 2, (7, 8), 1000, Closing(16, (7,), False), digest_every=1, digest_parts=2)
    # Otherwise the digests of the first two blocks would be taken for those of others.
    (failed,) = (effect for effect in book.received("p0.x", last) if isinstance(effect, Failed))
    assert (failed.cause, "2 digests for each block" in failed.detail) == (TransferCause.REFUSED, True)


def test_a_block_with_several_reads_is_one_block_in_quarantine() -> None:
    book = TransferBook()
    book.plan(TransferPlan(A, SOURCE, 512, (40,), 0))
    book.peer_ready("p0.x", 100, BlockMap(16, 512))
    for block in range(31):
        book.received("p0.x", Offer(A, block, (block + 1,), 1000))
    book.abandon(A)
    assert book.counts().quarantined_blocks == 1


def test_a_wrong_part_fails_its_transfer_and_names_the_block() -> None:
    book = TransferBook()
    book.plan(TransferPlan(A, SOURCE, 16, (40, 41), 0))
    book.peer_ready("p0.x", 100, BlockMap(4, 8))
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 8), 1000, Closing(16, (7,), False), 1))
    book.digested(1, {80: 1, 81: 2, 82: 3, 83: 99})
    book.read_done(1, 64)
    effects = book.received("p0.x", ReadConfirmed(A, True, (1, 2, 3, 4)))
    [failed] = [effect for effect in effects if isinstance(effect, Failed)]
    assert (failed.cause, failed.detail) == (TransferCause.DIGEST_MISMATCH, "block 41 is not what p0 computed")
