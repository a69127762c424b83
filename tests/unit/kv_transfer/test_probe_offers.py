"""The sender's side of join probes: fresh bytes for each, one verdict for both nodes, no wait without an end."""

from __future__ import annotations

import itertools

import pytest

from baton.messages.node_report import ProbeFault
from kv_transfer.link.link_messages import AskProbe, ProbeReady, ProbeResult
from kv_transfer.sender.lease_values import TellReader
from kv_transfer.sender.probe_offers import FailLink, FillProbe, ProbeOffers, ProbePatience
from tests.doubles.fake_clock import FakeClock

BLOCK, FIRST, SECOND = 64, 501, 502


class Rig:
    """The offers of a sender with one probe block."""

    def __init__(self, block: int | None = BLOCK, num_groups: int = 1) -> None:
        self.clock = FakeClock(10.0)
        numbers = itertools.count()
        self.offers = ProbeOffers(
            "p0", "p0.x", block, self.clock, ProbePatience(60.0, 180.0), lambda: f"nonce-{next(numbers)}", num_groups
        )

    def offer(self, link: int = 1, reader: str = "d0", fill_id: int = 1, digest: int = FIRST) -> None:
        """Take a reader's probe as far as its bytes are ready."""
        assert len(self.offers.asked(link, reader, f"{reader}.x", AskProbe(link))) == 1
        self.offers.filled(fill_id, {1: digest})


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_reader_is_told_once_its_bytes_are_there(rig: Rig) -> None:
    assert rig.offers.asked(1, "d0", "d0.x", AskProbe(7)) == [FillProbe(1, BLOCK, "p0.x/nonce-0")]
    assert rig.offers.filled(1, {1: FIRST}) == [TellReader(1, ProbeReady(7, BLOCK, FIRST))]
    assert rig.offers.num_open == 1
    assert rig.offers.result(1, ProbeResult(7, FIRST)) == []
    assert (rig.offers.num_open, rig.offers.next_deadline()) == (0, None)
    assert rig.offers.outcomes == {("d0", "passed"): 1}


def test_each_probe_has_bytes_of_its_own(rig: Rig) -> None:
    rig.offer()
    rig.offers.result(1, ProbeResult(1, FIRST))
    assert rig.offers.asked(2, "d1", "d1.x", AskProbe(2)) == [FillProbe(2, BLOCK, "p0.x/nonce-1")]


def test_readers_at_the_same_time_share_their_bytes(rig: Rig) -> None:
    rig.offers.asked(1, "d0", "d0.x", AskProbe(1))
    assert rig.offers.asked(2, "d1", "d1.x", AskProbe(2)) == []
    assert len(rig.offers.filled(1, {1: FIRST})) == 2
    # The bytes are being read, so they are not overwritten; and nobody waits for those that read them.
    assert rig.offers.asked(3, "d2", "d2.x", AskProbe(3)) == [TellReader(3, ProbeReady(3, BLOCK, FIRST))]
    assert rig.offers.num_open == 3


def test_a_reader_asks_for_one_group_of_layers_after_the_other() -> None:
    offers = Rig(num_groups=2).offers
    assert offers.asked(1, "d0", "d0.x", AskProbe(7)) == [FillProbe(1, BLOCK, "p0.x/nonce-0")]
    assert offers.asked(1, "d0", "d0.x", AskProbe(8, 1)) == [], "the other one is not over"
    assert offers.counters == {"AskProbe_again": 1}
    offers.filled(1, {1: FIRST})
    assert offers.result(1, ProbeResult(7, FIRST)) == []
    assert offers.asked(1, "d0", "d0.x", AskProbe(8, 1)) == [FillProbe(2, BLOCK, "p0.x/nonce-1", 1)]
    assert offers.filled(2, {1: SECOND}) == [TellReader(1, ProbeReady(8, BLOCK, SECOND))]
    assert offers.result(1, ProbeResult(8, SECOND)) == []
    assert offers.asked(1, "d0", "d0.x", AskProbe(9, 1)) == []
    assert (offers.num_open, offers.counters) == (0, {"AskProbe_again": 2})


def test_bytes_that_are_read_are_written_again_for_another_group_and_not_changed() -> None:
    offers = Rig(num_groups=2).offers
    offers.asked(1, "d0", "d0.x", AskProbe(1))
    assert offers.asked(2, "d1", "d1.x", AskProbe(2, 1)) == []
    told, again = offers.filled(1, {1: FIRST})
    assert told == TellReader(1, ProbeReady(1, BLOCK, FIRST))
    assert again == FillProbe(2, BLOCK, "p0.x/nonce-0", 1)
    assert offers.asked(3, "d2", "d2.x", AskProbe(3)) == [TellReader(3, ProbeReady(3, BLOCK, FIRST))]
    assert offers.asked(4, "d3", "d3.x", AskProbe(4, 1)) == []
    said = [TellReader(link, ProbeReady(link, BLOCK, SECOND)) for link in (2, 4)]
    assert offers.filled(2, {1: SECOND}) == said
    # While anybody reads them they are known by both groups.
    assert offers.asked(5, "d4", "d4.x", AskProbe(5, 1)) == [TellReader(5, ProbeReady(5, BLOCK, SECOND))]


