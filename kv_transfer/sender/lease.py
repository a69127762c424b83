"""The sender's side of a hand-off: which blocks were promised to which reader, and until when. Pure: a clock goes in,
effects come out. The states are in `lease_values`, and `lease_records` takes attempts from one to another.

The rules that it keeps:

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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import TransferCause
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
    LeaseMessage,
    Offer,
    OfferLost,
    PartConfirmed,
    ReadConfirmed,
    ReadProgress,
    SenderMessage,
    Subscribe,
)
from kv_transfer.sender.lease_records import AttemptLease, LeaseRecords
from kv_transfer.sender.lease_values import (
    HELD,
    CutLink,
    LeaseEffect,
    LeaseEvent,
    LeaseState,
    LeaseStats,
    LeaseTimes,
    TellReader,
)


@dataclass(frozen=True, slots=True)
class _LinkedReader:
    node_id: str
    incarnation: str


class LeaseBook:
    """All leases of one sender. One thread calls it; every method returns at once with the effects, in order."""

    def __init__(self, clock: Clock, times: LeaseTimes | None = None, *, digest_every: int = 0) -> None:
        """`digest_every`: of which blocks `digested` brings digests, one in so many; 0: never called."""
        self._clock = clock
        self._digest_every = digest_every
        self._times = times or LeaseTimes()
        self._records = LeaseRecords(clock, self._times)
        self._links: dict[int, _LinkedReader] = {}
        self._link_of: dict[str, int] = {}
        """The link of each reader's incarnation, which has one at most."""
        self.counters = self._records.counters
        """Messages and events that changed nothing, by kind."""

    # What the engine did.

    def begun(self, attempt: AttemptKey, num_cached_tokens: int = 0) -> list[LeaseEffect]:
        """A prompt has all its blocks: from here on it will be computed, whatever becomes of the others.

        `num_cached_tokens`: so many tokens have KV and are kept, for a reader that pulls them or takes a stream over.
        """
        if self._records.is_over(attempt):
            return []
        lease = self._records.get_or_make(attempt)
        if not lease.machine.accepts(LeaseEvent.BEGIN):
            return []
        lease.machine.feed(LeaseEvent.BEGIN)
        lease.num_cached_tokens = num_cached_tokens
        return self._tell_begun(lease)

    def offer(
        self,
        attempt: AttemptKey,
        first_block: int,
        block_ids: Sequence[int],
        closing: Closing | None = None,
        digest_parts: int = 1,
    ) -> list[LeaseEffect]:
        """Prompt blocks from `first_block` on are computed and lie in `block_ids`; with `closing` they are the last.

        `digest_parts`: how many digests each of the attempt's blocks gets; that of its first offer counts. Raises
        ValueError for blocks that do not follow those of the offer before.
        """
        if self._records.is_over(attempt):
            self.counters["offer_after_end"] += 1
            return []
        lease = self._records.get_or_make(attempt)
        before = lease.state
        lease.machine.feed(LeaseEvent.OFFER)
        effects: list[LeaseEffect] = []
        if before not in HELD:
            lease.digest_parts = digest_parts
            lease.granted_at = self._clock.monotonic()
            effects += self._tell_begun(lease) if before is not LeaseState.COMPUTING else []
            effects.append(Recorded("lease_granted", attempt, len(block_ids)))
        if first_block != len(lease.block_ids) or lease.closing is not None:
            raise ValueError(f"{attempt}: blocks from {first_block} offered after {len(lease.block_ids)}")
        lease.block_ids.extend(block_ids)
        lease.closing = closing
        effects.append(Recorded("offered", attempt, len(lease.block_ids)))
        if closing is not None:
            effects.append(Recorded("closing_offered", attempt, len(lease.block_ids)))
        if (waiting := lease.subscription) is not None:
            self._records.end_subscription(lease)
            effects += self._subscribe(lease, waiting.link, waiting.first_block)
        elif lease.state is LeaseState.READING:
            effects += self._tell_blocks(lease, max(first_block, lease.first_block))
        else:
            self._wait_for_claim(lease)
        return effects

    def digested(self, attempt: AttemptKey, digests: Sequence[int]) -> list[LeaseEffect]:
        """The digests of the next blocks that were offered, zeros for those that have none. Those of the last offer
        come at once, since all blocks are free when the reader has confirmed."""
        lease = self._records.get(attempt)
        if lease is None or not (lease.is_held or lease.state is LeaseState.AWAITING_DIGESTS):
            self.counters["digested_after_end"] += 1
            return []
        lease.digests.extend(digests)
        if lease.is_held:
            return self._tell_part(lease)
        if not self._all_digested(lease):
            return []
        answer = self._tell(lease, ReadConfirmed(attempt, True, lease.digests_of_read_blocks))
        return answer + self._records.advance(lease, LeaseEvent.DIGESTED)

    def withdraw(
        self,
        attempt: AttemptKey,
        detail: str,
        cause: TransferCause = TransferCause.LEASE_LOST,
        *,
        promise_broken: bool = False,
    ) -> list[LeaseEffect]:
        """The request was aborted or failed here. `promise_broken`: its blocks were reused already (preemption), or
        nobody can tell what is in them."""
        known = self._records.get(attempt)
        if known is not None and known.state is LeaseState.AWAITING_DIGESTS and promise_broken:
            no = self._tell(known, ReadConfirmed(attempt, held=False))
            return no + self._records.advance(known, LeaseEvent.DIGESTS_LOST)
        if self._records.is_over(attempt):
            return []
        lease = self._records.get_or_make(attempt)
        effects: list[LeaseEffect] = []
        if lease.waiting_link is not None:
            effects.append(TellReader(lease.waiting_link, OfferLost(attempt, detail, cause)))
        lease.promise_kept = lease.promise_kept and not promise_broken
        if lease.state is LeaseState.READING:
            effects += self._tell(lease, OfferLost(attempt, detail, cause))
        return effects + self._records.advance(lease, LeaseEvent.WITHDRAW, detail)

    def ended(self, attempt: AttemptKey) -> list[LeaseEffect]:
        """The engine has ended the request and keeps its blocks until `Released`, which follows exactly once."""
        lease = self._records.get(attempt)
        if lease is not None and lease.is_held:
            lease.request_ended = True
            return []
        if lease is not None and lease.state is LeaseState.COMPUTING:
            self._records.advance(lease, LeaseEvent.END)
            self._records.forget_if_unwanted(lease)
        return [Released(attempt)]

    # What readers did.

    def link_opened(self, link: int, node_id: str, incarnation: str) -> list[LeaseEffect]:
        """A reader's link is up; it replaces older links of the same process, and older processes of the same node."""
        effects: list[LeaseEffect] = []
        for older, reader in list(self._links.items()):
            if reader.incarnation == incarnation:
                effects += [CutLink(older, "the reader opened a newer link"), *self.link_closed(older)]
            elif reader.node_id == node_id:
                effects.append(CutLink(older, f"{node_id} has restarted as {incarnation}"))
                effects += [*self.link_closed(older), *self.reader_gone(reader.incarnation)]
        self._links[link] = _LinkedReader(node_id, incarnation)
        self._link_of[incarnation] = link
        return effects

    def link_closed(self, link: int) -> list[LeaseEffect]:
        """The link ended, however: what its reader may be reading is released after the grace."""
        reader = self._links.pop(link, None)
        if reader is None:
            return []
        del self._link_of[reader.incarnation]
        for lease in self._records:
            self._end_waits_on(lease, link)
        effects: list[LeaseEffect] = []
        leases = self._records.readers.of(reader.incarnation)
        for lease in leases:
            if not lease.is_held:
                effects += self._records.advance(lease, LeaseEvent.LINK_LOST)
        for lease in leases:
            if lease.is_held:
                effects += self._records.advance(lease, LeaseEvent.LINK_LOST, "link lost")
                self._records.set_deadline(lease, self._times.grace_s)
        return effects

    def reader_gone(self, incarnation: str) -> list[LeaseEffect]:
        """That process does not exist any more, so none of its reads does. Should it be there after all, it hears that
        its link is cut, and a no to whatever it asks then."""
        effects: list[LeaseEffect] = []
        link = self._link_of.get(incarnation)
        if link is not None:
            effects += [CutLink(link, f"{incarnation} is gone"), *self.link_closed(link)]
        for lease in self._records.readers.of(incarnation):
            effects += self._records.advance(lease, LeaseEvent.READER_GONE, "reader gone")
        return effects

    def received(self, link: int, message: LeaseMessage) -> list[LeaseEffect]:
        """A message came on an open link."""
        reader = self._links.get(link)
        if reader is None:
            self.counters["message_on_closed_link"] += 1
            return []
        match message:
            case Heartbeat():
                self._records.readers.heard(reader.incarnation)
                return []
            case Expect(attempt):
                return self._expect(link, attempt)
            case Subscribe(attempt, first_block):
                return self._subscription(link, attempt, first_block)
            case ReadProgress(attempt, blocks_read):
                lease = self._read_by(reader, attempt, "read_progress")
                if lease is not None and blocks_read > len(lease.block_ids):
                    self.counters["read_progress_bad"] += 1
                    return []
                if lease is not None:
                    lease.num_read = blocks_read
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
        return self._records.first_deadline()

    def tick(self) -> list[LeaseEffect]:
        """Carry out what is due."""
        now = self._clock.monotonic()
        effects: list[LeaseEffect] = []
        for incarnation in self._records.readers.take_silent(now):
            for lease in self._records.readers.of(incarnation):
                if lease.state is LeaseState.READING:
                    effects += self._records.advance(lease, LeaseEvent.DEADLINE, "deadline")
        for lease in self._records.take_due(now):
            effects += self._deadline_reached(lease)
        return effects

    # What others may know.

    def may_be_read_by(self, incarnation: str) -> bool:
        """Whether that process has leases that are not over."""
        return any(lease.is_held for lease in self._records.readers.of(incarnation))

    def knows(self, attempt: AttemptKey) -> bool:
        """Whether there is a record of the attempt, which is not over then."""
        return self._records.get(attempt) is not None

    def num_read(self, attempt: AttemptKey) -> int | None:
        """How many of its first blocks the reader of a lease has, as far as it has said so; None: nobody reads.

        A block that is not offered behind the reader's first one counts as one that it has.
        """
        lease = self._records.get(attempt)
        if lease is None or lease.state is not LeaseState.READING:
            return None
        told = lease.block_ids[lease.first_block :]
        num_unread = sum(block != NULL_BLOCK for block in told) - lease.num_read
        return max(0, len(lease.block_ids) - num_unread)

    def state(self, attempt: AttemptKey) -> LeaseState | None:
        """The state of a lease that is not over."""
        lease = self._records.get(attempt)
        return lease.state if lease is not None and lease.is_held else None

    def stats(self) -> LeaseStats:
        """For the node's load report and metrics."""
        held = self._records.held()
        states = Counter(lease.state for lease in held)
        oldest = min((lease.granted_at for lease in held), default=None)
        suspects = [lease for lease in held if lease.state is LeaseState.SUSPECT]
        return LeaseStats(
            granted=states[LeaseState.GRANTED],
            reading=states[LeaseState.READING],
            suspect=len(suspects),
            suspect_blocks=sum(lease.num_blocks for lease in suspects),
            oldest_s=self._clock.monotonic() - oldest if oldest is not None else 0.0,
        )

    def open_handoffs(self) -> list[OpenHandoff]:
        """Every lease that is not over, for operators."""
        now = self._clock.monotonic()
        return [
            OpenHandoff(
                attempt=lease.attempt,
                side=HandoffSide.SENDER,
                state=lease.state.name,
                peer=lease.reader_node,
                peer_incarnation=lease.reader or "",
                num_blocks=lease.num_blocks,
                age_s=now - lease.granted_at,
            )
            for lease in self._records.held()
        ]

    # Readers that wait for an attempt, and when the waiting ends.

    def _expect(self, link: int, attempt: AttemptKey) -> list[LeaseEffect]:
        if self._records.is_over(attempt):
            return [TellReader(link, OfferLost(attempt, "it is over here"))]
        known = self._records.get(attempt)
        if known is not None and (known.waiting_link is not None or not known.machine.accepts(LeaseEvent.EXPECT)):
            self.counters["duplicate_expect"] += 1
            return []
        if not self._records.may_expect:
            return self._refuse_wait(link, attempt, "too many readers wait for their requests")
        lease = self._records.get_or_make(attempt)
        self._records.expect(lease, link)
        if lease.state is LeaseState.EXPECTED:
            return []
        self._records.clear_deadline(lease)
        return self._tell_begun(lease)

    def _tell_begun(self, lease: AttemptLease) -> list[LeaseEffect]:
        if lease.expected_on is None:
            return []
        return [TellReader(lease.expected_on, Begun(lease.attempt, lease.num_cached_tokens))]

    def _subscription(self, link: int, attempt: AttemptKey, first_block: int) -> list[LeaseEffect]:
        known = self._records.get(attempt)
        if known is not None:
            self._records.end_expectation(known)
            if known.is_held:
                return self._subscribe(known, link, first_block)
        if self._records.is_over(attempt):
            return [TellReader(link, OfferLost(attempt, "it is over here"))]
        if known is not None and known.subscription is not None:
            return self._duplicate_subscription(link, attempt, same_reader=known.subscription.link == link)
        if not self._records.may_subscribe:
            if known is not None:
                self._records.forget_if_unwanted(known)
            return self._refuse_wait(link, attempt, "too many subscriptions wait for their request")
        self._records.subscribe_early(self._records.get_or_make(attempt), link, first_block)
        return []

    def _duplicate_subscription(self, link: int, attempt: AttemptKey, *, same_reader: bool) -> list[LeaseEffect]:
        self.counters["duplicate_subscribe"] += 1
        return [] if same_reader else [_refusal(link, attempt, "it has another reader")]

    def _refuse_wait(self, link: int, attempt: AttemptKey, why: str) -> list[LeaseEffect]:
        self.counters["early_refused"] += 1
        return [_refusal(link, attempt, why)]

    def _end_waits_on(self, lease: AttemptLease, link: int) -> None:
        """A link has ended: what is computed for nobody has a deadline, and what was only waited for is forgotten."""
        if lease.subscription is not None and lease.subscription.link == link:
            self._records.end_subscription(lease)
        if lease.expected_on == link:
            self._records.end_expectation(lease)
            self._wait_for_claim(lease)
        self._records.forget_if_unwanted(lease)

    def _wait_for_claim(self, lease: AttemptLease) -> None:
        """Give a computed prompt that nobody expects its deadline (rule 3)."""
        if lease.state is LeaseState.GRANTED and lease.closing is not None and lease.expected_on is None:
            self._records.set_deadline(lease, self._times.unclaimed_s)

    # Readers that read.

    def _subscribe(self, lease: AttemptLease, link: int, first_block: int) -> list[LeaseEffect]:
        reader = self._links[link]
        if lease.state is not LeaseState.GRANTED:
            return self._duplicate_subscription(link, lease.attempt, same_reader=lease.reader == reader.incarnation)
        lease.reader_node = reader.node_id
        lease.first_block = first_block
        self._records.clear_deadline(lease)
        self._records.readers.add(lease, reader.incarnation)
        subscribed = self._records.advance(lease, LeaseEvent.SUBSCRIBE)
        # It is promised `lease_s` from now on, whenever its reader was heard.
        self._records.readers.heard(reader.incarnation)
        return subscribed + self._tell_blocks(lease, first_block)

    def _tell_blocks(self, lease: AttemptLease, first_block: int) -> list[LeaseEffect]:
        if lease.closing is not None and lease.first_block > len(lease.block_ids):
            detail = f"it was asked for from block {lease.first_block} on, and has {len(lease.block_ids)}"
            refused = self._tell(lease, OfferLost(lease.attempt, detail, TransferCause.REFUSED))
            return [*refused, *self._records.advance(lease, LeaseEvent.ABANDON, detail)]
        block_ids = tuple(lease.block_ids[first_block:])
        if not block_ids and lease.closing is None:
            return []
        lease_ms = int(self._times.lease_s * 1000)
        every, parts = self._digest_every, lease.digest_parts
        offer = Offer(lease.attempt, first_block, block_ids, lease_ms, lease.closing, every, parts)
        return self._tell(lease, offer)

    def _confirm_part(self, reader: _LinkedReader, attempt: AttemptKey, end_block: int) -> list[LeaseEffect]:
        lease = self._read_by(reader, attempt, "confirm_part")
        if lease is None:
            return []
        if end_block > len(lease.block_ids):
            self.counters["confirm_part_bad"] += 1
            return []
        lease.confirm_part_end = max(lease.confirm_part_end, end_block)
        return self._tell_part(lease)

    def _tell_part(self, lease: AttemptLease) -> list[LeaseEffect]:
        """Tell the reader the digests that it asked for and that are known, while its lease is held."""
        first = max(lease.confirmed_part_end, lease.first_block)
        end = min(lease.confirm_part_end, lease.num_digested)
        if end <= first or lease.state is not LeaseState.READING or not lease.promise_kept:
            return []
        lease.confirmed_part_end = end
        digests = lease.digests[first * lease.digest_parts : end * lease.digest_parts]
        return self._tell(lease, PartConfirmed(lease.attempt, first, tuple(digests)))

    def _confirm(self, link: int, reader: _LinkedReader, attempt: AttemptKey) -> list[LeaseEffect]:
        lease = self._read_by(reader, attempt, "confirm_read")
        if lease is None:
            return [TellReader(link, ReadConfirmed(attempt, held=False))]
        no = ReadConfirmed(attempt, held=False)
        if lease.closing is None:
            # Nobody can have read a prompt that is not computed: such a reader gets a no, and nothing more.
            return [TellReader(link, no), *self._records.advance(lease, LeaseEvent.ABANDON, "not held")]
        if not lease.promise_kept:
            return [TellReader(link, no), *self._records.advance(lease, LeaseEvent.CONFIRM, "not held")]
        if not self._all_digested(lease):
            return self._records.advance(lease, LeaseEvent.CONFIRM_UNDIGESTED, "confirmed")
        yes = ReadConfirmed(attempt, True, lease.digests_of_read_blocks)
        return [TellReader(link, yes), *self._records.advance(lease, LeaseEvent.CONFIRM, "confirmed")]

    def _all_digested(self, lease: AttemptLease) -> bool:
        return not self._digest_every or lease.num_digested == len(lease.block_ids)

    def _abandon(self, link: int, reader: _LinkedReader, attempt: AttemptKey, reads: bool) -> list[LeaseEffect]:
        known = self._records.get(attempt)
        if known is not None and known.waiting_link == link:
            return self._records.advance(known, LeaseEvent.WITHDRAW, "abandoned")
        event = LeaseEvent.ABANDON_READING if reads else LeaseEvent.ABANDON
        if known is not None and known.state is LeaseState.OVERRUN:
            return self._records.advance(known, event)
        lease = self._read_by(reader, attempt, "abandon")
        if lease is None:
            return self._follow_reads(attempt, reader) if reads and known is None else []
        effects = self._records.advance(lease, event, "abandoned")
        if reads:
            # Its link's end may have begun the grace, but here it is, on a new link.
            self._records.set_deadline(lease, self._times.suspect_s)
        return effects

    def _follow_reads(self, attempt: AttemptKey, reader: _LinkedReader) -> list[LeaseEffect]:
        """Reads go on of an attempt that is over: they must come to an end (rule 5)."""
        if not self._records.may_overrun:
            return []
        lease = self._records.get_or_make(attempt)
        self._records.readers.add(lease, reader.incarnation)
        return self._records.advance(lease, LeaseEvent.ABANDON_READING)

    def _deadline_reached(self, lease: AttemptLease) -> list[LeaseEffect]:
        if lease.state is not LeaseState.SUSPECT:
            return self._records.advance(lease, LeaseEvent.DEADLINE, "deadline")
        # A reader that is still there may still read.
        reads_go_on = lease.reader in self._link_of and self._records.may_overrun
        event = LeaseEvent.GRACE_OVER_READING if reads_go_on else LeaseEvent.GRACE_OVER
        return self._records.advance(lease, event, "grace over")

    def _read_by(self, reader: _LinkedReader, attempt: AttemptKey, kind: str) -> AttemptLease | None:
        lease = self._records.get(attempt)
        if lease is None or not lease.is_held:
            self.counters[f"{kind}_unknown"] += 1
        elif lease.reader != reader.incarnation:
            self.counters[f"{kind}_not_the_reader"] += 1
        else:
            return lease
        return None

    def _tell(self, lease: AttemptLease, message: SenderMessage) -> list[LeaseEffect]:
        link = self._link_of.get(lease.reader) if lease.reader is not None else None
        return [TellReader(link, message)] if link is not None else []


def _refusal(link: int, attempt: AttemptKey, detail: str) -> TellReader:
    return TellReader(link, OfferLost(attempt, detail, TransferCause.REFUSED))
