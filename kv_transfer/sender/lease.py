"""The sender's side of a hand-off: what was promised to whom, and until when. Pure: a clock in, effects out.

Rules that it keeps:

1. A block that was offered is not reused while a one-sided read of it may run. The engine keeps the blocks; the book
   says `Released` exactly once for each ended request, and never before the lease is over.
2. `ReadConfirmed(held=True)` is said only while the lease is alive and its promise was kept, and ends it. Whoever asks
   later, or asks for what it did not subscribe to, hears False. So a reader that was stopped, cut off or late never
   uses what it read. `PartConfirmed` is said on the same terms of what was read so far, and ends nothing.
3. Before anybody subscribed an offer has a deadline only once its prompt is computed (until then the request itself
   holds the blocks), and only if nobody expects it: a reader that is merely queued is not dead, and the life of its
   link is the bound. From the subscription on the reader's heartbeats renew it. Nor has a reader a deadline whose
   request has not come or not begun here, which may be queued as well: such a wait ends when the request comes or is
   withdrawn, when the reader abandons it (its own request has ended), or with the reader's link.
4. A reader that can't be heard any more is SUSPECT, not gone: its reads may still run. The grace after its link's end
   bounds that, and `suspect_s` while the link lives. A read that outlives either can hurt the reader's own blocks
   alone, and rule 2 covers those.
5. While a reader says that reads of it go on, the transfer agent makes progress, leases or not: otherwise those reads
   would never end, and their reader could never use the blocks that they write to.
6. Late, duplicate and unknown messages change nothing and are counted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.deadlines import Deadlines
from baton.errors import TransferCause
from baton.machine import Machine
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import NULL_BLOCK
from baton.messages.node_report import HandoffSide, OpenHandoff
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import (
    Abandon,
    Begun,
    Closing,
    ConfirmPart,
    ConfirmRead,
    Expect,
    Heartbeat,
    Offer,
    OfferLost,
    PartConfirmed,
    ReadConfirmed,
    ReaderMessage,
    ReadProgress,
    SenderMessage,
    Subscribe,
)
from kv_transfer.sender.lease_machine import LEASE_TABLE, LeaseEvent, LeaseState


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Bounds of the sender's waits, in seconds, and of what it remembers."""

    lease_s: float = 10.0
    """From the reader's last heartbeat on."""
    unclaimed_s: float = 60.0
    """From the computed prompt that nobody expects to its subscription. Long: whoever gives a request up says so; this
    one is for the case that all who knew of it died."""
    grace_s: float = 5.0
    """From the end of a reader's link to the reuse of what it may have been reading."""
    suspect_s: float = 300.0
    """From the end of the promise to the reuse of the blocks, while the reader's link lives and its reads don't end."""
    max_early: int = 4096
    """Readers that wait for requests which have not come, and as many that wait for blocks of theirs."""
    remembered_s: float = 600.0
    """An attempt that is over is recognised for so long: whoever may still ask about it has given up before."""
    max_remembered: int = 16384
    """And at most so many are."""


@dataclass(frozen=True, slots=True)
class TellReader:
    """Send a message on a link."""

    link: int
    message: SenderMessage


@dataclass(frozen=True, slots=True)
class OpenLeases:
    """So many leases may be read from now on, those included that are over and still read: the sender's transfer agent
    must make progress while there are any."""

    count: int


@dataclass(frozen=True, slots=True)
class CutLink:
    """This link's reader has a newer link, or is a newer process: end the old one."""

    link: int
    reason: str