def test_bytes_that_are_read_stay_when_the_next_reader_asks_for_another_group() -> None:
    offers = Rig(num_groups=2).offers
    offers.asked(1, "d0", "d0.x", AskProbe(1))
    offers.filled(1, {1: FIRST})
    assert offers.asked(2, "d1", "d1.x", AskProbe(2, 1)) == [FillProbe(2, BLOCK, "p0.x/nonce-0", 1)]


def test_a_group_that_the_model_has_not_is_a_failure() -> None:
    offers = Rig(num_groups=2).offers
    assert offers.asked(1, "d0", "d0.x", AskProbe(1, 2)) == [
        FailLink(1, "p0 has 2 groups of layers, and d0 asks for number 2")
    ]
    assert offers.num_open == 0


def test_a_failure_that_the_reader_reports_ends_its_link(rig: Rig) -> None:
    rig.offer()
    failed = ProbeResult(1, 0, ProbeFault.TIMED_OUT, "d0 could not read")
    assert rig.offers.result(1, failed) == [FailLink(1, "d0 could not read")]
    (seen,) = rig.offers.failures()
    assert (seen.peer, seen.fault, seen.detail, seen.count) == ("d0", ProbeFault.TIMED_OUT, "d0 could not read", 1)
    assert rig.offers.num_open == 0


def test_a_reader_that_takes_other_bytes_for_the_known_ones_is_found(rig: Rig) -> None:
    rig.offer()
    (ended,) = rig.offers.result(1, ProbeResult(1, SECOND))
    assert isinstance(ended, FailLink)
    assert rig.offers.failures()[0].fault is ProbeFault.WRONG_BYTES


def test_a_reader_that_did_not_read_cant_have_passed(rig: Rig) -> None:
    rig.offers.asked(1, "d0", "d0.x", AskProbe(1))
    (ended,) = rig.offers.result(1, ProbeResult(1, 0))
    assert isinstance(ended, FailLink)


def test_a_condition_ends_with_a_probe_that_passes_or_with_its_reader(rig: Rig) -> None:
    def fail(link: int, fill_id: int) -> None:
        rig.offer(link, fill_id=fill_id)
        rig.offers.result(link, ProbeResult(link, 0, ProbeFault.READ_FAILED, "no"))

    fail(1, 1)
    rig.offer(2, fill_id=2)
    rig.offers.result(2, ProbeResult(2, FIRST))
    assert rig.offers.failures() == []
    fail(3, 3)
    rig.offers.reader_gone("d0.x")
    assert rig.offers.failures() == []
    # A reader that is gone without a trace does not try again.
    fail(4, 4)
    rig.clock.advance(179.0)
    assert len(rig.offers.failures()) == 1
    rig.clock.advance(1.0)
    assert rig.offers.failures() == []


def test_what_cant_be_filled_is_a_failure_of_all_who_wait(rig: Rig) -> None:
    rig.offers.asked(1, "d0", "d0.x", AskProbe(1))
    rig.offers.asked(2, "d1", "d1.x", AskProbe(2))
    ended = [FailLink(link, "p0 could not provide known bytes: no memory") for link in (1, 2)]
    assert rig.offers.fill_failed(1, "no memory") == ended
    assert {each.peer for each in rig.offers.failures()} == {"d0", "d1"}


def test_a_node_without_probe_blocks_says_so() -> None:
    (ended,) = Rig(block=None).offers.asked(1, "d0", "d0.x", AskProbe(1))
    assert ended == FailLink(1, "p0 has no probe blocks")


def test_a_probe_that_is_never_answered_ends(rig: Rig) -> None:
    rig.offer()
    deadline = rig.offers.next_deadline()
    assert deadline == 70.0
    rig.clock.advance(60.0)
    rig.offers.tick()
    assert rig.offers.num_open == 0
    rig.offer(2, "d1", fill_id=2)
    rig.offers.link_closed(2)
    assert rig.offers.num_open == 0


def test_what_a_reader_sends_is_bounded(rig: Rig) -> None:
    rig.offer()
    assert rig.offers.asked(1, "d0", "d0.x", AskProbe(2)) == []
    assert rig.offers.counters == {"AskProbe_again": 1}
    (ended,) = rig.offers.result(1, ProbeResult(1, 0, ProbeFault.READ_FAILED, "x" * 1_000_000))
    assert isinstance(ended, FailLink)
    assert len(ended.detail) == 1024
    rig.offers.link_closed(1)
    for link in range(2, 2000):
        rig.offer(link, f"d{link}", fill_id=link)
        rig.offers.result(link, ProbeResult(link, FIRST))
        rig.offers.link_closed(link)
    assert len(rig.offers.outcomes) <= 1025
    assert rig.offers.outcomes["others", "passed"] > 0


def test_late_and_unknown_answers_change_nothing(rig: Rig) -> None:
    assert rig.offers.result(1, ProbeResult(1, FIRST)) == []
    assert rig.offers.filled(1, {1: FIRST}) == []
    assert rig.offers.fill_failed(1, "") == []
    rig.offer()
    assert rig.offers.result(1, ProbeResult(9, FIRST)) == []
    assert rig.offers.num_open == 1
    assert rig.offers.counters == {"ProbeResult_unknown": 2, "filled_unknown": 2}
