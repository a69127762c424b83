"""The reader's side of join probes: what passes, what fails and under which name, and that every wait ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

from baton.errors import TransferCause, TransferFailed
from baton.messages.ids import Peer
from baton.messages.node_report import ProbeFault
from kv_transfer.link.link_messages import AskProbe, ProbeReady, ProbeResult
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.probe_values import (
    EndLink,
    PairProven,
    ProbeAgain,
    ProbeEffect,
    ProbeEvent,
    ProbeState,
    ProbeTimes,
    ReadProbe,
    RefuseWaiting,
    ReportFailure,
)
from kv_transfer.receiver.transfer_values import AbandonRead, TellSender
from tests.doubles.fake_clock import FakeClock

S, E = ProbeState, ProbeEvent
P0 = Peer("p0", "p0.x", "h:1")
P1 = Peer("p1", "p1.x", "h:2")
KNOWN, OTHER, BEFORE = 71, 72, 73
TIMES = ProbeTimes(tick_s=1.0, max_quiet_ticks=5, first_pause_s=1.0, max_pause_s=8.0)
T = TypeVar("T")


class Rig:
    """Probes of a reader with two probe blocks, 100 and 101."""

    def __init__(self) -> None:
        self.clock = FakeClock(10.0)
        numbers = itertools.count()
        self.probes = JoinProbes("d0", "d0.x", self.clock, TIMES, lambda: f"nonce-{next(numbers)}")
        self.probes.local_blocks = (100, 101)

    def ask(self, source: Peer = P0) -> int:
        """Open a link and connect; returns the probe's number."""
        (asked,) = self.probes.link_up(source)
        assert isinstance(asked, TellSender)
        assert isinstance(asked.message, AskProbe)
        assert self.probes.connected(source.incarnation) == []
        return asked.message.probe

    def start(self, source: Peer = P0) -> ReadProbe:
        """Take a probe of this sender to its read."""
        return only(ReadProbe, self.probes.received(source.incarnation, ProbeReady(self.ask(source), 900, KNOWN)))

    def end(self, read: ReadProbe, digest: int = KNOWN) -> list[ProbeEffect]:
        """Let a read bring bytes with this digest."""
        self.probes.filled(read.read_id, {1: BEFORE})
        assert self.probes.read_done(read.read_id) == []
        return self.probes.digested(read.read_id, {read.local_block: digest})

    def tick(self, count: int = 1) -> list[ProbeEffect]:
        """Let so many seconds go by, with a tick in each."""
        effects: list[ProbeEffect] = []
        for _ in range(count):
            self.clock.advance(1.0)
            effects += self.probes.tick()
        return effects

    def sender_ends_link(self, source: Peer = P0) -> list[ProbeEffect]:
        return self.probes.link_lost(source, TransferCause.PROBE_FAILED, "the sender's words")


@pytest.fixture
def rig() -> Rig:
    return Rig()


def only(kind: type[T], effects: Iterable[ProbeEffect]) -> T:
    """The only effect of this kind."""
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def result(effects: Iterable[ProbeEffect]) -> ProbeResult:
    """What the sender is told in the end."""
    message = only(TellSender, effects).message
    assert isinstance(message, ProbeResult)
    return message


# What passes.


