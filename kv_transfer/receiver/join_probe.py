"""The reader's side of join probes: before a sender is used for requests, a block of known bytes is read from it.

Pure: a clock and chance go in, effects come out. The states are in `probe_values`.

The rules that it keeps:

1. No request gets KV over a pair of incarnations before a probe of it has passed (`PairProven`). One is enough: later
   links of the same two incarnations are used without. Where a node is in parts, it is one for each group of layers,
   one after the other: two parts may have layers of one group alone in common.
2. A probe goes the way of requests: the same memory, descriptors, mover and window. It touches probe blocks alone.
3. The known bytes can't be there before they are read. The sender makes new ones, the reader fills its own block with
   others first, and it learns the digest alone. Both compare: the reader says what it read.
4. Every wait is bounded while the link lives: a probe of which nothing is heard for `max_quiet_ticks` ticks has timed
   out. A tick counts for a probe that was waited for during the whole interval before it, and counts once however late
   it is, so that a process that was itself stopped hears what came meanwhile before it judges. A sender whose loop is
   busy counts as heard whenever its link spares it. A dead or stopped sender ends its link, which ends the probe and is
   no failure of it. The wait for a probe block ends with the probes that have them: n senders whose bytes don't come
   hold up the others for n divided by the number of blocks, times the time of a probe. Those that have failed before
   come after the others, and requests don't wait for a block longer than for a probe: they are refused.
5. A read that was started is never taken back. It may write to its probe block whenever it likes: that can make the
   probe fail that uses the block then, and none pass. A sender has one such read at most.
6. The block that is read last and is right is read a few times more, without a digest: the quickest read gives the rate
   of the pair (`pair_rates.py`). The sender is told only then, since it may make no progress afterwards.
7. After a failure both nodes show the condition, requests for the pair are refused at once, and the pair is probed
   again after a pause that doubles. The condition goes when a probe passes, or the sender is gone.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from baton.clock import Clock
from baton.errors import TransferCause, TransferFailed
from baton.machine import Machine
from baton.messages.ids import Peer
from baton.messages.node_report import FailedProbe, ProbeFault
from kv_transfer.link.failures import FailedProbes, count_outcome
from kv_transfer.link.link_messages import AskProbe, ProbeReady, ProbeResult
from kv_transfer.receiver.block_map import BlockMap
from kv_transfer.receiver.pair_rates import PairRates, ReadTiming
from kv_transfer.receiver.probe_values import (
    PROBE_TABLE,
    EndLink,
    PairProven,
    Probe,
    ProbeAgain,
    ProbeEffect,
    ProbeEvent,
    ProbeState,
    ProbeTimes,
    ReadProbe,
    RefuseWaiting,
    ReportFailure,
    ReportSlow,
)
from kv_transfer.receiver.transfer_values import AbandonRead, TellSender


class JoinProbes:
    """The probes of one reader: one for each link. Every method returns at once with the effects, in order."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        clock: Clock,
        times: ProbeTimes | None = None,
        new_nonce: Callable[[], str] = secrets.token_hex,
        memory_kind: str = "",
    ) -> None:
        """`new_nonce`: returns text that it never returned before, and that nobody can guess. `memory_kind`: of this
        node's blocks, DRAM or VRAM."""
        self._node_id = node_id
        self._incarnation = incarnation
        self._clock = clock
        self._times = times or ProbeTimes()
        self._new_nonce = new_nonce
        self.local_blocks: Sequence[int] = ()
        """The ids of this node's probe blocks."""
        self._probes: dict[str, Probe] = {}
        """The probe on each link, by the sender's incarnation."""
        self._proven: set[str] = set()
        """Incarnations that passed and may be read again."""
        self._late_reads: dict[int, Probe] = {}
        """Reads that still run though their probe has failed, by id."""
        self._failed = FailedProbes(clock)
        """The failures of senders that live: `link_lost` and `sender_gone` forget the others."""
        self._again: dict[str, tuple[Peer, float]] = {}
        """When to probe each failed sender again, by incarnation."""
        self._last_number = 0
        self.rates = PairRates(node_id, memory_kind)
        """Those of senders whose memory is connected and proven."""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Probes that ended, by sender and outcome: "passed", or the fault."""
        self.counters: Counter[str] = Counter()
        """Messages and events that changed nothing, by kind."""

    # What the link and the mover did.

    def link_up(
        self, source: Peer, block_map: BlockMap | None = None, num_groups: int = 1, memory_kind: str = ""
    ) -> list[ProbeEffect]:
        """A link to this sender is up; its memory, of that kind, is being connected. `block_map`: None for equal block
        sizes. `num_groups`: how many groups of layers are to be probed."""
        self._last_number += 1
        machine = Machine(f"probe of {source.incarnation}", ProbeState.ASKED, PROBE_TABLE)
        probe = Probe(source, self._last_number, machine, block_map or BlockMap(), num_groups, memory_kind)
        self._probes[source.incarnation] = probe
        self._heard(probe)
        if source.incarnation in self._proven:
            return []
        return [TellSender(source.incarnation, AskProbe(self._last_number))]

    def connected(self, incarnation: str) -> list[ProbeEffect]:
        """The sender's memory is connected."""
        probe = self._probes.get(incarnation)
        if probe is None:
            return []
        if incarnation in self._proven:
            return [PairProven(incarnation)]
        probe.is_connected = True
        return self._start_waiting()

    def connect_failed(self, incarnation: str, error: TransferFailed) -> list[ProbeEffect]:
        """The transfer agent can't connect to the sender's memory."""
        probe = self._probes.get(incarnation)
        is_open = probe is not None and probe.state in (ProbeState.ASKED, ProbeState.WAITING)
        if probe is None or not is_open or incarnation in self._proven or error.cause is TransferCause.LAYOUT_MISMATCH:
            return [EndLink(incarnation, error)]
        probe.may_be_gone = error.cause is TransferCause.PEER_GONE
        return self._fail(probe, ProbeFault.READ_FAILED, error.detail)

    def received(self, incarnation: str, ready: ProbeReady) -> list[ProbeEffect]:
        """The sender has put known bytes into a probe block."""
        probe = self._probes.get(incarnation)
        if probe is None or ready.probe != probe.number or not probe.machine.accepts(ProbeEvent.READY):
            self.counters["ProbeReady_unknown"] += 1
            return []
        probe.machine.feed(ProbeEvent.READY)
        probe.remote_block, probe.known_digest = ready.block, ready.digest
        self._heard(probe)
        return self._start_waiting()

    def spared(self, incarnation: str) -> None:
        """The sender has sent nothing for some time, and its process runs: its event loop is busy."""
        probe = self._probes.get(incarnation)
        if probe is not None and probe.num_spared < self._times.max_spared:
            probe.num_spared += 1
            self._heard(probe)

    def filled(self, read_id: int, digests: Mapping[int, int]) -> list[ProbeEffect]:
        """The local block of a read was filled before it. `digests`: of its last part, by the number of parts."""
        probe = self._reading(read_id)
        if probe is not None:
            probe.digest_before = digests.get(probe.sizes.reader_parts)
        return []

    def read_done(self, read_id: int, num_bytes: int = 0, seconds: float = 0.0, lane: str = "") -> list[ProbeEffect]:
        """All bytes of a read are here, and none of it writes any more. `lane`: the transport, if it is known; with 0
        bytes nothing is measured."""
        if self._late_reads.pop(read_id, None) is not None:
            return self._start_waiting()
        probe = self._reading(read_id)
        if probe is None:
            return []
        probe.is_read = True
        self._heard(probe)
        probe.timing.took(num_bytes, seconds, lane)
        return self._pass(probe) if probe.is_right else self._compare(probe)

    def digested(self, read_id: int, digests: Mapping[int, int]) -> list[ProbeEffect]:
        """The digest of what a read brought is known, maybe before `read_done`."""
        probe = self._reading(read_id)
        if probe is None:
            return []
        probe.digest = digests[(probe.local_block + 1) * probe.sizes.reader_parts - 1]
        self._heard(probe)
        return self._compare(probe)

    def read_failed(self, read_id: int, cause: TransferCause, detail: str) -> list[ProbeEffect]:
        """A read brought nothing, and none of it writes any more."""
        if self._late_reads.pop(read_id, None) is not None:
            return self._start_waiting()
        probe = self._reading(read_id)
        if probe is None:
            return []
        # Its read has ended, so nothing is left to wait for.
        probe.is_read, probe.may_be_gone = True, cause is TransferCause.PEER_GONE
        return self._fail(probe, ProbeFault.READ_FAILED, detail)

    def failed(self, read_id: int, detail: str) -> list[ProbeEffect]:
        """The local block could not be filled, or what was read could not be digested."""
        probe = self._reading(read_id)
        return [] if probe is None else self._fail(probe, ProbeFault.READ_FAILED, detail)

    def read_stalled(self, read_id: int, detail: str) -> list[ProbeEffect]:
        """The bytes don't come; the read may still write."""
        probe = self._reading(read_id)
        return [] if probe is None else self._fail(probe, ProbeFault.TIMED_OUT, detail)

    def link_lost(self, source: Peer, cause: TransferCause, detail: str) -> list[ProbeEffect]:
        """The link ended, or did not open. The cause is PROBE_FAILED if its sender ended it because of the probe."""
        incarnation = source.incarnation
        probe = self._probes.pop(incarnation, None)
        is_failed = probe is not None and probe.state is ProbeState.FAILED
        if probe is not None and probe.state is ProbeState.READING and not probe.is_read:
            self._late_reads[probe.read_id] = probe
        if not (is_failed or cause is TransferCause.PROBE_FAILED) or (
            probe is not None and probe.may_be_gone and cause is TransferCause.PEER_GONE
        ):
            # It is gone, or can't be told from one that is; should it be back, it is probed with the next link.
            self._failed.forget(incarnation)
            self._again.pop(incarnation, None)
            return self._start_waiting()
        self._proven.discard(incarnation)
        # The sender, which compares too, may find a fault in a probe that passed here.
        has_passed = probe is not None and probe.state is ProbeState.PASSED
        fault = (probe and probe.fault) or (ProbeFault.WRONG_BYTES if has_passed else ProbeFault.READ_FAILED)
        reason = (probe and probe.detail) or detail
        count = self._failed.failed(incarnation, source.node_id, fault, reason)
        pause_s = min(self._times.first_pause_s * 2.0 ** min(count - 1, 16), self._times.max_pause_s)
        self._again[incarnation] = (source, self._clock.monotonic() + pause_s)
        count_outcome(self.outcomes, source.node_id, fault.value)
        return [ReportFailure(reason, count), *self._start_waiting()]

    def disconnected(self, incarnation: str) -> None:
        """The sender's memory is disconnected: the next link to it needs a probe. One that has failed stays due."""
        self._proven.discard(incarnation)
        self.rates.forget(incarnation)

    def sender_gone(self, incarnation: str) -> None:
        """The sender's process has ended, and its memory is disconnected."""
        self.disconnected(incarnation)
        self._failed.forget(incarnation)
        self._again.pop(incarnation, None)

    # Time.

    def next_tick_s(self) -> float | None:
        """In how many seconds `tick` is to be called; None: not before something else happens."""
        waited_for = [probe.next_tick_at for probe in self._probes.values() if self._is_waited_for(probe)]
        due = min([*waited_for, *(at for _, at in self._again.values())], default=None)
        return None if due is None else max(0.0, due - self._clock.monotonic())

    def tick(self) -> list[ProbeEffect]:
        """Give up what takes too long, and probe again what is due."""
        effects: list[ProbeEffect] = []
        now = self._clock.monotonic()
        for probe in list(self._probes.values()):
            if self._is_waited_for(probe) and probe.next_tick_at <= now:
                probe.next_tick_at = now + self._times.tick_s
                effects += self._tick(probe)
        due = [source for source, at in self._again.values() if at <= now]
        for source in due:
            del self._again[source.incarnation]
        return [*effects, *map(ProbeAgain, due)]

    def _tick(self, probe: Probe) -> list[ProbeEffect]:
        if probe.state is ProbeState.FAILED:
            return [EndLink(probe.source.incarnation, TransferFailed(TransferCause.PROBE_FAILED, probe.detail))]
        probe.quiet_ticks += 1
        if probe.quiet_ticks < self._times.max_quiet_ticks:
            return []
        if self._waits_for_others(probe):
            objection = self.objection(probe.source.incarnation)
            return [] if objection is None else [RefuseWaiting(probe.source.incarnation, objection)]
        what = {
            ProbeState.ASKED: "it did not provide them",
            ProbeState.WAITING: "an earlier read of them still runs"
            if self._has_late_read(probe)
            else "the transfer agent did not connect to their memory",
            ProbeState.READING: "they did not arrive",
        }[probe.state]
        within = f"within {self._times.max_quiet_ticks * self._times.tick_s:g} s"
        return self._fail(probe, ProbeFault.TIMED_OUT, f"{what} {within}")

    # What others may know.

    def objection(self, incarnation: str) -> TransferFailed | None:
        """Why requests get no KV from this sender: its last probe failed, or can't begin. None: they do, or wait for
        the first one."""
        detail, probe = self._failed.detail(incarnation), self._probes.get(incarnation)
        if detail is None and probe is not None and self._is_held_up(probe):
            detail = (
                f"{self._node_id} reads known bytes of other nodes, and has no probe block left for those of "
                f"{probe.source.node_id} ({incarnation})"
            )
        return None if detail is None else TransferFailed(TransferCause.PROBE_FAILED, detail)

    def failures(self) -> list[FailedProbe]:
        """The latest failure of each sender; the pair that began to fail first comes first."""
        return self._failed.shown()

    @property
    def awaits_digest(self) -> bool:
        """Whether a probe would end if the digest of what it has read were known."""
        return any(p.state is ProbeState.READING and p.is_read for p in self._probes.values())

    def state(self, incarnation: str) -> ProbeState | None:
        """The state of the probe on a sender's link; None: it has no link."""
        probe = self._probes.get(incarnation)
        return probe.state if probe is not None else None

    # From the known bytes to the verdict.

    def _is_waited_for(self, probe: Probe) -> bool:
        return probe.state is not ProbeState.PASSED and probe.source.incarnation not in self._proven

    def _heard(self, probe: Probe) -> None:
        """Begin to count the ticks of a probe anew, since something happened to it."""
        probe.quiet_ticks, probe.next_tick_at = 0, self._clock.monotonic() + self._times.tick_s

    def _reading(self, read_id: int) -> Probe | None:
        for probe in self._probes.values():
            if probe.read_id == read_id and probe.state is ProbeState.READING:
                return probe
        self.counters["read_unknown"] += 1
        return None

    def _waits_for_others(self, probe: Probe) -> bool:
        """Whether all that it waits for is a probe block: those before it end soon, each by its own ticks."""
        return probe.state is ProbeState.WAITING and probe.is_connected and not self._has_late_read(probe)

    def _is_held_up(self, probe: Probe) -> bool:
        """Whether it has waited for a probe block as long as a probe may take."""
        return self._waits_for_others(probe) and probe.quiet_ticks >= self._times.max_quiet_ticks

    def _has_late_read(self, probe: Probe) -> bool:
        return self.reads_go_on(probe.source.incarnation)

    def _start_waiting(self) -> list[ProbeEffect]:
        """Start every probe that can be read now, in the order in which their links came up; those of senders that have
        failed come last."""
        effects: list[ProbeEffect] = []
        for probe in sorted(self._probes.values(), key=lambda p: self._failed.detail(p.source.incarnation) is not None):
            if probe.state is ProbeState.WAITING and probe.is_connected and not self._has_late_read(probe):
                effects += self._start(probe)
        return effects

    def reads_go_on(self, incarnation: str) -> bool:
        """Whether a read from this sender still runs though its probe has failed."""
        return any(probe.source.incarnation == incarnation for probe in self._late_reads.values())

    def _start(self, probe: Probe) -> list[ProbeEffect]:
        if not self.local_blocks:
            return self._fail(probe, ProbeFault.READ_FAILED, f"{self._node_id} has no probe blocks")
        busy = {reading.local_block for reading in self._probes.values() if reading.state is ProbeState.READING}
        late = Counter(read.local_block for read in self._late_reads.values())
        free = [block for block in self.local_blocks if block not in busy]
        if not free:
            return []
        probe.machine.feed(ProbeEvent.START)
        probe.local_block = min(free, key=lambda block: late[block])
        probe.read_id = -probe.number
        self._heard(probe)
        seed = f"{self._incarnation}/{self._new_nonce()}"
        incarnation, parts = probe.source.incarnation, (probe.sizes.reader_parts, probe.sizes.sender_parts)
        where = (probe.local_block, probe.remote_block)
        probe.order = ReadProbe(probe.read_id, incarnation, *where, seed, *parts, probe.group)
        return [probe.order]

    def _compare(self, probe: Probe) -> list[ProbeEffect]:
        """End a probe whose bytes and digest are here."""
        if not probe.is_read or probe.digest is None:
            return []
        if probe.digest == probe.digest_before:
            return self._fail(probe, ProbeFault.WRONG_BYTES, "the read reported success and brought nothing")
        if probe.digest != probe.known_digest:
            return self._fail(probe, ProbeFault.WRONG_BYTES, "other bytes arrived")
        if probe.group + 1 < probe.num_groups:
            return [self._tell_digest(probe), self._ask_next_group(probe), *self._start_waiting()]
        probe.is_right = True
        return self._pass(probe)

    def _pass(self, probe: Probe) -> list[ProbeEffect]:
        """End a probe whose bytes are right, once its reads are timed."""
        if probe.timing.wants_more and probe.order is not None:
            probe.is_read = False
            return [replace(probe.order, seed="")]
        incarnation, node_id = probe.source.incarnation, probe.source.node_id
        probe.machine.feed(ProbeEvent.MATCH)
        self._proven.add(incarnation)
        self._failed.passed(incarnation, node_id)
        self._again.pop(incarnation, None)
        count_outcome(self.outcomes, node_id, "passed")
        why_slow = self.rates.measured(incarnation, node_id, probe.memory_kind, probe.timing)
        slow = [ReportSlow(why_slow)] if why_slow else []
        return [self._tell_digest(probe), PairProven(incarnation), *slow, *self._start_waiting()]

    def _tell_digest(self, probe: Probe) -> TellSender:
        return TellSender(probe.source.incarnation, ProbeResult(probe.number, probe.digest or 0))

    def _ask_next_group(self, probe: Probe) -> TellSender:
        """Ask for known bytes again, to be read as a block of the next group of layers."""
        probe.machine.feed(ProbeEvent.NEXT_GROUP)
        self._last_number += 1
        probe.number, probe.group = self._last_number, probe.group + 1
        probe.read_id, probe.is_read, probe.digest, probe.digest_before = 0, False, None, None
        probe.timing = ReadTiming()
        self._heard(probe)
        return TellSender(probe.source.incarnation, AskProbe(probe.number, probe.group))

    def _fail(self, probe: Probe, fault: ProbeFault, what: str) -> list[ProbeEffect]:
        """End a probe: the sender is told, and ends the link."""
        source, effects = probe.source, list[ProbeEffect]()
        probe.fault = fault
        probe.detail = f"{self._node_id} could not read known bytes of {source.node_id} ({source.incarnation}): {what}"
        if probe.state is ProbeState.READING and not probe.is_read:
            self._late_reads[probe.read_id] = probe
            effects.append(AbandonRead(probe.read_id))
        probe.machine.feed(ProbeEvent.FAIL)
        self._heard(probe)
        result = ProbeResult(probe.number, probe.digest or 0, fault, probe.detail)
        return [*effects, TellSender(source.incarnation, result), *self._start_waiting()]
