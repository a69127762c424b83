"""The receiver's side of a hand-off: which blocks are being filled, by which reads, and when they may be used. Pure: a
clock goes in, effects come out. The states are in `transfer_values`, the records in `transfer_records`.
One class in one long room, since each event must keep all of these rules at once.

The rules that it keeps:

1. `Arrived` is said only after every block of the prompt was read, has the digest that the sender gave (where it gives
   any), and the sender answered that it held its lease through all of the reads. If any of these is in doubt, the
   transfer ends in `Failed`. Of blocks that are larger than the sender's, the first in front of a window is read only
   in part (`SenderBlocks.partly_filled`): it serves its own request and no other.
2. While a read is in flight nobody uses the blocks that it writes to: a transfer that fails or is abandoned waits in
   QUARANTINED until its last read has ended. `Released` follows once, when the engine has ended the request, too.
3. Numbers that a sender sent are checked against the sender's pool and against the plan before anything is read.
4. Whenever a transfer fails or is abandoned, its sender is told at once, and again on a new link while its reads go on:
   a sender that believes that nobody reads lets its transfer agent sleep, and then the reads never end.
5. Waiting for an offer has no deadline of its own: it ends at the latest with the link (`peer_lost`). Waiting for bytes
   ends when none come (`read_stalled`), though both sides live; the blocks stay in quarantine (rule 2).
6. Blocks are planned for an attempt only when its sender has said that it has begun (`MayPlan`). Otherwise a prompt
   that has its blocks there and none here, and one that has them here and none there, would wait for each other.
7. Late, duplicate and unknown messages change nothing and are counted.
8. `Failed` says how many leading blocks of the plan are valid all the same (`num_valid_blocks`). A block that was to be
   read is valid if its read is done, so that nothing writes to it, if the sender said that it held its lease through
   that read (`PartConfirmed` or `ReadConfirmed`), and if its own digest was compared and is the sender's. So where only
   a sample of the blocks is compared, or none, hardly any is valid. The blocks of one read are confirmed together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import lcm

from baton.clock import Clock, SystemClock
from baton.errors import TransferCause
from baton.machine import Machine
from baton.messages.ids import AttemptKey, Peer
from baton.messages.kv_cache import NULL_BLOCK
from baton.messages.node_report import EndedHandoffs, HandoffSide, OpenHandoff
from kv_transfer.backends.base import coalesce
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import (
    Abandon,
    Begun,
    ConfirmPart,
    ConfirmRead,
    Expect,
    Heartbeat,
    Offer,
    OfferLost,
    OfferMessage,
    PartConfirmed,
    Pull,
    ReadConfirmed,
    ReaderMessage,
    ReadProgress,
    Subscribe,
    is_digested,
)
from kv_transfer.receiver.block_map import BlockMap, SenderBlocks
from kv_transfer.receiver.transfer_records import ExpectedKV, ReadInFlight, SenderLink, Transfer, offer_objection
from kv_transfer.receiver.transfer_values import (
    TRANSFER_TABLE,
    AbandonRead,
    Arrived,
    CutLink,
    Failed,
    MayPlan,
    OpenLink,
    ReadHistograms,
    ReopenLink,
    StartRead,
    TellSender,
    TransferCounts,
    TransferEffect,
    TransferEvent,
    TransferPlan,
    TransferState,
    TransferStats,
)

_SENDER_OWES_NOTHING = (TransferState.PLANNED, TransferState.QUARANTINED)
"""In these states the sender was not asked for blocks yet, or is not any more: a lost offer changes nothing."""


class TransferBook:
    """All transfers of one receiver. One thread calls it; every method returns at once with the effects, in order."""

    def __init__(
        self,
        max_quarantined_blocks: int = 1024,
        *,
        digest_every: int = 1,
        keeps_valid_blocks: bool = False,
        clock: Clock | None = None,
        vocab_size: int = 1 << 32,
    ) -> None:
        """`max_quarantined_blocks`: while more blocks wait for reads from one sender, no transfer from it begins.

        `digest_every`: one block in so many is compared with the sender's digest, if there is one; 0: none is. `clock`:
        for the age of transfers only. `keeps_valid_blocks`: the engine keeps the valid blocks of a failed transfer, so
        senders are asked after each read to confirm it. `vocab_size`: a first token that is not below it is refused.
        """
        self._vocab_size = vocab_size
        self._digest_every = digest_every
        # Unless each block has a digest, hardly any is valid even if it is confirmed (rule 8).
        self._confirms_parts = keeps_valid_blocks and digest_every == 1
        self._clock = clock or SystemClock()
        self._max_quarantined_blocks = max_quarantined_blocks
        self._transfers: dict[AttemptKey, Transfer] = {}
        self._expected: dict[AttemptKey, ExpectedKV] = {}
        """Attempts that wait for blocks."""
        self._links: dict[str, SenderLink] = {}
        """The link to each sender, by incarnation."""
        self._reads: dict[int, Transfer] = {}
        """The transfer of each read in flight, by the read's id."""
        self._digesting: dict[int, Transfer] = {}
        """The transfer of each read of which some digests are not known yet, by the read's id."""
        self._last_read_id = 0
        self.failures: Counter[tuple[str, TransferCause]] = Counter()
        """Transfers that failed, by sender and cause."""
        self.read_histograms: defaultdict[str, ReadHistograms] = defaultdict(ReadHistograms)
        """Durations and sizes of reads, by sender."""
        self._outcomes: Counter[tuple[str, str]] = Counter()
        """Transfers that ended, by sender and outcome: "arrived", or the cause of the failure."""
        self.counters: Counter[str] = Counter()
        """Messages and events that changed nothing, by kind."""

    # What the engine did.

    def expect(self, attempt: AttemptKey, source: Peer, keys: Sequence[bytes] = ()) -> list[TransferEffect]:
        """A request whose prompt is computed elsewhere came, and waits for blocks; `MayPlan` or `Failed` answers.

        `keys`: of the first blocks of a prompt, if these are to be pulled from the sender's prefix cache.
        """
        self._expected[attempt] = ExpectedKV(source, Pull(attempt, keys) if keys else Expect(attempt))
        expected = Recorded("expected", attempt)
        if source.incarnation in self._links:
            return [*self._tell_sender(source.incarnation, self._expected[attempt].question), expected]
        self._links[source.incarnation] = SenderLink()
        return [OpenLink(source), expected]

    def refuse(self, attempt: AttemptKey, source: Peer, cause: TransferCause, detail: str) -> list[TransferEffect]:
        """A request came whose sender can't be used: it fails at once."""
        return self._report_failure(source, attempt, cause, detail)

    def open(self, source: Peer) -> list[TransferEffect]:
        """Open a link to a sender that no request waits for, unless there is one."""
        if source.incarnation in self._links:
            return []
        self._links[source.incarnation] = SenderLink()
        return [OpenLink(source)]

    def plan(self, plan: TransferPlan) -> list[TransferEffect]:
        """Blocks are reserved for an attempt. Raises ValueError for an attempt that is being transferred."""
        if plan.attempt in self._transfers:
            raise ValueError(f"{plan.attempt} is being transferred")
        self._expected.pop(plan.attempt, None)
        machine = Machine(f"transfer {plan.attempt}", TransferState.PLANNED, TRANSFER_TABLE)
        # The sender's own counts are known when there is a link to it.
        blocks, now = SenderBlocks.of_equal_size(plan, BlockMap()), self._clock.monotonic()
        first = blocks.first_block
        transfer = Transfer(plan, machine, now, blocks, next_block=first, valid_end=first, confirm_part_end=first)
        self._transfers[plan.attempt] = transfer
        quarantined = self._quarantined_blocks(transfer.sender)
        if quarantined > self._max_quarantined_blocks:
            detail = f"{quarantined} blocks still wait for earlier reads from {transfer.sender}"
            return self._fail(transfer, TransferCause.REFUSED, detail)
        link = self._links.get(transfer.sender)
        if link is None:
            self._links[transfer.sender] = SenderLink()
            return [OpenLink(plan.source)]
        return self._subscribe(transfer) if link.num_blocks is not None else []

    def refuse_waiting(self, incarnation: str, cause: TransferCause, detail: str) -> list[TransferEffect]:
        """The sender can't be used for some time: requests that wait for blocks fail, and its link stays."""
        waiting = [attempt for attempt, kv in self._expected.items() if kv.source.incarnation == incarnation]
        return [effect for attempt in waiting for effect in self._fail_expected(attempt, cause, detail)]

    def abandon(self, attempt: AttemptKey) -> list[TransferEffect]:
        """Nobody wants the attempt any more; the engine need not know yet. An unknown attempt changes nothing."""
        expected = self._expected.pop(attempt, None)
        if expected is not None:
            self._outcomes[expected.source.node_id, TransferCause.CANCELLED.value] += 1
            return self._tell_sender(expected.source.incarnation, Abandon(attempt, False))
        transfer = self._transfers.get(attempt)
        if transfer is None or transfer.is_quarantined:
            return []
        transfer.cause = TransferCause.CANCELLED
        self._outcomes[transfer.plan.source.node_id, transfer.cause.value] += 1
        return self._end_or_quarantine(transfer, TransferEvent.ABANDON, TransferEvent.ABANDON_READING)

    def ended(self, attempt: AttemptKey) -> list[TransferEffect]:
        """The engine has ended the request and keeps its blocks until `Released`, which follows exactly once."""
        effects = self.abandon(attempt)
        quarantined = self._transfers.get(attempt)
        if quarantined is None:
            return [*effects, Released(attempt)]
        quarantined.request_ended = True
        return effects

    # What senders and their links did.

    def peer_ready(self, incarnation: str, num_blocks: int, block_map: BlockMap | None = None) -> list[TransferEffect]:
        """The link is up and the sender's `num_blocks` blocks can be read. `block_map`: None for equal block sizes."""
        self._links[incarnation] = SenderLink(num_blocks, block_map or BlockMap())
        expected = [kv.question for kv in self._expected.values() if kv.source.incarnation == incarnation]
        effects: list[TransferEffect] = [TellSender(incarnation, question) for question in expected]
        for transfer in self._transfers_of(incarnation):
            if transfer.state is TransferState.PLANNED:
                effects += self._subscribe(transfer)
            elif transfer.is_quarantined:
                effects += self._tell(transfer, Abandon(transfer.plan.attempt, True))
        return effects

    def reopen(self, source: Peer) -> list[TransferEffect]:
        """Some time after `ReopenLink`: open a link if reads from this sender go on and there is no link to it."""
        return self.open(source) if self._quarantined_blocks(source.incarnation) else []

    def peer_lost(self, incarnation: str, cause: TransferCause, detail: str) -> list[TransferEffect]:
        """The link could not be opened, or it ended: every transfer that still needs its sender has failed."""
        self._links.pop(incarnation, None)
        effects = self.refuse_waiting(incarnation, cause, detail)
        for transfer in self._transfers_of(incarnation):
            # A transfer that its sender has confirmed waits for digests that are computed here, and for nothing else.
            if not transfer.is_quarantined and transfer.read_confirmed is None:
                effects += self._fail(transfer, cause, detail)
        remaining = self._transfers_of(incarnation)
        return [*effects, ReopenLink(remaining[0].plan.source)] if remaining else effects

    def received(self, incarnation: str, message: OfferMessage) -> list[TransferEffect]:
        """A message came on the link to this incarnation."""
        if isinstance(message, Heartbeat):
            return []
        kind = type(message).__name__
        expected = self._expected.get(message.attempt)
        if expected is not None and expected.source.incarnation == incarnation:
            return self._received_before_plan(message)
        transfer = self._transfers.get(message.attempt)
        if transfer is None or transfer.sender != incarnation:
            self.counters[f"{kind}_unknown"] += 1
            return []
        state = transfer.state
        match message:
            case Offer() if state in (TransferState.RESERVED, TransferState.READING):
                return self._offer_received(transfer, message)
            case PartConfirmed() if state in (TransferState.READING, TransferState.CONFIRMING):
                return self._part_confirmed(transfer, message)
            case ReadConfirmed() if state is TransferState.CONFIRMING and transfer.read_confirmed is None:
                return self._read_confirmed(transfer, message)
            case OfferLost(_, detail, cause) if transfer.read_confirmed is None and state not in _SENDER_OWES_NOTHING:
                return self._fail(transfer, cause, detail)
            case _:
                self.counters[f"{kind}_in_{state.name.lower()}"] += 1
                return []

    # What the mover did.

    def read_done(
        self, read_id: int, num_bytes: int, read_s: float = 0.0, post_s: float = 0.0, num_descriptors: int = 0
    ) -> list[TransferEffect]:
        """All bytes of a read are here, and none of it writes any more.

        `read_s` and `post_s`: seconds that the read took, and those of them that were spent on posting it.
        `num_descriptors`: how many descriptors were posted for it.
        """
        transfer = self._reads.pop(read_id, None)
        if transfer is None:
            self.counters["read_done_unknown"] += 1
            return []
        transfer.num_blocks += transfer.reads.pop(read_id).num_remote_blocks
        transfer.num_bytes += num_bytes
        transfer.read_s += read_s
        self.read_histograms[transfer.plan.source.node_id].add(num_bytes, num_descriptors, read_s, post_s)
        transfer.machine.feed(TransferEvent.READ_DONE)
        effects: list[TransferEffect] = [Recorded("read_done", transfer.plan.attempt, num_bytes)]
        if transfer.is_quarantined:
            return effects + self._end_quarantine(transfer)
        # ConfirmRead tells the sender that everything is read, so it needs no ReadProgress beside it.
        if confirm := self._ask_to_confirm(transfer):
            return effects + confirm
        progress = self._tell(transfer, ReadProgress(transfer.plan.attempt, transfer.num_blocks))
        return effects + progress + self._ask_to_confirm_part(transfer)

    def digested(self, read_id: int, digests: Mapping[int, int]) -> list[TransferEffect]:
        """The digests of some sub-blocks of a read are known: `digests`, by local sub-block."""
        transfer = self._digesting.get(read_id)
        if transfer is None:
            self.counters["digested_unknown"] += 1
            return []
        transfer.digests.update(digests)
        transfer.to_digest[read_id] -= digests.keys()
        effects = self._extend_valid(transfer)
        if transfer.to_digest[read_id]:
            return effects
        del transfer.to_digest[read_id], self._digesting[read_id]
        return effects + self._arrive_if_proven(transfer)

    def digests_failed(self, read_id: int, detail: str) -> list[TransferEffect]:
        """The digests of a read's blocks could not be computed, so nobody can tell whether the blocks are right."""
        transfer = self._digesting.get(read_id)
        if transfer is None:
            self.counters["digested_unknown"] += 1
            return []
        if transfer.is_quarantined:
            return []
        return self._fail(transfer, TransferCause.DIGEST_MISMATCH, detail)

    def read_failed(self, read_id: int, cause: TransferCause, detail: str) -> list[TransferEffect]:
        """A read brought nothing usable, and none of it writes any more."""
        transfer = self._reads.pop(read_id, None)
        if transfer is None:
            self.counters["read_failed_unknown"] += 1
            return []
        del transfer.reads[read_id]
        was_quarantined = transfer.is_quarantined
        effects = self._end_quarantine(transfer) if was_quarantined else self._fail(transfer, cause, detail)
        if cause is TransferCause.PEER_GONE and transfer.sender in self._links:
            effects.append(CutLink(transfer.sender, detail))
        return effects

    def read_stalled(self, read_id: int, detail: str) -> list[TransferEffect]:
        """No more bytes of a read arrive, but it may still write; if it ends, `read_done` or `read_failed` follows."""
        transfer = self._reads.get(read_id)
        if transfer is None or transfer.is_quarantined:
            self.counters["read_stalled_unwanted"] += 1
            return []
        return self._fail(transfer, TransferCause.STALLED, detail)

    # What others may know.

    @property
    def awaits_digests(self) -> bool:
        """Whether a prompt would arrive, or more of its blocks be valid, if the digests of its blocks were known."""
        return any(t.read_confirmed is not None or t.valid_end < t.confirmed_end for t in self._digesting.values())

    def state(self, attempt: AttemptKey) -> TransferState | None:
        """The state of a transfer that is not over."""
        transfer = self._transfers.get(attempt)
        return transfer.state if transfer else None

    def needs(self, incarnation: str) -> bool:
        """Whether a transfer from this sender is not over, or a request waits for its blocks."""
        expected = any(kv.source.incarnation == incarnation for kv in self._expected.values())
        return expected or bool(self._transfers_of(incarnation))

    def counts(self) -> TransferCounts:
        """For the node's load report and metrics."""
        transfers = self._transfers.values()
        quarantined = [t for t in transfers if t.is_quarantined]
        waiting = sum(t.state in (TransferState.PLANNED, TransferState.RESERVED) for t in transfers)
        in_progress = len(transfers) - waiting - len(quarantined)
        blocks = sum(t.num_reading for t in quarantined)
        return TransferCounts(waiting, in_progress, len(quarantined), blocks)

    def open_handoffs(self) -> list[OpenHandoff]:
        """Every transfer that is not over, for operators."""
        now = self._clock.monotonic()
        return [
            OpenHandoff(
                attempt=transfer.plan.attempt,
                side=HandoffSide.READER,
                state=transfer.state.name,
                peer=transfer.plan.source.node_id,
                peer_incarnation=transfer.sender,
                num_blocks=transfer.num_wanted_blocks,
                age_s=now - transfer.planned_at,
            )
            for transfer in self._transfers.values()
        ]

    def ended_handoffs(self) -> list[EndedHandoffs]:
        """Number of transfers that ended, by sender and outcome; those in quarantine have ended."""
        return [EndedHandoffs(sender, outcome, count) for (sender, outcome), count in sorted(self._outcomes.items())]

    # From the offer to the last read.

    def _received_before_plan(
        self, message: Begun | Offer | PartConfirmed | ReadConfirmed | OfferLost
    ) -> list[TransferEffect]:
        match message:
            case Begun(attempt, num_tokens):
                return [MayPlan(attempt, num_tokens)]
            case OfferLost(attempt, detail, cause):
                return self._fail_expected(attempt, cause, detail)
            case _:
                self.counters[f"{type(message).__name__}_expected"] += 1
                return []

    def _fail_expected(self, attempt: AttemptKey, cause: TransferCause, detail: str) -> list[TransferEffect]:
        return self._report_failure(self._expected.pop(attempt).source, attempt, cause, detail)

    def _subscribe(self, transfer: Transfer) -> list[TransferEffect]:
        transfer.machine.feed(TransferEvent.SUBSCRIBED)
        attempt = transfer.plan.attempt
        transfer.blocks = self._links[transfer.sender].block_map.view(transfer.plan)
        first = transfer.next_block = transfer.valid_end = transfer.confirm_part_end = transfer.blocks.first_block
        subscribe = self._tell(transfer, Subscribe(attempt, first))
        return [*subscribe, Recorded("pull_begun" if transfer.plan.is_pull else "subscribed", attempt, first)]

    def _offer_received(self, transfer: Transfer, offer: Offer) -> list[TransferEffect]:
        end = offer.end_block
        is_known = end <= transfer.next_block and offer.closing is None
        if is_known or transfer.closing is not None:
            self.counters["Offer_duplicate"] += 1
            return []
        sender_blocks = self._links[transfer.sender].num_blocks or 0
        objection = offer_objection(transfer, offer, sender_blocks, self._vocab_size)
        if objection is not None:
            self.counters["Offer_bad"] += 1
            return self._fail(transfer, TransferCause.REFUSED, objection)
        attempt = transfer.plan.attempt
        transfer.machine.feed(TransferEvent.OFFER)
        effects: list[TransferEffect] = [Recorded("offer_received", attempt, len(offer.block_ids))]
        reads = transfer.blocks.reads(offer.first_block, offer.block_ids)
        transfer.next_block = end
        transfer.closing = offer.closing
        transfer.digest_parts = offer.digest_parts
        if reads:
            effects += self._start_read(transfer, reads, offer)
        return effects + self._ask_to_confirm(transfer)

    def _start_read(
        self, transfer: Transfer, reads: Sequence[tuple[int, int, int]], offer: Offer
    ) -> list[TransferEffect]:
        """Read sub-blocks, of which each has its number here, its number at the sender, and its group of layers."""
        self._last_read_id += 1
        read_id, sizes = self._last_read_id, transfer.blocks.sizes
        local, remote, groups = zip(*reads, strict=True)
        remote_blocks = {number // sizes.sender_parts for number in remote}
        local_blocks = frozenset(number // sizes.reader_parts for number in local)
        transfer.remote_blocks |= remote_blocks
        self._reads[read_id] = transfer
        transfer.reads[read_id] = ReadInFlight(offer.first_block, len(remote_blocks), local_blocks)
        to_digest = self._blocks_to_digest(transfer, offer)
        if to_digest:
            transfer.to_digest[read_id] = set(to_digest)
            self._digesting[read_id] = transfer
        ranges = coalesce(local, remote, groups if any(groups) else None)
        digest_parts = transfer.blocks.local_digest_parts(transfer.digest_parts)
        started = Recorded("read_started", transfer.plan.attempt, len(remote_blocks))
        return [StartRead(read_id, transfer.sender, ranges, to_digest, digest_parts), started]

    def _blocks_to_digest(self, transfer: Transfer, offer: Offer) -> tuple[int, ...]:
        """The local sub-blocks of an offer that have a digest on both sides."""
        attempt, every = transfer.plan.attempt, lcm(offer.digest_every, self._digest_every)
        first, parts = offer.first_block, transfer.digest_parts
        ids = transfer.blocks.digest_ids(first, transfer.next_block, parts)
        digested = (digest_id for at, digest_id in enumerate(ids) if is_digested(attempt, first + at // parts, every))
        return tuple(digest_id for digest_id in digested if digest_id != NULL_BLOCK)

    # The sender's confirmations, and what is valid by them.

    def _ask_to_confirm(self, transfer: Transfer) -> list[TransferEffect]:
        """Ask the sender whether it held its lease, if everything is read."""
        if transfer.closing is None or transfer.reads:
            return []
        transfer.machine.feed(TransferEvent.ALL_READ)
        return self._tell(transfer, ConfirmRead(transfer.plan.attempt))

    def _ask_to_confirm_part(self, transfer: Transfer) -> list[TransferEffect]:
        """Ask the sender to confirm the leading blocks, if more of them are read than it was asked about."""
        end = min((read.first_block for read in transfer.reads.values()), default=transfer.next_block)
        if not self._confirms_parts or end <= transfer.confirm_part_end:
            return []
        transfer.confirm_part_end = end
        return self._tell(transfer, ConfirmPart(transfer.plan.attempt, end))

    def _part_confirmed(self, transfer: Transfer, part: PartConfirmed) -> list[TransferEffect]:
        num_blocks, rest = divmod(len(part.digests), transfer.digest_parts)
        end = part.first_block + num_blocks
        if rest or part.first_block != transfer.confirmed_end or end > transfer.confirm_part_end:
            self.counters["PartConfirmed_bad"] += 1
            return []
        transfer.sender_digests.extend(part.digests)
        return self._extend_valid(transfer)

    def _read_confirmed(self, transfer: Transfer, answer: ReadConfirmed) -> list[TransferEffect]:
        if not answer.held:
            return self._fail(transfer, TransferCause.LEASE_LOST, "the lease was not held through the reads")
        transfer.read_confirmed = answer
        # The answer covers all blocks, and replaces what the sender said of parts of them before.
        blocks = transfer.blocks
        num_digests = (transfer.next_block - blocks.first_block) * transfer.digest_parts
        transfer.valid_end = blocks.first_block
        transfer.sender_digests = list(answer.digests) if len(answer.digests) == num_digests else []
        return self._extend_valid(transfer) + self._arrive_if_proven(transfer)

    def _extend_valid(self, transfer: Transfer) -> list[TransferEffect]:
        """Count those leading blocks as valid whose digests are known on both sides and equal (rule 8)."""
        before, end = transfer.valid_end, transfer.confirmed_end
        if transfer.is_quarantined or before >= end:
            return []
        first, parts = transfer.blocks.first_block, transfer.digest_parts
        digests, sender_digests, at = transfer.digests, transfer.sender_digests, (before - first) * parts
        # One at a time: a call takes as long as blocks become valid, however many are confirmed.
        for digest_id in transfer.blocks.iter_digest_ids(before, end, parts):
            if digest_id and digests.get(digest_id) != sender_digests[at]:
                break
            at += 1
        transfer.valid_end = first + at // parts
        grown = transfer.valid_end > before and transfer.read_confirmed is None
        return [Recorded("prefix_verified", transfer.plan.attempt, transfer.valid_end)] if grown else []

    def _arrive_if_proven(self, transfer: Transfer) -> list[TransferEffect]:
        """End the transfer if everything is confirmed and all digests are known: in `Arrived` if those are equal."""
        if transfer.read_confirmed is None or transfer.to_digest or transfer.closing is None:
            return []
        mismatch = self._digest_mismatch(transfer, transfer.read_confirmed.digests)
        if mismatch is not None:
            return self._fail(transfer, TransferCause.DIGEST_MISMATCH, mismatch)
        transfer.machine.feed(TransferEvent.HELD)
        attempt = transfer.plan.attempt
        self._forget(transfer)
        self._outcomes[transfer.plan.source.node_id, "arrived"] += 1
        stats = TransferStats(transfer.num_bytes, transfer.num_blocks, transfer.read_s)
        return [
            Recorded("confirmed", attempt, transfer.num_blocks),
            Arrived(attempt, transfer.closing, stats, transfer.blocks.partly_filled),
            Recorded("kv_arrived", attempt, transfer.num_bytes),
        ]

    def _digest_mismatch(self, transfer: Transfer, digests: Sequence[int]) -> str | None:
        """Why the sender's digests do not prove the blocks; None if they do, or if nothing is compared."""
        if not transfer.digests:
            return None
        sender, blocks, parts = transfer.plan.source.node_id, transfer.blocks, transfer.digest_parts
        ids = blocks.digest_ids(blocks.first_block, transfer.next_block, parts)
        if len(digests) != len(ids):
            return f"{sender} sent {len(digests)} digests of {transfer.next_block - blocks.first_block} blocks"
        pairs = zip(ids, digests, strict=True)
        wrong = [digest_id for digest_id, digest in pairs if transfer.digests.get(digest_id, digest) != digest]
        block = wrong[0] // blocks.local_digest_parts(parts) if wrong else 0
        return f"block {block} is not what {sender} computed" if wrong else None

    # How a transfer ends.

    def _fail(self, transfer: Transfer, cause: TransferCause, detail: str) -> list[TransferEffect]:
        transfer.cause = cause
        plan = transfer.plan
        valid = (transfer.blocks.reader_end(transfer.valid_end), transfer.blocks.partly_filled)
        failed = self._report_failure(plan.source, plan.attempt, cause, detail, *valid)
        return failed + self._end_or_quarantine(transfer, TransferEvent.FAIL, TransferEvent.FAIL_READING)

    def _report_failure(
        self,
        source: Peer,
        attempt: AttemptKey,
        cause: TransferCause,
        detail: str,
        num_valid_blocks: int = 0,
        partly_filled: Sequence[int] = (),
    ) -> list[TransferEffect]:
        self.failures[source.node_id, cause] += 1
        self._outcomes[source.node_id, cause.value] += 1
        failed = Failed(attempt, cause, detail, num_valid_blocks, partly_filled)
        return [Recorded("kv_failed", attempt, detail=cause.value), failed]

    def _end_or_quarantine(
        self, transfer: Transfer, event: TransferEvent, event_reading: TransferEvent
    ) -> list[TransferEffect]:
        """End a transfer, or quarantine it while reads are in flight, and tell the sender, which may hold a lease."""
        attempt, reading = transfer.plan.attempt, bool(transfer.reads)
        transfer.machine.feed(event_reading if reading else event)
        effects = self._tell(transfer, Abandon(attempt, reading))
        if reading:
            quarantined = Recorded("quarantined", attempt, transfer.num_reading)
            return [*effects, quarantined, *map(AbandonRead, transfer.reads)]
        self._forget(transfer)
        return effects

    def _end_quarantine(self, transfer: Transfer) -> list[TransferEffect]:
        """End a quarantined transfer if its last read has ended."""
        if transfer.reads:
            return []
        cancelled = transfer.cause is TransferCause.CANCELLED
        transfer.machine.feed(TransferEvent.READS_ENDED_ABANDONED if cancelled else TransferEvent.READS_ENDED_FAILED)
        attempt = transfer.plan.attempt
        self._forget(transfer)
        effects = [*self._tell(transfer, Abandon(attempt, False)), Recorded("quarantine_released", attempt)]
        return [*effects, Released(attempt)] if transfer.request_ended else effects

    def _forget(self, transfer: Transfer) -> None:
        del self._transfers[transfer.plan.attempt]
        for read_id in transfer.to_digest:
            del self._digesting[read_id]

    # Looking up and telling senders.

    def _tell(self, transfer: Transfer, message: ReaderMessage) -> list[TransferEffect]:
        return self._tell_sender(transfer.sender, message)

    def _tell_sender(self, incarnation: str, message: ReaderMessage) -> list[TransferEffect]:
        link = self._links.get(incarnation)
        is_up = link is not None and link.num_blocks is not None
        return [TellSender(incarnation, message)] if is_up else []

    def _transfers_of(self, incarnation: str) -> list[Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.sender == incarnation]

    def _quarantined_blocks(self, incarnation: str) -> int:
        return sum(transfer.num_reading for transfer in self._transfers_of(incarnation) if transfer.is_quarantined)