def test_each_group_of_layers_is_probed_before_a_sender_is_used(rig: Rig) -> None:
    """Where a node is in parts, two parts may have layers of one group alone in common."""
    rig.probes.link_up(P0, num_groups=3)
    rig.probes.connected("p0.x")
    before = rig.probes.link_up(P1)
    assert before == [TellSender("p1.x", AskProbe(2))]
    number = 1
    for group, next_number in ((0, 3), (1, 4), (2, None)):
        read = only(ReadProbe, rig.probes.received("p0.x", ProbeReady(number, 900 + group, KNOWN + 100 * group)))
        assert (read.group, read.remote_block, read.read_id) == (group, 900 + group, -number)
        effects = rig.end(read, KNOWN + 100 * group)
        told = TellSender("p0.x", ProbeResult(number, KNOWN + 100 * group))
        if next_number is None:
            assert effects == [told, PairProven("p0.x")]
        else:
            assert effects == [told, TellSender("p0.x", AskProbe(next_number, group + 1))]
            assert rig.probes.state("p0.x") is S.ASKED
            assert rig.probes.outcomes == {}
            # What is said of the group before changes nothing.
            assert rig.probes.received("p0.x", ProbeReady(number, 900, KNOWN)) == []
            assert rig.probes.digested(read.read_id, {read.local_block: KNOWN}) == []
            number = next_number
    assert rig.probes.outcomes == {("p0", "passed"): 1}
    assert rig.probes.link_lost(P0, TransferCause.PEER_GONE, "") == []
    assert rig.probes.link_up(P0, num_groups=3) == [], "one proof is enough"


@pytest.mark.parametrize("digest", [OTHER, BEFORE])
def test_a_later_group_whose_bytes_do_not_arrive_fails_the_pair(rig: Rig, digest: int) -> None:
    rig.probes.link_up(P0, num_groups=2)
    rig.probes.connected("p0.x")
    rig.end(only(ReadProbe, rig.probes.received("p0.x", ProbeReady(1, 900, KNOWN))))
    read = only(ReadProbe, rig.probes.received("p0.x", ProbeReady(2, 900, KNOWN)))
    assert result(rig.end(read, digest)).fault is ProbeFault.WRONG_BYTES
    assert rig.probes.state("p0.x") is S.FAILED
    rig.sender_ends_link()
    assert rig.probes.objection("p0.x") is not None


def test_a_later_group_of_which_nothing_is_heard_times_out(rig: Rig) -> None:
    rig.probes.link_up(P0, num_groups=2)
    rig.probes.connected("p0.x")
    rig.tick(4)
    rig.end(only(ReadProbe, rig.probes.received("p0.x", ProbeReady(1, 900, KNOWN))))
    assert rig.tick(4) == []
    assert result(rig.tick()).fault is ProbeFault.TIMED_OUT


@pytest.mark.parametrize("digest_first", [False, True])
def test_a_sender_is_used_once_its_bytes_are_there_and_compared(rig: Rig, digest_first: bool) -> None:
    read = rig.start()
    assert (read.incarnation, read.local_block, read.remote_block) == ("p0.x", 100, 900)
    rig.probes.filled(read.read_id, {1: BEFORE})
    ends: list[Callable[[], list[ProbeEffect]]] = [
        lambda: rig.probes.read_done(read.read_id),
        lambda: rig.probes.digested(read.read_id, {100: KNOWN}),
    ]
    first, last = reversed(ends) if digest_first else ends
    assert first() == []
    assert rig.probes.awaits_digest == (not digest_first)
    assert last() == [TellSender("p0.x", ProbeResult(1, KNOWN)), PairProven("p0.x")]
    assert rig.probes.state("p0.x") is S.PASSED
    assert (rig.probes.failures(), rig.probes.next_tick_s(), rig.probes.awaits_digest) == ([], None, False)
    assert rig.probes.outcomes == {("p0", "passed"): 1}


def test_reads_at_the_same_time_have_blocks_and_bytes_of_their_own(rig: Rig) -> None:
    reads = [rig.start(P0), rig.start(P1)]
    assert [(read.local_block, read.seed) for read in reads] == [(100, "d0.x/nonce-0"), (101, "d0.x/nonce-1")]


def test_memory_may_be_connected_after_the_bytes_are_ready(rig: Rig) -> None:
    rig.probes.link_up(P0)
    assert rig.probes.received("p0.x", ProbeReady(1, 900, KNOWN)) == []
    assert only(ReadProbe, rig.probes.connected("p0.x")).remote_block == 900