LeaseEffect = TellReader | Released | OpenLeases | CutLink | Recorded


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Leases by state, blocks of the suspect ones, and the age of the oldest, in seconds."""

    granted: int
    reading: int
    suspect: int
    suspect_blocks: int
    oldest_s: float


@dataclass(slots=True)
class _Lease:
    attempt: AttemptKey
    machine: Machine[LeaseState, LeaseEvent]
    granted_at: float
    block_ids: list[int]
    digests: list[int] = field(default_factory=list)
    closing: Closing | None = None
    reader: str | None = None
    reader_node: str = ""
    first_block: int = 0
    asked_end: int = 0
    """The reader has read the blocks before this one, and asked for their digests."""
    told_end: int = 0
    """It was told those of the blocks before this one."""
    ended: bool = False
    kept: bool = True


def _refused(link: int, attempt: AttemptKey, story: str) -> TellReader:
    return TellReader(link, OfferLost(attempt, story, TransferCause.REFUSED))


def _num_blocks(lease: _Lease) -> int:
    return sum(block != NULL_BLOCK for block in lease.block_ids)


@dataclass(frozen=True, slots=True)
class _Unanswered:
    link: int
    lease: _Lease


@dataclass(frozen=True, slots=True)
class _Early:
    link: int
    first_block: int


@dataclass(frozen=True, slots=True)
class _Reader:
    node_id: str
    incarnation: str


@dataclass(slots=True)
class _ReaderLeases:
    """The leases of one reader that are not over."""

    leases: dict[AttemptKey, _Lease] = field(default_factory=dict)
    num_reading: int = 0
    """So many end together when the reader is not heard for `lease_s`."""


class LeaseBook:
    """All leases of one sender. One thread calls it; every method returns at once with the effects, in order."""

    def __init__(self, clock: Clock, times: LeaseTimes | None = None, *, digest_every: int = 0) -> None:
        """`digest_every`: of which blocks `digested` brings digests, one in so many; 0: never called."""
        self._clock = clock
        self._digest_every = digest_every
        self._times = times or LeaseTimes()
        self._leases: dict[AttemptKey, _Lease] = {}
        self._over: OrderedDict[AttemptKey, float] = OrderedDict()
        """Since when; in that order."""
        self._early: OrderedDict[AttemptKey, _Early] = OrderedDict()
        self._expected: dict[AttemptKey, int] = {}
        """The link on which to tell that it has begun; until the subscription, or the end of the link."""
        self._deadlines: Deadlines[AttemptKey] = Deadlines()
        """Deadlines of leases that nobody claims or that are suspect."""
        self._of_reader: dict[str, _ReaderLeases] = {}
        self._silent_after: Deadlines[str] = Deadlines()
        """When readers that have leases in READING will have been silent for too long: one entry for all of them, so
        that a heartbeat costs the same however many leases it renews."""
        self._begun: set[AttemptKey] = set()
        """Attempts that have their blocks, and nothing to offer yet."""
        self._outlived: dict[AttemptKey, str] = {}
        """Reads that outlived their leases, and whose they are."""
        self._unanswered: dict[AttemptKey, _Unanswered] = {}
        """Confirmed reads of blocks whose digests are not known yet; their leases are over."""
        self._links: dict[int, _Reader] = {}
        self._link_of: dict[str, int] = {}
        """By the reader's incarnation, which has one link at most."""
        self._open = 0
        self.counters: Counter[str] = Counter()
        """Messages and events that changed nothing, by kind."""

    # What the engine did.

    def begun(self, attempt: AttemptKey) -> list[LeaseEffect]:
        """A prompt has all its blocks: from here on it will be computed, whatever becomes of the others."""
        if attempt in self._over or attempt in self._begun or attempt in self._leases:
            return []
        self._begun.add(attempt)
        return self._tell_begun(attempt)

    def offer(
        self,
        attempt: AttemptKey,
        first_block: int,
        block_ids: Sequence[int],
        closing: Closing | None = None,
    ) -> list[LeaseEffect]:
        """Prompt blocks from `first_block` on are computed and lie in `block_ids`; with `closing` they are the last."""
        if attempt in self._over:
            self.counters["offer_after_end"] += 1
            return []
        lease = self._leases.get(attempt)
        effects: list[LeaseEffect] = []
        if lease is None:
            if attempt not in self._begun:
                effects += self._tell_begun(attempt)
            self._begun.discard(attempt)
            machine = Machine(f"lease {attempt}", LeaseState.GRANTED, LEASE_TABLE)
            lease = self._leases[attempt] = _Lease(attempt, machine, self._clock.monotonic(), [])
            effects.append(Recorded("lease_granted", attempt, len(block_ids)))
        if first_block != len(lease.block_ids) or lease.closing is not None:
            raise ValueError(f"{attempt}: blocks from {first_block} offered after {len(lease.block_ids)}")
        self._feed(lease, LeaseEvent.OFFER)
        lease.block_ids.extend(block_ids)
        lease.closing = closing
        effects.append(Recorded("offered", attempt, len(lease.block_ids)))
        if closing is not None:
            effects.append(Recorded("closing_offered", attempt, len(lease.block_ids)))
        early = self._early.pop(attempt, None)
        if early is not None:
            effects += self._subscribe(lease, early.link, early.first_block)
        elif lease.machine.state is LeaseState.READING:
            effects += self._tell_blocks(lease, max(first_block, lease.first_block))
        elif lease.machine.state is LeaseState.GRANTED and closing is not None and attempt not in self._expected:
            self._wait(attempt, self._times.unclaimed_s)
        return effects

    def digested(self, attempt: AttemptKey, digests: Sequence[int]) -> list[LeaseEffect]:
        """The digests of the blocks that were offered next, 0 for those that have none: once for every offer."""
        unanswered = self._unanswered.get(attempt)
        lease = unanswered.lease if unanswered else self._leases.get(attempt)
        if lease is None:
            self.counters["digested_after_end"] += 1
            return []
        lease.digests.extend(digests)
        if unanswered is None:
            return self._tell_part(lease)
        if not self._all_digested(lease):
            return []
        del self._unanswered[attempt]
        return [_held(unanswered.link, lease)]

    def withdraw(
        self,
        attempt: AttemptKey,
        story: str,
        cause: TransferCause = TransferCause.LEASE_LOST,
        *,
        promise_broken: bool = False,
    ) -> list[LeaseEffect]:
        """The request was aborted or failed here. `promise_broken`: its blocks were reused already (preemption), or
        nobody can tell what is in them."""
        lease = self._leases.get(attempt)
        self._begun.discard(attempt)
        early, expected = self._early.pop(attempt, None), self._expected.pop(attempt, None)
        waiting = early.link if early is not None else expected
        effects: list[LeaseEffect] = []
        if waiting is not None:
            effects.append(TellReader(waiting, OfferLost(attempt, story, cause)))
        if promise_broken and (unanswered := self._unanswered.pop(attempt, None)):
            effects.append(TellReader(unanswered.link, ReadConfirmed(attempt, held=False)))
        if lease is None:
            self._remember(attempt)
            return effects
        lease.kept = lease.kept and not promise_broken
        if lease.machine.state is LeaseState.READING:
            effects += self._tell(lease, OfferLost(attempt, story, cause))
        return effects + self._advance(lease, LeaseEvent.WITHDRAW, story)

    def ended(self, attempt: AttemptKey) -> list[LeaseEffect]:
        """The engine has ended the request and keeps its blocks until `Released`, which follows exactly once."""
        lease = self._leases.get(attempt)
        self._begun.discard(attempt)
        if lease is None:
            return [Released(attempt)]
        lease.ended = True
        return []

    # What readers did.

    def link_opened(self, link: int, node_id: str, incarnation: str) -> list[LeaseEffect]:
        """A reader's link is up; it replaces older links of the same process, and older processes of the same node."""
        effects: list[LeaseEffect] = []
        for other, reader in list(self._links.items()):
            if reader.incarnation == incarnation:
                effects += [CutLink(other, "the reader opened a newer link"), *self.link_closed(other)]
            elif reader.node_id == node_id:
                effects.append(CutLink(other, f"{node_id} has restarted as {incarnation}"))
                effects += [*self.link_closed(other), *self.reader_gone(reader.incarnation)]
        self._links[link] = _Reader(node_id, incarnation)
        self._link_of[incarnation] = link
        return effects

    def link_closed(self, link: int) -> list[LeaseEffect]:
        """The link ended, however: what its reader may be reading is released after the grace."""
        reader = self._links.pop(link, None)
        if reader is None:
            return []
        del self._link_of[reader.incarnation]
        for attempt in [key for key, early in self._early.items() if early.link == link]:
            del self._early[attempt]
        self._forget_expected(link)
        self._unanswered = {attempt: waiting for attempt, waiting in self._unanswered.items() if waiting.link != link}
        effects: list[LeaseEffect] = []
        for attempt in [key for key, incarnation in self._outlived.items() if incarnation == reader.incarnation]:
            effects += self._reads_over(attempt)
        for lease in self._leases_of(reader.incarnation):
            effects += self._advance(lease, LeaseEvent.LINK_LOST, "link lost")
            self._wait(lease.attempt, self._times.grace_s)
        return effects

    def reader_gone(self, incarnation: str) -> list[LeaseEffect]:
        """That process does not exist any more, so none of its reads does. Should it be there after all, it hears that
        its link is cut, and a no to whatever it asks then."""
        effects: list[LeaseEffect] = []
        link = self._link_of.get(incarnation)
        if link is not None:
            effects += [CutLink(link, f"{incarnation} is gone"), *self.link_closed(link)]
        for lease in self._leases_of(incarnation):
            effects += self._advance(lease, LeaseEvent.READER_GONE, "reader gone")
        return effects

    def received(self, link: int, message: ReaderMessage) -> list[LeaseEffect]:
        """A message came on an open link."""
        reader = self._links.get(link)
        if reader is None:
            self.counters["message_on_closed_link"] += 1
            return []
        match message:
            case Heartbeat():
                return self._heard(reader.incarnation)
            case Expect(attempt):
                return self._expect(link, attempt)
            case Subscribe(attempt, first_block):
                return self._subscribed(link, attempt, first_block)
            case ReadProgress(attempt, blocks_read):
                lease = self._read_by(reader, attempt, "read_progress")
                if lease is not None and blocks_read > len(lease.block_ids):
                    self.counters["read_progress_bad"] += 1
                    return []
                return [Recorded("read_progress", attempt, blocks_read)] if lease else []
            case ConfirmPart(attempt, end_block):
                return self._confirm_part(reader, attempt, end_block)
            case ConfirmRead(attempt):
                return self._confirm(link, reader, attempt)
            case Abandon(attempt, reads_in_flight):
                return self._abandon(link, reader, attempt, reads_in_flight)

    # What time did.

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, on the clock's monotonic time."""
        firsts = (self._deadlines.first(), self._silent_after.first())
        return min((first for first in firsts if first is not None), default=None)

    def tick(self) -> list[LeaseEffect]:
        """Carry out what is due."""
        now = self._clock.monotonic()
        effects: list[LeaseEffect] = []
        for incarnation in self._silent_after.take_due(now):
            for lease in self._leases_of(incarnation):
                if lease.machine.state is LeaseState.READING:
                    effects += self._advance(lease, LeaseEvent.DEADLINE, "deadline")
        for attempt in self._deadlines.take_due(now):
            effects += self._lease_due(self._leases[attempt])
        return effects

    # What others may know.

    def may_be_read_by(self, incarnation: str) -> bool:
        """Whether that process has leases that are not over."""
        return incarnation in self._of_reader

    def state(self, attempt: AttemptKey) -> LeaseState | None:
        """The state of a lease that is not over."""
        lease = self._leases.get(attempt)
        return lease.machine.state if lease else None

    def stats(self) -> LeaseStats:
        """For the node's load report and metrics."""
        states = Counter(lease.machine.state for lease in self._leases.values())
        oldest = min((lease.granted_at for lease in self._leases.values()), default=None)
        suspects = [lease for lease in self._leases.values() if lease.machine.state is LeaseState.SUSPECT]
        return LeaseStats(
            granted=states[LeaseState.GRANTED],
            reading=states[LeaseState.READING],
            suspect=len(suspects),
            suspect_blocks=sum(map(_num_blocks, suspects)),
            oldest_s=self._clock.monotonic() - oldest if oldest is not None else 0.0,
        )

    def open_handoffs(self) -> list[OpenHandoff]:
        """Every lease that is not over, for operators."""
        now = self._clock.monotonic()
        return [
            OpenHandoff(
                attempt=lease.attempt,
                side=HandoffSide.SENDER,
                state=lease.machine.state.name,
                peer=lease.reader_node,
                peer_incarnation=lease.reader or "",
                num_blocks=_num_blocks(lease),
                age_s=now - lease.granted_at,
            )
            for lease in self._leases.values()
        ]

    # Steps.

    def _lease_due(self, lease: _Lease) -> list[LeaseEffect]:
        if lease.machine.state is not LeaseState.SUSPECT:
            return self._advance(lease, LeaseEvent.DEADLINE, "deadline")
        effects = self._advance(lease, LeaseEvent.GRACE_OVER, "grace over")
        reader = self._links.get(self._link_of.get(lease.reader or "", 0))
        # One that is still there may still read, and its reads must come to an end.
        return effects + self._reads_go_on(lease.attempt, reader) if reader is not None else effects

    def _wait(self, attempt: AttemptKey, seconds: float) -> None:
        self._deadlines.set(attempt, self._clock.monotonic() + seconds)

    def _expect(self, link: int, attempt: AttemptKey) -> list[LeaseEffect]:
        if attempt in self._over:
            return [TellReader(link, OfferLost(attempt, "it is over here"))]
        lease = self._leases.get(attempt)
        if attempt in self._expected or (lease is not None and lease.machine.state is not LeaseState.GRANTED):
            self.counters["duplicate_expect"] += 1
            return []
        if len(self._expected) >= self._times.max_early:
            self.counters["early_refused"] += 1
            return [_refused(link, attempt, "too many readers wait for their requests")]
        self._expected[attempt] = link
        if lease is None and attempt not in self._begun:
            return []
        self._deadlines.clear(attempt)
        return self._tell_begun(attempt)

    def _tell_begun(self, attempt: AttemptKey) -> list[LeaseEffect]:
        link = self._expected.get(attempt)
        return [TellReader(link, Begun(attempt))] if link is not None else []

    def _forget_expected(self, link: int) -> None:
        """Its link has ended: what is computed for nobody has a deadline."""
        for attempt in [key for key, expected in self._expected.items() if expected == link]:
            del self._expected[attempt]
            lease = self._leases.get(attempt)
            if lease is not None and lease.closing is not None and lease.machine.state is LeaseState.GRANTED:
                self._wait(attempt, self._times.unclaimed_s)

    def _subscribed(self, link: int, attempt: AttemptKey, first_block: int) -> list[LeaseEffect]:
        self._expected.pop(attempt, None)
        lease = self._leases.get(attempt)
        if lease is not None:
            return self._subscribe(lease, link, first_block)
        if attempt in self._over:
            return [TellReader(link, OfferLost(attempt, "it is over here"))]
        early = self._early.get(attempt)
        if early is not None:
            self.counters["duplicate_subscribe"] += 1
            return [] if early.link == link else [_refused(link, attempt, "it has another reader")]
        if len(self._early) >= self._times.max_early:
            self.counters["early_refused"] += 1
            return [_refused(link, attempt, "too many subscriptions wait for their request")]
        self._early[attempt] = _Early(link, first_block)
        return []

    def _subscribe(self, lease: _Lease, link: int, first_block: int) -> list[LeaseEffect]:
        if lease.machine.state is not LeaseState.GRANTED:
            self.counters["duplicate_subscribe"] += 1
            same = lease.reader == self._links[link].incarnation
            return [] if same else [_refused(link, lease.attempt, "it has another reader")]
        lease.reader, lease.reader_node = self._links[link].incarnation, self._links[link].node_id
        lease.first_block = first_block
        self._deadlines.clear(lease.attempt)
        self._of_reader.setdefault(lease.reader, _ReaderLeases()).leases[lease.attempt] = lease
        subscribed = self._advance(lease, LeaseEvent.SUBSCRIBE)
        # It is promised `lease_s` from now on, whenever its reader was heard.
        self._heard(lease.reader)
        return subscribed + self._tell_blocks(lease, first_block)

    def _tell_blocks(self, lease: _Lease, first_block: int) -> list[LeaseEffect]:
        if lease.closing is not None and lease.first_block > len(lease.block_ids):
            story = f"it was asked for from block {lease.first_block} on, and has {len(lease.block_ids)}"
            refused = self._tell(lease, OfferLost(lease.attempt, story, TransferCause.REFUSED))
            return [*refused, *self._advance(lease, LeaseEvent.ABANDON, story)]
        block_ids = tuple(lease.block_ids[first_block:])
        if not block_ids and lease.closing is None:
            return []
        lease_ms = int(self._times.lease_s * 1000)
        offer = Offer(lease.attempt, first_block, block_ids, lease_ms, lease.closing, self._digest_every)
        return self._tell(lease, offer)

    def _confirm_part(self, reader: _Reader, attempt: AttemptKey, end_block: int) -> list[LeaseEffect]:
        lease = self._read_by(reader, attempt, "confirm_part")
        if lease is None:
            return []
        if end_block > len(lease.block_ids):
            self.counters["confirm_part_bad"] += 1
            return []
        lease.asked_end = max(lease.asked_end, end_block)
        return self._tell_part(lease)

    def _tell_part(self, lease: _Lease) -> list[LeaseEffect]:
        """What is known of the digests that the reader asked for, while its lease is held."""
        first, end = max(lease.told_end, lease.first_block), min(lease.asked_end, len(lease.digests))
        if end <= first or lease.machine.state is not LeaseState.READING or not lease.kept:
            return []
        lease.told_end = end
        return self._tell(lease, PartConfirmed(lease.attempt, first, tuple(lease.digests[first:end])))

    def _confirm(self, link: int, reader: _Reader, attempt: AttemptKey) -> list[LeaseEffect]:
        lease = self._read_by(reader, attempt, "confirm_read")
        if lease is None:
            return [TellReader(link, ReadConfirmed(attempt, held=False))]
        # Nobody can have read a prompt that is not computed: such a reader gets a no, and nothing more.
        complete = lease.closing is not None
        held = complete and lease.kept
        event = LeaseEvent.CONFIRM if complete else LeaseEvent.ABANDON
        ended = self._advance(lease, event, "confirmed" if held else "not held")
        if not held:
            return [TellReader(link, ReadConfirmed(attempt, held=False)), *ended]
        if self._all_digested(lease):
            return [_held(link, lease), *ended]
        self._unanswered[attempt] = _Unanswered(link, lease)
        return ended

    def _all_digested(self, lease: _Lease) -> bool:
        return not self._digest_every or len(lease.digests) == len(lease.block_ids)

    def _abandon(self, link: int, reader: _Reader, attempt: AttemptKey, reads: bool) -> list[LeaseEffect]:
        early = self._early.get(attempt)
        waiting = early.link if early is not None else self._expected.get(attempt)
        if waiting == link:
            self._early.pop(attempt, None)
            self._expected.pop(attempt, None)
            lease = self._leases.get(attempt)
            if lease is not None:
                return self._advance(lease, LeaseEvent.WITHDRAW, "abandoned")
            self._remember(attempt)
            return []
        if attempt in self._outlived:
            return [] if reads else self._reads_over(attempt)
        lease = self._read_by(reader, attempt, "abandon")
        if lease is None:
            return self._reads_go_on(attempt, reader) if reads else []
        event = LeaseEvent.ABANDON_READING if reads else LeaseEvent.ABANDON
        effects = self._advance(lease, event, "abandoned")
        if reads:
            # Its link's end may have begun the grace, but here it is, on a new link.
            self._wait(attempt, self._times.suspect_s)
        return effects

    def _reads_go_on(self, attempt: AttemptKey, reader: _Reader) -> list[LeaseEffect]:
        if attempt in self._leases or len(self._outlived) >= self._times.max_early:
            return []
        self._outlived[attempt] = reader.incarnation
        return [self._opened(+1), Recorded("reads_outlive_lease", attempt)]

    def _reads_over(self, attempt: AttemptKey) -> list[LeaseEffect]:
        del self._outlived[attempt]
        return [self._opened(-1)]

    def _opened(self, more: int) -> OpenLeases:
        self._open += more
        return OpenLeases(self._open)

    def _heard(self, incarnation: str) -> list[LeaseEffect]:
        """A reader lives: that renews all its leases."""
        of_reader = self._of_reader.get(incarnation)
        if of_reader is not None and of_reader.num_reading:
            self._silent_after.set(incarnation, self._clock.monotonic() + self._times.lease_s)
        return []

    def _read_by(self, reader: _Reader, attempt: AttemptKey, kind: str) -> _Lease | None:
        lease = self._leases.get(attempt)
        if lease is None:
            self.counters[f"{kind}_unknown"] += 1
        elif lease.reader != reader.incarnation:
            self.counters[f"{kind}_not_the_reader"] += 1
        else:
            return lease
        return None

    def _leases_of(self, incarnation: str) -> list[_Lease]:
        of_reader = self._of_reader.get(incarnation)
        return list(of_reader.leases.values()) if of_reader is not None else []

    def _tell(self, lease: _Lease, message: SenderMessage) -> list[LeaseEffect]:
        link = self._link_of.get(lease.reader) if lease.reader is not None else None
        return [TellReader(link, message)] if link is not None else []

    def _feed(self, lease: _Lease, event: LeaseEvent) -> bool:
        if not lease.machine.accepts(event):
            self.counters[f"{event.name.lower()}_in_{lease.machine.state.name.lower()}"] += 1
            return False
        lease.machine.feed(event)
        return True

    def _advance(self, lease: _Lease, event: LeaseEvent, why: str = "") -> list[LeaseEffect]:
        """Take a transition and say what follows from the new state."""
        before = lease.machine.state
        if not self._feed(lease, event) or lease.machine.state is before:
            return []
        attempt, blocks = lease.attempt, len(lease.block_ids)
        effects: list[LeaseEffect] = []
        self._note_reading(lease, (lease.machine.state is LeaseState.READING) - (before is LeaseState.READING))
        match lease.machine.state:
            case LeaseState.READING:
                effects.append(self._opened(+1))
            case LeaseState.SUSPECT:
                self._wait(attempt, self._times.suspect_s)
                effects.append(Recorded("lease_suspect", attempt, blocks, why))
            case LeaseState.RELEASED | LeaseState.EXPIRED as final:
                effects.append(Recorded(f"lease_{final.name.lower()}", attempt, blocks, why))
                if before is not LeaseState.GRANTED:
                    effects.append(self._opened(-1))
                self._forget(lease)
                if lease.ended:
                    effects.append(Released(attempt))
        return effects

    def _note_reading(self, lease: _Lease, more: int) -> None:
        if more and lease.reader is not None:
            of_reader = self._of_reader[lease.reader]
            of_reader.num_reading += more
            if not of_reader.num_reading:
                self._silent_after.clear(lease.reader)

    def _forget(self, lease: _Lease) -> None:
        del self._leases[lease.attempt]
        self._deadlines.clear(lease.attempt)
        self._remember(lease.attempt)
        if lease.reader is not None:
            leases = self._of_reader[lease.reader].leases
            del leases[lease.attempt]
            if not leases:
                del self._of_reader[lease.reader]

    def _remember(self, attempt: AttemptKey) -> None:
        now, times = self._clock.monotonic(), self._times
        self._over.setdefault(attempt, now)
        while len(self._over) > times.max_remembered or next(iter(self._over.values())) < now - times.remembered_s:
            self._over.popitem(last=False)


def _held(link: int, lease: _Lease) -> TellReader:
    return TellReader(link, ReadConfirmed(lease.attempt, True, tuple(lease.digests[lease.first_block :])))
