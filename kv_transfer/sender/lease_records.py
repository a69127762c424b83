"""The records of a lease book: one for each attempt, one for each reader, and the attempts that are over.

`LeaseRecords` takes attempts from state to state and returns the effects.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.deadlines import Deadlines
from baton.machine import Machine
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import NULL_BLOCK
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import Closing
from kv_transfer.sender.lease_values import (
    FINAL,
    HELD,
    LEASE_TABLE,
    LeaseEffect,
    LeaseEvent,
    LeaseState,
    LeaseTimes,
    OpenLeases,
)


@dataclass(frozen=True, slots=True)
class WaitingSubscription:
    """The reader on this link waits for the first offer, from prompt block `first_block` on."""

    link: int
    first_block: int


@dataclass(slots=True)
class AttemptLease:
    """The sender's record of one attempt, from the first event about it until its final state."""

    attempt: AttemptKey
    machine: Machine[LeaseState, LeaseEvent]
    expected_on: int | None = None
    """The link of the reader that was, or is to be, told that the prompt has begun; until its subscription."""
    subscription: WaitingSubscription | None = None
    granted_at: float = 0.0
    """When the first blocks were offered, on the clock's monotonic time."""
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """For a reader that pulls or takes a stream over: how many tokens its blocks have at the beginning."""
    num_read: int = 0
    """How many blocks its reader says that it has read."""
    digests: list[int] = field(default_factory=list)
    digest_parts: int = 1
    """Digests of each block."""
    closing: Closing | None = None
    reader: str | None = None
    """The incarnation of the process that has subscribed, or says that it still reads."""
    reader_node: str = ""
    first_block: int = 0
    """The prompt block from which on the reader has subscribed."""
    confirm_part_end: int = 0
    """The reader has read the prompt blocks before this one, and asked for their digests."""
    confirmed_part_end: int = 0
    """The reader was told the digests of the prompt blocks before this one."""
    request_ended: bool = False
    """The engine has ended the request, and keeps the blocks until the lease is over."""
    promise_kept: bool = True

    @property
    def state(self) -> LeaseState:
        return self.machine.state

    @property
    def is_held(self) -> bool:
        """Whether the lease is out: something was offered, and the lease is not over."""
        return self.machine.state in HELD

    @property
    def waiting_link(self) -> int | None:
        """The link of a reader that waits for blocks, or for the begin of the prompt; None without one."""
        return self.subscription.link if self.subscription is not None else self.expected_on

    @property
    def num_blocks(self) -> int:
        """Blocks that were offered; the null block is none."""
        return sum(block != NULL_BLOCK for block in self.block_ids)

    @property
    def digests_of_read_blocks(self) -> Sequence[int]:
        """Known digests from the subscription's first block on."""
        return tuple(self.digests[self.first_block * self.digest_parts :])

    @property
    def num_digested(self) -> int:
        """The digests of so many leading blocks are known."""
        return len(self.digests) // self.digest_parts


@dataclass(slots=True)
class _Reader:
    leases: dict[AttemptKey, AttemptLease] = field(default_factory=dict)
    num_reading: int = 0
    """How many of the leases are in READING: those end together when the reader is silent for too long."""


