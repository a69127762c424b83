"""What operators are told by the lease book, the transfer book and the links."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey, Peer
from baton.messages.kv_cache import NULL_BLOCK
from baton.messages.node_report import (
    EndedHandoffs,
    FailedProbe,
    HandoffReport,
    HandoffSide,
    OpenHandoff,
    ProbeFault,
    RefusedLink,
)
from baton.node.reports.reports import handoff_notice
from baton.observe.metrics import Distribution, Figure, declared_figures
from kv_transfer.figures import failure_figures, probe_figures, read_figures, refusal_figures, transfer_figures
from kv_transfer.link.failures import FailedProbes, RefusedLinks, count_outcome
from kv_transfer.link.link_messages import Closing, ConfirmRead, Offer, OfferLost, ReadConfirmed, Subscribe
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.receiver.transfer_values import ReadHistograms, TransferPlan
from kv_transfer.sender.lease import LeaseBook
from kv_transfer.sender.lease_values import LeaseTimes
from tests.doubles.fake_clock import FakeClock

A, B, C = AttemptKey("a", 1, 9), AttemptKey("b", 2), AttemptKey("c", 1)
SOURCE = Peer("p0", "p0.x", "host:1")
CLOSING = Closing(10, (7,), False)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


def test_a_lease_is_listed_from_its_first_offer_to_its_end(clock: FakeClock) -> None:
    book = LeaseBook(clock, LeaseTimes(grace_s=5))
    assert book.open_handoffs() == []
    book.offer(A, 0, (5, 6))
    clock.advance(2)
    granted = OpenHandoff(A, HandoffSide.SENDER, "GRANTED", "", "", 2, 2.0)
    assert book.open_handoffs() == [granted]
    book.link_opened(1, "d0", "d0.x")
    book.received(1, Subscribe(A, 0))
    book.offer(A, 2, (7,), CLOSING)
    reading = replace(granted, state="READING", peer="d0", peer_incarnation="d0.x", num_blocks=3)
    assert book.open_handoffs() == [reading]
    book.link_closed(1)
    # The reader, which may still read, is known though its link has ended.
    assert book.open_handoffs() == [replace(reading, state="SUSPECT")]
    clock.advance(5)
    book.tick()
    assert book.open_handoffs() == []


def test_a_confirmed_lease_is_not_listed_any_more(clock: FakeClock) -> None:
    book = LeaseBook(clock)
    book.link_opened(1, "d0", "d0.x")
    book.offer(A, 0, (5, 6, 7), CLOSING)
    book.received(1, Subscribe(A, 0))
    book.received(1, ConfirmRead(A))
    assert book.open_handoffs() == []


def test_a_transfer_is_listed_until_its_last_read_has_ended(clock: FakeClock) -> None:
    book = TransferBook(clock=clock)
    book.plan(TransferPlan(A, SOURCE, 10, (40, 41, NULL_BLOCK, 43), 1))
    clock.advance(3)
    planned = OpenHandoff(A, HandoffSide.READER, "PLANNED", "p0", "p0.x", 2, 3.0)
    assert book.open_handoffs() == [planned]
    book.peer_ready("p0.x", 100)
    assert book.open_handoffs() == [replace(planned, state="RESERVED")]
    book.received("p0.x", Offer(A, 1, (5,), 1000))
    assert book.open_handoffs() == [replace(planned, state="READING")]
    book.abandon(A)
    # One block may still be written to; the other was never offered.
    assert book.open_handoffs() == [replace(planned, state="QUARANTINED", num_blocks=1)]
    assert book.ended_handoffs() == [EndedHandoffs("p0", "cancelled", 1)]
    book.read_done(1, 64)
    assert book.open_handoffs() == []
    assert book.ended_handoffs() == [EndedHandoffs("p0", "cancelled", 1)]


def test_ends_are_counted_by_sender_and_outcome(clock: FakeClock) -> None:
    book = TransferBook(clock=clock)
    other = Peer("p1", "p1.x", "host:2")
    for attempt, source in ((A, SOURCE), (B, SOURCE), (C, other)):
        book.plan(TransferPlan(attempt, source, 10, (40, 41, 42), 0))
        book.peer_ready(source.incarnation, 100)
    book.received("p0.x", Offer(A, 0, (5, 6, 7), 1000, CLOSING))
    book.read_done(1, 192)
    assert [handoff.state for handoff in book.open_handoffs()] == ["CONFIRMING", "RESERVED", "RESERVED"]
    book.received("p0.x", ReadConfirmed(A, True))
    book.received("p0.x", OfferLost(B, "preempted"))
    book.peer_lost("p1.x", TransferCause.PEER_GONE, "gone")
    ended = [
        EndedHandoffs("p0", "arrived", 1),
        EndedHandoffs("p0", "lease_lost", 1),
        EndedHandoffs("p1", "peer_gone", 1),
    ]
    assert book.ended_handoffs() == ended
    assert book.open_handoffs() == []


def test_the_latest_refusal_of_each_peer_is_kept_until_a_link_opens(clock: FakeClock) -> None:
    links = RefusedLinks(clock)
    links.link_ended("p0", TransferCause.LAYOUT_MISMATCH, "first")
    clock.advance(2)
    links.link_ended("p1", TransferCause.REFUSED, "clusters differ")
    links.link_ended("p0", TransferCause.LAYOUT_MISMATCH, "second")
    clock.advance(1)
    of_p0 = RefusedLink("p0", "layout_mismatch", "second", 1.0, 2)
    of_p1 = RefusedLink("p1", "refused", "clusters differ", 1.0, 1)
    assert links.latest() == [of_p0, of_p1]
    links.link_ended("p1", TransferCause.PEER_GONE, "it was killed")
    assert links.latest() == [of_p0, of_p1]
    links.link_opened("p0")
    links.link_opened("p2")
    assert links.latest() == [of_p1]


def test_refusals_are_bounded_in_number_and_length(clock: FakeClock) -> None:
    links = RefusedLinks(clock)
    for number in range(100):
        links.link_ended(f"p{number}", TransferCause.REFUSED, "x" * 1_000_000)
    kept = links.latest()
    assert [link.peer for link in kept] == [f"p{number}" for number in range(99, 91, -1)]
    assert all(len(link.story) <= 1024 for link in kept)


def test_the_latest_failure_of_each_peer_is_kept_until_a_probe_passes(clock: FakeClock) -> None:
    probes = FailedProbes(clock)
    assert probes.failed("p0.x", "p0", ProbeFault.TIMED_OUT, "first") == 1
    clock.advance(2)
    probes.failed("p1.x", "p1", ProbeFault.WRONG_BYTES, "other bytes")
    assert probes.failed("p0.x", "p0", ProbeFault.READ_FAILED, "second") == 2
    clock.advance(1)
    of_p0 = FailedProbe("p0", ProbeFault.READ_FAILED, "second", 1.0, 2)
    of_p1 = FailedProbe("p1", ProbeFault.WRONG_BYTES, "other bytes", 1.0, 1)
    # The one that began to fail first comes first.
    assert probes.shown() == [of_p0, of_p1]
    assert probes.detail("p0.x") == "second"
    # Another incarnation of a node says that the one before is gone.
    probes.failed("p0.y", "p0", ProbeFault.TIMED_OUT, "anew")
    assert [each.count for each in probes.shown()] == [1, 1]
    probes.passed("p0.z", "p0")
    probes.forget("p9.x")
    assert probes.shown() == [of_p1]


def test_failed_probes_are_bounded_in_number_length_and_time(clock: FakeClock) -> None:
    probes = FailedProbes(clock, kept_s=60.0, max_kept=100)
    for number in range(101):
        probes.failed(f"p{number}.x", f"p{number}", ProbeFault.TIMED_OUT, "x" * 1_000_000)
        clock.advance(0.125)
    assert [probe.peer for probe in probes.shown()] == [f"p{number}" for number in range(1, 65)]
    assert (probes.detail("p0.x"), probes.detail("p100.x")) == (None, "x" * 1024)
    # The failure that was not repeated for the longest time is forgotten.
    probes.failed("p1.x", "p1", ProbeFault.TIMED_OUT, "again")
    probes.failed("p101.x", "p101", ProbeFault.TIMED_OUT, "anew")
    assert (probes.detail("p1.x"), probes.detail("p2.x")) == ("again", None)
    clock.advance(60)
    assert probes.shown() == []


def test_the_notice_of_failed_probes_stays_the_same_while_pairs_fail_by_turns(clock: FakeClock) -> None:
    probes, notices = FailedProbes(clock), []
    for number in range(3):
        probes.failed(f"p{number}.x", f"p{number}", ProbeFault.TIMED_OUT, f"d0 could not read p{number}")
        notices.append(handoff_notice((), probes.shown()))
    for number in (0, 1, 2, 1, 0):
        clock.advance(1.0)
        probes.failed(f"p{number}.x", f"p{number}", ProbeFault.TIMED_OUT, f"d0 could not read p{number}")
        notices.append(handoff_notice((), probes.shown()))
    assert list(dict.fromkeys(notices)) == [
        "KvProbeFailed: d0 could not read p0",
        "KvProbeFailed: d0 could not read p0 (and 1 more pair)",
        "KvProbeFailed: d0 could not read p0 (and 2 more pairs)",
    ]


def test_outcomes_are_counted_for_a_bounded_number_of_names() -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for number in range(2000):
        count_outcome(outcomes, f"p{number}", "passed")
    count_outcome(outcomes, "p7", "passed")
    assert (outcomes["p7", "passed"], outcomes["others", "passed"], len(outcomes)) == (2, 976, 1025)


def test_probe_metrics_have_every_outcome_and_every_standing_failure() -> None:
    failed = [FailedProbe("p1", ProbeFault.TIMED_OUT, "late", 1.0, 3)]
    figures = probe_figures({("p1", "timed_out"): 3, ("p0", "passed"): 1}, failed)
    assert {_sample(figure): figure.value for figure in figures} == {
        "kv_probes_total{peer=p0,outcome=passed}": 1,
        "kv_probes_total{peer=p1,outcome=timed_out}": 3,
        "kv_failed_probes{peer=p1,fault=timed_out}": 3,
    }


def test_transfer_metrics_have_every_open_state_and_every_outcome() -> None:
    open_now = [OpenHandoff(A, HandoffSide.READER, "QUARANTINED", "p0", "p0.x", 2, 7.5)]
    ended, refused = [EndedHandoffs("p0", "arrived", 3)], [RefusedLink("p1", "refused", "clusters differ", 1.0, 4)]
    figures = transfer_figures(HandoffReport("layout", open_now, ended)) + refusal_figures(refused)
    assert {_sample(figure): figure.value for figure in figures} == {
        "kv_open_transfers{state=planned}": 0,
        "kv_open_transfers{state=reserved}": 0,
        "kv_open_transfers{state=reading}": 0,
        "kv_open_transfers{state=confirming}": 0,
        "kv_open_transfers{state=quarantined}": 1,
        "kv_transfer_age_seconds{}": 7.5,
        "kv_transfers_total{peer=p0,outcome=arrived}": 3,
        "kv_refused_links{peer=p1,cause=refused}": 4,
    }


def test_failures_are_counted_by_cause_and_sender() -> None:
    counted = {
        ("p1", TransferCause.DIGEST_MISMATCH): 2,
        ("p0", TransferCause.PEER_GONE): 1,
        ("p0", TransferCause.DIGEST_MISMATCH): 3,
    }
    assert {_sample(figure): figure.value for figure in failure_figures(counted)} == {
        "kv_transfer_failures_total{cause=peer_gone,peer=p0}": 1,
        "kv_transfer_failures_total{cause=digest_mismatch,peer=p0}": 3,
        "kv_transfer_failures_total{cause=digest_mismatch,peer=p1}": 2,
        "kv_digest_mismatch_total{}": 5,
    }


def _distributions(reads: dict[str, ReadHistograms]) -> list[Distribution]:
    return [figure for figure in read_figures(reads) if isinstance(figure, Distribution)]


def test_durations_and_sizes_of_reads_are_counted_by_sender() -> None:
    reads = {"p0": ReadHistograms(), "p1": ReadHistograms()}
    reads["p0"].add(5000, 3, 0.5, 0.25)
    reads["p0"].add(1000, 1, 0.25, 0.125)
    reads["p1"].add(1 << 20, 7, 0.002, 0.001)
    assert {_sample(each): (each.total, each.buckets[-1][1]) for each in _distributions(reads)} == {
        "kv_transfer_seconds{peer=p0}": (0.75, 2),
        "kv_transfer_post_seconds{peer=p0}": (0.375, 2),
        "kv_transfer_bytes{peer=p0}": (6000, 2),
        "kv_transfer_descriptors{peer=p0}": (4, 2),
        "kv_transfer_seconds{peer=p1}": (0.002, 1),
        "kv_transfer_post_seconds{peer=p1}": (0.001, 1),
        "kv_transfer_bytes{peer=p1}": (1 << 20, 1),
        "kv_transfer_descriptors{peer=p1}": (7, 1),
    }
    by_bound = {each.name: dict(each.buckets) for each in _distributions({"p0": reads["p0"]})}
    assert [by_bound["kv_transfer_bytes"][bound] for bound in (1024.0, 4096.0, 16384.0)] == [1, 1, 2]
    assert [by_bound["kv_transfer_seconds"][bound] for bound in (0.2, 0.3, 0.5)] == [0, 1, 2]


def test_a_senders_metrics_show_suspect_blocks_and_the_age_of_its_leases(clock: FakeClock) -> None:
    def read_metrics() -> dict[str, float]:
        figures = [figure for figure in declared_figures(book.stats()) if isinstance(figure, Figure)]
        return {_sample(figure): figure.value for figure in figures}

    book = LeaseBook(clock)
    assert not any(read_metrics().values())
    book.link_opened(1, "d0", "d0.x")
    book.offer(A, 0, (5, NULL_BLOCK, 7), CLOSING)
    clock.advance(2)
    book.offer(B, 0, (8,))
    book.received(1, Subscribe(A, 0))
    book.link_closed(1)
    clock.advance(1)
    assert read_metrics() == {
        "kv_leases{state=granted}": 1,
        "kv_leases{state=reading}": 0,
        "kv_leases{state=suspect}": 1,
        "kv_suspect_blocks{}": 2,
        "kv_lease_age_seconds{}": 3,
    }


def _sample(figure: Figure | Distribution) -> str:
    return f"{figure.name}{{{','.join(f'{key}={value}' for key, value in figure.labels.items())}}}"