def test_a_pair_is_probed_once(rig: Rig) -> None:
    rig.end(rig.start())
    rig.probes.link_lost(P0, TransferCause.PEER_GONE, "cut")
    assert rig.probes.link_up(P0) == []
    assert rig.probes.connected("p0.x") == [PairProven("p0.x")]
    assert rig.probes.next_tick_s() is None
    # Another incarnation is another pair, and so is one whose memory was dropped.
    assert isinstance(only(TellSender, rig.probes.link_up(replace(P0, incarnation="p0.y"))).message, AskProbe)
    rig.probes.link_lost(P0, TransferCause.PEER_GONE, "cut")
    rig.probes.disconnected("p0.x")
    assert isinstance(only(TellSender, rig.probes.link_up(P0)).message, AskProbe)


# What fails.


@dataclass(frozen=True)
class ReadFault:
    """What a read brings instead of the bytes, and what comes of it."""

    brings: Callable[[Rig, ReadProbe], list[ProbeEffect]]
    fault: ProbeFault
    words: str
    digest: int = 0
    """The digest that the sender is told; 0 where none was computed."""
    abandons: bool = False
    """Whether the read is still in flight, and is given up."""


FAULTS = {
    "other bytes": ReadFault(
        lambda rig, read: rig.end(read, OTHER), ProbeFault.WRONG_BYTES, "other bytes arrived", digest=OTHER
    ),
    "the bytes that were there": ReadFault(
        lambda rig, read: rig.end(read, BEFORE), ProbeFault.WRONG_BYTES, "brought nothing", digest=BEFORE
    ),
    "no bytes": ReadFault(
        lambda rig, read: rig.tick(5),
        ProbeFault.TIMED_OUT,
        "did not arrive within 5 s",
        abandons=True,
    ),
    "a stall": ReadFault(
        lambda rig, read: rig.probes.read_stalled(read.read_id, "a stall"),
        ProbeFault.TIMED_OUT,
        "a stall",
        abandons=True,
    ),
    "a refusal": ReadFault(
        lambda rig, read: rig.probes.read_failed(read.read_id, TransferCause.REFUSED, "NIXL refused"),
        ProbeFault.READ_FAILED,
        "NIXL refused",
    ),
    "a closed data port": ReadFault(
        lambda rig, read: rig.probes.read_failed(read.read_id, TransferCause.PEER_GONE, "disconnected"),
        ProbeFault.READ_FAILED,
        "disconnected",
    ),
    "no digest": ReadFault(
        lambda rig, read: [*rig.probes.read_done(read.read_id), *rig.probes.failed(read.read_id, "no digest")],
        ProbeFault.READ_FAILED,
        "no digest",
    ),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_a_read_that_brings_anything_else_fails_the_probe(rig: Rig, case: ReadFault) -> None:
    read = rig.start()
    effects = case.brings(rig, read)
    assert (AbandonRead(read.read_id) in effects) == case.abandons
    told = result(effects)
    assert (told.fault, told.digest, case.words in told.detail) == (case.fault, case.digest, True)
    # The condition is there when the sender has ended the link.
    assert only(ReportFailure, rig.sender_ends_link()).count == 1
    (failed,) = rig.probes.failures()
    assert (failed.peer, failed.fault, failed.count) == ("p0", case.fault, 1)
    assert "d0 could not read known bytes of p0 (p0.x)" in failed.detail
    objection = rig.probes.objection("p0.x")
    assert objection is not None
    assert objection.cause is TransferCause.PROBE_FAILED
    assert rig.probes.objection("p1.x") is None


def test_a_read_of_which_nothing_arrives_is_not_given_up_before_its_time(rig: Rig) -> None:
    rig.start()
    assert rig.tick(4) == []
    assert result(rig.tick()).fault is ProbeFault.TIMED_OUT


@pytest.mark.parametrize("connected", [True, False])
def test_a_probe_whose_read_can_not_begin_times_out(rig: Rig, connected: bool) -> None:
    if connected:
        rig.ask()
    else:
        rig.probes.link_up(P0)
        rig.probes.received("p0.x", ProbeReady(1, 900, KNOWN))
    assert rig.tick(4) == []
    told = result(rig.tick())
    assert told.fault is ProbeFault.TIMED_OUT
    missing = "it did not provide them within 5 s" if connected else "did not connect to their memory within 5 s"
    assert missing in told.detail


def test_a_node_without_probe_blocks_says_so(rig: Rig) -> None:
    rig.probes.local_blocks = ()
    told = result(rig.probes.received("p0.x", ProbeReady(rig.ask(), 900, KNOWN)))
    assert (told.fault, "d0 has no probe blocks" in told.detail) == (ProbeFault.READ_FAILED, True)


def test_memory_that_cant_be_connected_fails_the_probe(rig: Rig) -> None:
    rig.probes.link_up(P0)
    refused = TransferFailed(TransferCause.REFUSED, "NIXL refused to connect")
    told = result(rig.probes.connect_failed("p0.x", refused))
    assert (told.fault, told.digest) == (ProbeFault.READ_FAILED, 0)
    assert "NIXL refused to connect" in told.detail
    # What is no matter of the way of the bytes refuses the link, and so does all that happens to a proven pair.
    mismatch = TransferFailed(TransferCause.LAYOUT_MISMATCH, "blocks differ")
    rig.probes.link_up(P1)
    assert rig.probes.connect_failed("p1.x", mismatch) == [EndLink("p1.x", mismatch)]
    rig.end(rig.start(replace(P1, incarnation="p1.y")))
    assert rig.probes.connect_failed("p1.y", refused) == [EndLink("p1.y", refused)]
    assert rig.probes.connect_failed("p9.x", refused) == [EndLink("p9.x", refused)]


def test_a_sender_that_finds_a_fault_in_a_passed_probe_is_believed(rig: Rig) -> None:
    rig.end(rig.start())
    rig.sender_ends_link()
    (failed,) = rig.probes.failures()
    assert (failed.fault, failed.detail) == (ProbeFault.WRONG_BYTES, "the sender's words")
    assert isinstance(only(TellSender, rig.probes.link_up(P0)).message, AskProbe)


def test_a_link_that_its_sender_does_not_end_is_ended(rig: Rig) -> None:
    rig.end(rig.start(), OTHER)
    ended = only(EndLink, rig.tick())
    assert (ended.incarnation, ended.error.cause) == ("p0.x", TransferCause.PROBE_FAILED)


def test_a_sender_that_dies_has_not_failed_its_probe(rig: Rig) -> None:
    read = rig.start()
    rig.probes.read_failed(read.read_id, TransferCause.PEER_GONE, "disconnected")
    assert rig.probes.link_lost(P0, TransferCause.PEER_GONE, "connection reset") == []
    assert rig.probes.failures() == []
    rig.start(P1)
    rig.probes.link_lost(P1, TransferCause.PEER_GONE, "connection reset")
    assert rig.probes.failures() == []


def test_a_sender_whose_event_loop_is_busy_is_given_time(rig: Rig) -> None:
    rig.ask()
    for _ in range(TIMES.max_spared):
        assert rig.tick(4) == []
        rig.probes.spared("p0.x")
    assert rig.tick(4) == []
    rig.probes.spared("p0.x")
    rig.probes.spared("p9.x")
    # It was spared often enough.
    assert result(rig.tick()).fault is ProbeFault.TIMED_OUT


# After a failure.


def fail(rig: Rig, source: Peer = P0) -> list[ProbeEffect]:
    rig.end(rig.start(source), OTHER)
    return rig.sender_ends_link(source)


def test_a_pair_is_probed_again_after_pauses_that_double(rig: Rig) -> None:
    pauses = []
    for _ in range(1100):
        fail(rig)
        pause = rig.probes.next_tick_s()
        assert pause is not None
        pauses.append(pause)
        rig.clock.advance(pause)
        assert rig.probes.tick() == [ProbeAgain(P0)]
        assert rig.probes.next_tick_s() is None
    assert pauses == [1.0, 2.0, 4.0] + [8.0] * 1097
    assert rig.probes.failures()[0].count == 1100


def test_requests_are_refused_until_a_probe_passes(rig: Rig) -> None:
    fail(rig)
    rig.tick()
    read = rig.start()
    assert rig.probes.objection("p0.x") is not None
    rig.end(read)
    assert rig.probes.objection("p0.x") is None
    assert rig.probes.failures() == []


def test_a_condition_goes_with_its_sender(rig: Rig) -> None:
    fail(rig, P0)
    rig.probes.link_lost(P0, TransferCause.PEER_GONE, "nobody listens")
    assert (rig.probes.failures(), rig.probes.next_tick_s()) == ([], None)
    fail(rig, P1)
    rig.end(rig.start(replace(P1, incarnation="p1.y")))
    assert rig.probes.failures() == []


def test_a_failed_sender_is_probed_again_though_its_memory_was_disconnected(rig: Rig) -> None:
    fail(rig)
    rig.probes.disconnected("p0.x")
    assert rig.probes.objection("p0.x") is not None
    assert rig.tick() == [ProbeAgain(P0)]
    # Its count goes on, until its process is gone.
    assert only(ReportFailure, fail(rig)).count == 2
    rig.probes.sender_gone("p0.x")
    assert (rig.probes.failures(), rig.probes.next_tick_s()) == ([], None)


def test_no_count_and_no_pause_is_lost_however_many_senders_fail(rig: Rig) -> None:
    sources = [Peer(f"p{number}", f"p{number}.x", "h:1") for number in range(70)]
    for _ in range(2):
        for source in sources:
            fail(rig, source)
    assert all(rig.probes.objection(source.incarnation) is not None for source in sources)
    # The third pause is four seconds for each of them.
    assert [only(ReportFailure, fail(rig, source)).count for source in sources] == [3] * 70
    assert rig.probes.next_tick_s() == 4.0
    # Operators are shown a bounded number of them.
    assert [failed.peer for failed in rig.probes.failures()] == [source.node_id for source in sources[:64]]


# Reads that outlive their probes, and several probes at once.


def test_a_late_read_keeps_no_other_sender_from_being_probed(rig: Rig) -> None:
    stuck = [rig.start(Peer(f"p{n}", f"p{n}.x", "h:1")) for n in range(2)]
    number = rig.ask(Peer("p2", "p2.x", "h:1"))
    assert rig.probes.received("p2.x", ProbeReady(number, 900, KNOWN)) == []
    # As soon as one of those before it is given up, its block is used, though its read may still write.
    read = only(ReadProbe, rig.tick(5))
    assert read.incarnation == "p2.x"
    assert read.local_block in {each.local_block for each in stuck}
    assert PairProven("p2.x") in rig.end(read)


def test_a_probe_that_begins_in_a_tick_has_the_whole_time_after_it(rig: Rig) -> None:
    for n in range(2):
        rig.start(Peer(f"p{n}", f"p{n}.x", "h:1"))
    last = Peer("p2", "p2.x", "h:1")
    rig.probes.received("p2.x", ProbeReady(rig.ask(last), 900, KNOWN))
    assert only(ReadProbe, rig.tick(5)).incarnation == "p2.x"
    effects = rig.tick(4)
    assert not [each for each in effects if isinstance(each, TellSender) and each.incarnation == "p2.x"]
    assert result(rig.tick()).fault is ProbeFault.TIMED_OUT


def test_requests_wait_for_a_probe_block_as_long_as_for_a_probe(rig: Rig) -> None:
    def known(number: int) -> Peer:
        return Peer(f"p{number}", f"p{number}.x", "h:1")

    for number in range(6):
        rig.probes.received(f"p{number}.x", ProbeReady(rig.ask(known(number)), 900, KNOWN))
    # The bytes of the first ones, two at a time, don't come.
    assert rig.tick(4) == []
    assert rig.probes.objection("p5.x") is None
    effects = rig.tick()
    assert [each.incarnation for each in effects if isinstance(each, ReadProbe)] == ["p2.x", "p3.x"]
    refused = [each for each in effects if isinstance(each, RefuseWaiting)]
    assert [each.incarnation for each in refused] == ["p4.x", "p5.x"]
    assert {each.error.cause for each in refused} == {TransferCause.PROBE_FAILED}
    assert refused[1].error.detail == (
        "d0 reads known bytes of other nodes, and has no probe block left for those of p5 (p5.x)"
    )
    assert str(rig.probes.objection("p5.x")) == str(refused[1].error)
    # They have not failed, and requests wait for them as soon as they are read.
    assert rig.probes.objection("p2.x") is None
    effects = rig.tick(5)
    assert [each.incarnation for each in effects if isinstance(each, ReadProbe)] == ["p4.x", "p5.x"]
    assert rig.probes.objection("p5.x") is None


def test_senders_that_have_failed_before_are_probed_after_the_others(rig: Rig) -> None:
    fail(rig, P0)
    rig.tick()
    stuck = [Peer(f"p{number}", f"p{number}.x", "h:1") for number in (2, 3)]
    for source in [*stuck, P0, P1]:
        rig.probes.received(source.incarnation, ProbeReady(rig.ask(source), 900, KNOWN))
    rig.probes.link_lost(stuck[0], TransferCause.PEER_GONE, "cut")
    assert rig.probes.state("p1.x") is S.READING
    assert rig.probes.state("p0.x") is S.WAITING


def test_a_sender_has_one_read_at_most(rig: Rig) -> None:
    late = rig.start()
    rig.tick(5)
    rig.sender_ends_link()
    number = rig.ask()
    assert rig.probes.received("p0.x", ProbeReady(number, 900, KNOWN)) == []
    # Once it has ended, whatever it brought, a new one is started.
    read = only(ReadProbe, rig.probes.read_done(late.read_id))
    assert read.read_id != late.read_id
    assert PairProven("p0.x") in rig.end(read)


def test_a_probe_behind_a_read_that_never_ends_times_out(rig: Rig) -> None:
    rig.start()
    rig.tick(5)
    rig.sender_ends_link()
    number = rig.ask()
    rig.probes.received("p0.x", ProbeReady(number, 900, KNOWN))
    assert (
        "an earlier read of them still runs"
        in result([effect for effect in rig.tick(5) if not isinstance(effect, ProbeAgain)]).detail
    )


def test_a_link_that_ends_under_a_read_leaves_it_late(rig: Rig) -> None:
    late = rig.start()
    rig.probes.link_lost(P0, TransferCause.PEER_GONE, "cut")
    number = rig.ask()
    assert rig.probes.received("p0.x", ProbeReady(number, 900, KNOWN)) == []
    assert only(ReadProbe, rig.probes.read_failed(late.read_id, TransferCause.CANCELLED, "")).incarnation == "p0.x"


def test_late_and_foreign_messages_change_nothing(rig: Rig) -> None:
    read = rig.start()
    assert rig.probes.received("p0.x", ProbeReady(1, 7, OTHER)) == []
    assert rig.probes.received("p0.x", ProbeReady(9, 7, OTHER)) == []
    assert rig.probes.received("p9.x", ProbeReady(1, 7, OTHER)) == []
    assert rig.probes.read_done(-77) == []
    assert rig.probes.digested(-77, {7: 7}) == []
    assert rig.probes.failed(-77, "") == []
    assert rig.probes.counters == {"ProbeReady_unknown": 3, "read_unknown": 3}
    assert PairProven("p0.x") in rig.end(read)