class ReaderLeases:
    """The leases of each reader, a process by its incarnation, and how long each reader may be silent.

    All leases of a reader share one deadline, so that a heartbeat costs the same however many leases it renews.
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._readers: dict[str, _Reader] = {}
        self._silent_after: Deadlines[str] = Deadlines()
        """Deadlines of the readers that have leases in READING."""

    def add(self, lease: AttemptLease, incarnation: str) -> None:
        """Give a lease its reader."""
        lease.reader = incarnation
        self._readers.setdefault(incarnation, _Reader()).leases[lease.attempt] = lease

    def remove(self, lease: AttemptLease) -> None:
        """Take a lease, which is in READING no more, from its reader; fine for one that never had a reader."""
        reader = self._readers.get(lease.reader) if lease.reader is not None else None
        if lease.reader is None or reader is None:
            return
        del reader.leases[lease.attempt]
        if not reader.leases:
            del self._readers[lease.reader]

    def of(self, incarnation: str) -> list[AttemptLease]:
        """The leases of this reader."""
        reader = self._readers.get(incarnation)
        return list(reader.leases.values()) if reader is not None else []

    def count_reading(self, lease: AttemptLease, more: int) -> None:
        """Note that a lease entered READING (`more` is 1), left it (-1), or neither (0)."""
        if not more or lease.reader is None:
            return
        reader = self._readers[lease.reader]
        reader.num_reading += more
        if not reader.num_reading:
            self._silent_after.clear(lease.reader)

    def heard(self, incarnation: str) -> None:
        """A reader lives: that renews all its leases."""
        reader = self._readers.get(incarnation)
        if reader is not None and reader.num_reading:
            self._silent_after.set(incarnation, self._clock.monotonic() + self._lease_s)

    def first_deadline(self) -> float | None:
        """When the first reader will have been silent for too long; None while nobody reads."""
        return self._silent_after.first()

    def take_silent(self, now: float) -> list[str]:
        """The readers that have been silent for too long, each once."""
        return self._silent_after.take_due(now)


class RememberedAttempts:
    """Attempts that are over, recognised for a while: at most `max_remembered`, the latest, for `remembered_s`."""

    def __init__(self, clock: Clock, remembered_s: float, max_remembered: int) -> None:
        self._clock = clock
        self._remembered_s = remembered_s
        self._max_remembered = max_remembered
        self._since: OrderedDict[AttemptKey, float] = OrderedDict()

    def __contains__(self, attempt: AttemptKey) -> bool:
        return attempt in self._since

    def add(self, attempt: AttemptKey) -> None:
        """Remember an attempt from now on."""
        now = self._clock.monotonic()
        self._since[attempt] = now
        self._since.move_to_end(attempt)
        while len(self._since) > self._max_remembered or next(iter(self._since.values())) < now - self._remembered_s:
            self._since.popitem(last=False)


class LeaseRecords:
    """All attempts that a sender knows of."""

    def __init__(self, clock: Clock, times: LeaseTimes) -> None:
        self._clock = clock
        self._times = times
        self._leases: dict[AttemptKey, AttemptLease] = {}
        """The record of each attempt that is known and in no final state."""
        self._over = RememberedAttempts(clock, times.remembered_s, times.max_remembered)
        self.readers = ReaderLeases(clock, times.lease_s)
        self._deadlines: Deadlines[AttemptKey] = Deadlines()
        """Deadlines of leases that nobody claims or that are suspect."""
        self._num_expected = 0
        """Attempts of which a reader waits to hear that they have begun."""
        self._num_subscribed = 0
        """Attempts of which a reader waits for the first offer."""
        self._num_overrun = 0
        """Attempts in OVERRUN."""
        self._num_open = 0
        """Leases that may be read, and the attempts in OVERRUN."""
        self.counters: Counter[str] = Counter()
        """Messages and events that changed nothing, by kind."""

    def __iter__(self) -> Iterator[AttemptLease]:
        return iter(list(self._leases.values()))

    def get(self, attempt: AttemptKey) -> AttemptLease | None:
        """The record of an attempt; None for one that is unknown or in a final state."""
        return self._leases.get(attempt)

    def get_or_make(self, attempt: AttemptKey) -> AttemptLease:
        """The record of an attempt; a new one in UNKNOWN if there is none, for the attempt's first event."""
        lease = self._leases.get(attempt)
        if lease is None:
            machine = Machine(f"lease {attempt}", LeaseState.UNKNOWN, LEASE_TABLE)
            lease = self._leases[attempt] = AttemptLease(attempt, machine)
        return lease

    def is_over(self, attempt: AttemptKey) -> bool:
        """Whether the attempt is over as far as this sender remembers: nothing will be offered of it any more."""
        lease = self._leases.get(attempt)
        if lease is not None:
            return lease.state in (LeaseState.AWAITING_DIGESTS, LeaseState.OVERRUN)
        return attempt in self._over

    def held(self) -> list[AttemptLease]:
        """The leases that are out, the oldest first."""
        return sorted((lease for lease in self._leases.values() if lease.is_held), key=lambda lease: lease.granted_at)

    def set_deadline(self, lease: AttemptLease, seconds: float) -> None:
        """Give a lease its deadline, so many seconds from now, in place of the one that it had."""
        self._deadlines.set(lease.attempt, self._clock.monotonic() + seconds)

    def clear_deadline(self, lease: AttemptLease) -> None:
        """Take a lease's deadline away; fine if it has none."""
        self._deadlines.clear(lease.attempt)

    def first_deadline(self) -> float | None:
        """When the first deadline of a lease or of a silent reader is due; None without any."""
        firsts = (self._deadlines.first(), self.readers.first_deadline())
        return min((first for first in firsts if first is not None), default=None)

    def take_due(self, now: float) -> list[AttemptLease]:
        """The leases whose own deadlines are due, the earliest first; they have none any more."""
        return [self._leases[attempt] for attempt in self._deadlines.take_due(now)]

    # Readers that wait for an attempt.

    @property
    def may_expect(self) -> bool:
        """Whether one more reader may wait to hear that an attempt has begun."""
        return self._num_expected < self._times.max_waiting

    @property
    def may_subscribe(self) -> bool:
        """Whether one more reader may wait for the first offer of an attempt."""
        return self._num_subscribed < self._times.max_waiting

    @property
    def may_overrun(self) -> bool:
        """Whether one more attempt may be followed whose reads outlive their lease."""
        return self._num_overrun < self._times.max_waiting

    def expect(self, lease: AttemptLease, link: int) -> None:
        """A reader waits to hear that the attempt has begun."""
        lease.machine.feed(LeaseEvent.EXPECT)
        lease.expected_on = link
        self._num_expected += 1

    def subscribe_early(self, lease: AttemptLease, link: int, first_block: int) -> None:
        """A reader waits for the first offer of the attempt."""
        lease.machine.feed(LeaseEvent.SUBSCRIBE)
        lease.subscription = WaitingSubscription(link, first_block)
        self._num_subscribed += 1

    def end_expectation(self, lease: AttemptLease) -> None:
        """No reader waits to hear that the attempt has begun; fine if none did."""
        self._num_expected -= lease.expected_on is not None
        lease.expected_on = None

    def end_subscription(self, lease: AttemptLease) -> None:
        """No reader waits for the first offer of the attempt; fine if none did."""
        self._num_subscribed -= lease.subscription is not None
        lease.subscription = None

    def forget_if_unwanted(self, lease: AttemptLease) -> None:
        """Forget an attempt that was only waited for, and is not any more."""
        if lease.state is LeaseState.EXPECTED and lease.waiting_link is None:
            self.advance(lease, LeaseEvent.READERS_LOST)

    # Steps.

    def advance(self, lease: AttemptLease, event: LeaseEvent, why: str = "") -> list[LeaseEffect]:
        """Take a transition and say what follows from it; an event that the state does not accept is counted."""
        before = lease.state
        if not lease.machine.accepts(event):
            self.counters[f"{event.name.lower()}_in_{before.name.lower()}"] += 1
            return []
        after = lease.machine.feed(event)
        if after is before:
            return []
        effects: list[LeaseEffect] = []
        self.readers.count_reading(lease, (after is LeaseState.READING) - (before is LeaseState.READING))
        if after is LeaseState.READING:
            effects.append(self._opened(+1))
        elif after is LeaseState.SUSPECT:
            self.set_deadline(lease, self._times.suspect_s)
            effects.append(Recorded("lease_suspect", lease.attempt, len(lease.block_ids), why))
        elif before in HELD:
            effects += self._end_lease(lease, before, why)
        if after is LeaseState.OVERRUN:
            self._num_overrun += 1
            effects += [self._opened(+1), Recorded("reads_outlive_lease", lease.attempt)]
        elif before is LeaseState.OVERRUN:
            self._num_overrun -= 1
            effects.append(self._opened(-1))
        if after is LeaseState.UNKNOWN or after in FINAL:
            self._remove(lease)
        return effects

    def _end_lease(self, lease: AttemptLease, before: LeaseState, why: str) -> list[LeaseEffect]:
        self._deadlines.clear(lease.attempt)
        name = "lease_expired" if lease.state is LeaseState.EXPIRED else "lease_released"
        effects: list[LeaseEffect] = [Recorded(name, lease.attempt, len(lease.block_ids), why)]
        if before is not LeaseState.GRANTED:
            effects.append(self._opened(-1))
        if lease.request_ended:
            effects.append(Released(lease.attempt))
        return effects

    def _opened(self, more: int) -> OpenLeases:
        self._num_open += more
        return OpenLeases(self._num_open)

    def _remove(self, lease: AttemptLease) -> None:
        self.end_expectation(lease)
        self.end_subscription(lease)
        self.readers.remove(lease)
        del self._leases[lease.attempt]
        if lease.state is not LeaseState.UNKNOWN:
            self._over.add(lease.attempt)
