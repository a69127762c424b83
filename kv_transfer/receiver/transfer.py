"""The receiver's side of a hand-off: which blocks are being filled, by what, and when they may be used. Pure.

Rules that it keeps:

1. `Arrived` is said only after every block of the prompt was read, has the digest that the sender gave (where it gives
   any), and the sender answered that it held its lease through all of the reads. Every doubt ends in `Failed`; there is
   no third way.
2. While a read is in flight its destination blocks are nobody's: a transfer that fails or is given up waits in
   QUARANTINED until its last read has ended. `Released` follows once, when the engine has ended the request, too.
3. Numbers that a peer sent are checked against the peer's pool and against the plan before anything is read.
4. Whoever gives up tells the sender in the same breath, and tells it again on a new link while its reads go on: a
   sender that believes nobody reads lets its transfer agent sleep, and then the reads never end.
5. A wait for an offer has no deadline of its own: the life of the link is its bound, and `peer_lost` its end. A wait
   for bytes ends when none come (`read_stalled`), though both sides live; the blocks stay in quarantine (rule 2).
6. Blocks are planned for an attempt only when its sender has said that it has begun (`MayPlan`). Otherwise a prompt
   that has its blocks there and none here, and one that has them here and none there, would wait for each other.
7. Late, duplicate and unknown messages change nothing and are counted.
8. `Failed` says how many leading blocks of the plan are valid all the same (`num_valid_blocks`). Of those that were to
   be read a block counts if its read is done, so that nothing writes to it, if the sender said that it held its lease
   through that read (`PartConfirmed` or `ReadConfirmed`), and if its own digest was compared and is the sender's. So
   where only a sample of the blocks is compared, or none, hardly one counts. A read counts whole or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import lcm

from baton.clock import Clock, SystemClock
from baton.errors import TransferCause
from baton.machine import Machine
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import NULL_BLOCK
from baton.messages.node import KVSource
from baton.messages.node_report import EndedHandoffs, HandoffSide, OpenHandoff
from kv_transfer.backends.base import ReadRange, coalesce
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
    PartConfirmed,
    ReadConfirmed,
    ReaderMessage,
    ReadProgress,
    SenderMessage,
    Subscribe,
)
from kv_transfer.receiver.read_histograms import ReadHistograms
from kv_transfer.receiver.transfer_machine import TRANSFER_TABLE, TransferEvent, TransferState
from kv_transfer.receiver.transfer_records import Peer, Read, Transfer
from kv_transfer.receiver.transfer_values import (
    Arrived,
    CancelRead,
    CutLink,
    Failed,
    MayPlan,
    OpenLink,
    Plan,
    ReopenLink,
    StartRead,
    TellSender,
    TransferCounts,
    TransferEffect,
    TransferStats,
)
from kv_transfer.sampling import is_digested

_UNPROMISED = (TransferState.PLANNED, TransferState.QUARANTINED)


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
        """`max_quarantined_blocks` of one sender: beyond it nothing more is planned from there.

        `digest_every`: one block in how many is compared with its sender's digest, if that has one; 0: none. `clock`
        tells how old a transfer is, and nothing else. `keeps_valid_blocks`: what a failed transfer brought is used, so
        senders are asked for their word on it after each read. `vocab_size`: of this node's model, which gets the first
        tokens.
        """
        self._vocab_size = vocab_size
        self._digest_every = digest_every
        # Without a digest of each block nothing would follow from a sender's word on a part.
        self._asks_for_parts = keeps_valid_blocks and digest_every == 1
        self._clock = clock or SystemClock()
        self._max_quarantined_blocks = max_quarantined_blocks
        self._transfers: dict[AttemptKey, Transfer] = {}
        self._expected: dict[AttemptKey, KVSource] = {}
        """Attempts that have no blocks here yet."""
        self._reads: dict[int, Transfer] = {}
        self._peers: dict[str, Peer] = {}
        self._digesting: dict[int, Transfer] = {}
        self._last_read_id = 0
        self.failures: Counter[tuple[str, TransferCause]] = Counter()
        """Transfers that failed, by sender and cause."""
        self.reads: defaultdict[str, ReadHistograms] = defaultdict(ReadHistograms)
        """What its reads took, by sender."""
        self._outcomes: Counter[tuple[str, str]] = Counter()
        """How transfers ended, by sender."""
        self.counters: Counter[str] = Counter()
        """Messages and events that changed nothing, by kind."""

    # What the engine did.

    def expect(self, attempt: AttemptKey, source: KVSource) -> list[TransferEffect]:
        """An attempt has come, and waits for blocks. Answered by `MayPlan` or `Failed`."""
        self._expected[attempt] = source
        expected = Recorded("expected", attempt)
        if source.incarnation in self._peers:
            return [*self._tell_peer(source.incarnation, Expect(attempt)), expected]
        self._peers[source.incarnation] = Peer()
        return [OpenLink(source), expected]

    def plan(self, plan: Plan) -> list[TransferEffect]:
        """Blocks are reserved for an attempt. Raises ValueError for an attempt that is being transferred."""
        if plan.attempt in self._transfers:
            raise ValueError(f"{plan.attempt} is being transferred")
        self._expected.pop(plan.attempt, None)
        machine = Machine(f"transfer {plan.attempt}", TransferState.PLANNED, TRANSFER_TABLE)
        first, now = plan.first_block, self._clock.monotonic()
        transfer = Transfer(plan, machine, now, next_block=first, valid_end=first, asked_end=first)
        self._transfers[plan.attempt] = transfer
        stuck = self._quarantined_blocks(transfer.peer)
        if stuck > self._max_quarantined_blocks:
            story = f"{stuck} blocks still wait for earlier reads from {transfer.peer}"
            return self._fail(transfer, TransferCause.REFUSED, story)
        peer = self._peers.get(transfer.peer)
        if peer is None:
            self._peers[transfer.peer] = Peer()
            return [OpenLink(plan.source)]
        return self._subscribe(transfer) if peer.num_blocks is not None else []

    def abandon(self, attempt: AttemptKey) -> list[TransferEffect]:
        """Nobody wants it any more; the engine need not know yet. Unknown attempts are fine."""
        expected = self._expected.pop(attempt, None)
        if expected is not None:
            self._outcomes[expected.node_id, TransferCause.CANCELLED.value] += 1
            return self._tell_peer(expected.incarnation, Abandon(attempt, False))
        transfer = self._transfers.get(attempt)
        if transfer is None or transfer.machine.state is TransferState.QUARANTINED:
            return []
        transfer.cause = TransferCause.CANCELLED
        self._outcomes[transfer.plan.source.node_id, transfer.cause.value] += 1
        return self._give_up(transfer, TransferEvent.ABANDON, TransferEvent.ABANDON_READING)

    def ended(self, attempt: AttemptKey) -> list[TransferEffect]:
        """The engine has ended the request and keeps its blocks until `Released`, which follows exactly once."""
        effects = self.abandon(attempt)
        quarantined = self._transfers.get(attempt)
        if quarantined is None:
            return [*effects, Released(attempt)]
        quarantined.ended = True
        return effects

    # What peers did.

    def peer_ready(self, incarnation: str, num_blocks: int) -> list[TransferEffect]:
        """The link is up and the sender's `num_blocks` blocks can be read."""
        self._peers[incarnation] = Peer(num_blocks)
        expected = [attempt for attempt, source in self._expected.items() if source.incarnation == incarnation]
        effects: list[TransferEffect] = [TellSender(incarnation, Expect(attempt)) for attempt in expected]
        for transfer in self._transfers_of(incarnation):
            if transfer.machine.state is TransferState.PLANNED:
                effects += self._subscribe(transfer)
            elif transfer.machine.state is TransferState.QUARANTINED:
                effects += self._tell(transfer, Abandon(transfer.plan.attempt, True))
        return effects

    def reopen(self, source: KVSource) -> list[TransferEffect]:
        """Some time after `ReopenLink`: whether a link is still wanted for nothing but reads that go on."""
        if source.incarnation in self._peers or not self._quarantined_blocks(source.incarnation):
            return []
        self._peers[source.incarnation] = Peer()
        return [OpenLink(source)]

    def peer_lost(self, incarnation: str, cause: TransferCause, story: str) -> list[TransferEffect]:
        """The link could not be opened, or it ended: whatever it carried has failed."""
        self._peers.pop(incarnation, None)
        effects: list[TransferEffect] = []
        for attempt, source in list(self._expected.items()):
            if source.incarnation == incarnation:
                effects += self._fail_expected(attempt, cause, story)
        for transfer in self._transfers_of(incarnation):
            # One whose sender has kept its word only waits for what is computed here.
            if transfer.machine.state is not TransferState.QUARANTINED and transfer.answer is None:
                effects += self._fail(transfer, cause, story)
        left = self._transfers_of(incarnation)
        return [*effects, ReopenLink(left[0].plan.source)] if left else effects

    def received(self, incarnation: str, message: SenderMessage) -> list[TransferEffect]:
        """A message came on the link to this incarnation."""
        if isinstance(message, Heartbeat):
            return []
        kind = type(message).__name__
        source = self._expected.get(message.attempt)
        if source is not None and source.incarnation == incarnation:
            return self._expected_received(message)
        transfer = self._transfers.get(message.attempt)
        if transfer is None or transfer.peer != incarnation:
            self.counters[f"{kind}_unknown"] += 1
            return []
        state = transfer.machine.state
        match message:
            case Offer() if state in (TransferState.RESERVED, TransferState.READING):
                return self._offered(transfer, message)
            case PartConfirmed() if state in (TransferState.READING, TransferState.CONFIRMING):
                return self._part_confirmed(transfer, message)
            case ReadConfirmed() if state is TransferState.CONFIRMING and transfer.answer is None:
                return self._answered(transfer, message)
            case OfferLost(_, story, cause) if transfer.answer is None and state not in _UNPROMISED:
                return self._fail(transfer, cause, story)
            case _:
                self.counters[f"{kind}_in_{state.name.lower()}"] += 1
                return []

    # What the mover did.

    def read_done(
        self, read_id: int, num_bytes: int, read_s: float = 0.0, post_s: float = 0.0, num_ranges: int = 0
    ) -> list[TransferEffect]:
        """All bytes of a read are here, and nothing of it writes any more."""
        transfer = self._reads.pop(read_id, None)
        if transfer is None:
            self.counters["read_done_unknown"] += 1
            return []
        transfer.num_blocks += transfer.reads.pop(read_id).num_blocks
        transfer.num_bytes += num_bytes
        transfer.read_s += read_s
        self.reads[transfer.plan.source.node_id].add(num_bytes, num_ranges, read_s, post_s)
        transfer.machine.feed(TransferEvent.READ_DONE)
        effects: list[TransferEffect] = [Recorded("read_done", transfer.plan.attempt, num_bytes)]
        if transfer.machine.state is TransferState.QUARANTINED:
            return effects + self._flush(transfer)
        # Who asks for the sender's word has read all there is: that needs no message of its own.
        progress = ReadProgress(transfer.plan.attempt, transfer.num_blocks)
        return effects + (self._confirm(transfer) or [*self._tell(transfer, progress), *self._confirm_part(transfer)])

    def digested(self, read_id: int, digests: Mapping[int, int]) -> list[TransferEffect]:
        """The digests of some blocks of a read, which are here."""
        transfer = self._digesting.get(read_id)
        if transfer is None:
            self.counters["digested_unknown"] += 1
            return []
        transfer.digests.update(digests)
        transfer.to_digest[read_id] -= digests.keys()
        effects = self._compare(transfer)
        if transfer.to_digest[read_id]:
            return effects
        del transfer.to_digest[read_id], self._digesting[read_id]
        return effects + self._arrive(transfer)

    def not_digested(self, read_id: int, story: str) -> list[TransferEffect]:
        """The digests of a read's blocks can't be computed: nobody can tell whether they are right."""
        transfer = self._digesting.get(read_id)
        if transfer is None:
            self.counters["digested_unknown"] += 1
            return []
        if transfer.machine.state is TransferState.QUARANTINED:
            return []
        return self._fail(transfer, TransferCause.DIGEST_MISMATCH, story)

    def read_failed(self, read_id: int, cause: TransferCause, story: str) -> list[TransferEffect]:
        """A read brought nothing usable, and nothing of it writes any more."""
        transfer = self._reads.pop(read_id, None)
        if transfer is None:
            self.counters["read_failed_unknown"] += 1
            return []
        del transfer.reads[read_id]
        quarantined = transfer.machine.state is TransferState.QUARANTINED
        effects = self._flush(transfer) if quarantined else self._fail(transfer, cause, story)
        if cause is TransferCause.PEER_GONE and transfer.peer in self._peers:
            effects.append(CutLink(transfer.peer, story))
        return effects

    def read_stalled(self, read_id: int, story: str) -> list[TransferEffect]:
        """Nothing of a read arrives any more, and it may still write: `read_done` or `read_failed` follows, if ever."""
        transfer = self._reads.get(read_id)
        if transfer is None or transfer.machine.state is TransferState.QUARANTINED:
            self.counters["read_stalled_unwanted"] += 1
            return []
        return self._fail(transfer, TransferCause.STALLED, story)

    # What others may know.

    @property
    def awaits_digests(self) -> bool:
        """Whether a prompt would arrive, or more of it be valid, if only the digests of its blocks were known."""
        transfers = self._digesting.values()
        return any(transfer.answer is not None or transfer.valid_end < transfer.confirmed_end for transfer in transfers)

    def state(self, attempt: AttemptKey) -> TransferState | None:
        """The state of a transfer that is not over."""
        transfer = self._transfers.get(attempt)
        return transfer.machine.state if transfer else None

    def counts(self) -> TransferCounts:
        """For the node's load report and metrics."""
        transfers = self._transfers.values()
        quarantined = [t for t in transfers if t.machine.state is TransferState.QUARANTINED]
        waiting = sum(t.machine.state in (TransferState.PLANNED, TransferState.RESERVED) for t in transfers)
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
                state=transfer.machine.state.name,
                peer=transfer.plan.source.node_id,
                peer_incarnation=transfer.peer,
                num_blocks=transfer.wanted_blocks,
                age_s=now - transfer.planned_at,
            )
            for transfer in self._transfers.values()
        ]

    def ended_handoffs(self) -> list[EndedHandoffs]:
        """How many ended how, by sender; those in quarantine have ended."""
        return [EndedHandoffs(peer, outcome, count) for (peer, outcome), count in sorted(self._outcomes.items())]

    # Steps.

    def _expected_received(
        self, message: Begun | Offer | PartConfirmed | ReadConfirmed | OfferLost
    ) -> list[TransferEffect]:
        match message:
            case Begun(attempt):
                return [MayPlan(attempt)]
            case OfferLost(attempt, story, cause):
                return self._fail_expected(attempt, cause, story)
            case _:
                self.counters[f"{type(message).__name__}_expected"] += 1
                return []

    def _fail_expected(self, attempt: AttemptKey, cause: TransferCause, story: str) -> list[TransferEffect]:
        return self._note_failure(self._expected.pop(attempt), attempt, cause, story)

    def _subscribe(self, transfer: Transfer) -> list[TransferEffect]:
        transfer.machine.feed(TransferEvent.SUBSCRIBED)
        plan = transfer.plan
        subscribe = self._tell(transfer, Subscribe(plan.attempt, plan.first_block))
        return [*subscribe, Recorded("subscribed", plan.attempt, plan.first_block)]

    def _offered(self, transfer: Transfer, offer: Offer) -> list[TransferEffect]:
        end = offer.first_block + len(offer.block_ids)
        known = end <= transfer.next_block and offer.closing is None
        if known or transfer.closing is not None:
            self.counters["Offer_duplicate"] += 1
            return []
        objection = self._objection(transfer, offer, end)
        if objection is not None:
            self.counters["Offer_bad"] += 1
            return self._fail(transfer, TransferCause.REFUSED, objection)
        attempt = transfer.plan.attempt
        transfer.machine.feed(TransferEvent.OFFER)
        effects: list[TransferEffect] = [Recorded("offer_received", attempt, len(offer.block_ids))]
        ours = transfer.plan.block_ids[offer.first_block : end]
        wanted = [pair for pair in zip(ours, offer.block_ids, strict=True) if pair[0] != NULL_BLOCK]
        transfer.next_block = end
        transfer.closing = offer.closing
        transfer.remote_blocks.update(remote for _, remote in wanted)
        if wanted:
            local_blocks, remote_blocks = zip(*wanted, strict=True)
            effects += self._read(transfer, coalesce(local_blocks, remote_blocks), offer)
        return effects + self._confirm(transfer)

    def _objection(self, transfer: Transfer, offer: Offer, end: int) -> str | None:
        plan, pool = transfer.plan, self._peers[transfer.peer].num_blocks or 0
        total = len(plan.block_ids)
        if offer.first_block != transfer.next_block:
            return f"offer from block {offer.first_block} on, expected {transfer.next_block}"
        if end > total:
            return f"offer up to block {end} of a prompt of {total}"
        outside = [b for b in offer.block_ids if not 0 <= b < pool]
        if outside:
            return f"block {outside[0]} offered out of a pool of {pool}"
        wanted = plan.block_ids[offer.first_block : end]
        pairs = zip(wanted, offer.block_ids, strict=True)
        if any(remote == NULL_BLOCK and local != NULL_BLOCK for local, remote in pairs):
            return "a block that is wanted is not offered"
        there = [b for b in offer.block_ids if b != NULL_BLOCK]
        fresh = set(there)
        if len(fresh) < len(there) or fresh & transfer.remote_blocks:
            return "the same block offered twice"
        closing = offer.closing
        if closing is None:
            return None
        if closing.num_prompt_tokens != plan.num_prompt_tokens or end != total:
            return (
                f"prompt of {closing.num_prompt_tokens} tokens in {end} blocks offered, "
                f"expected {plan.num_prompt_tokens} in {total}"
            )
        return self._token_objection(closing.first_token_ids)

    def _token_objection(self, token_ids: Sequence[int]) -> str | None:
        if not token_ids:
            return "no first token"
        unknown = [token for token in token_ids if not 0 <= token < self._vocab_size]
        return f"first token {unknown[0]} of a vocabulary of {self._vocab_size}" if unknown else None

    def _read(self, transfer: Transfer, ranges: list[ReadRange], offer: Offer) -> list[TransferEffect]:
        self._last_read_id += 1
        read_id, num_blocks = self._last_read_id, sum(r.count for r in ranges)
        self._reads[read_id] = transfer
        transfer.reads[read_id] = Read(offer.first_block, num_blocks)
        to_digest = self._blocks_to_digest(transfer, offer)
        if to_digest:
            transfer.to_digest[read_id] = set(to_digest)
            self._digesting[read_id] = transfer
        started = Recorded("read_started", transfer.plan.attempt, num_blocks)
        return [StartRead(read_id, transfer.peer, ranges, to_digest), started]

    def _blocks_to_digest(self, transfer: Transfer, offer: Offer) -> tuple[int, ...]:
        """Of the blocks that are read for an offer those that both sides look at."""
        attempt, every = transfer.plan.attempt, lcm(offer.digest_every, self._digest_every)
        places = range(offer.first_block, transfer.next_block)
        blocks = (transfer.plan.block_ids[place] for place in places if is_digested(attempt, place, every))
        return tuple(block for block in blocks if block != NULL_BLOCK)

    def _confirm(self, transfer: Transfer) -> list[TransferEffect]:
        if transfer.closing is None or transfer.reads:
            return []
        transfer.machine.feed(TransferEvent.ALL_READ)
        return self._tell(transfer, ConfirmRead(transfer.plan.attempt))

    def _confirm_part(self, transfer: Transfer) -> list[TransferEffect]:
        """Ask for the sender's word on the leading blocks, if more of them are read by now."""
        end = min((read.first_block for read in transfer.reads.values()), default=transfer.next_block)
        if not self._asks_for_parts or end <= transfer.asked_end:
            return []
        transfer.asked_end = end
        return self._tell(transfer, ConfirmPart(transfer.plan.attempt, end))

    def _part_confirmed(self, transfer: Transfer, part: PartConfirmed) -> list[TransferEffect]:
        if part.first_block != transfer.confirmed_end or part.first_block + len(part.digests) > transfer.asked_end:
            self.counters["PartConfirmed_bad"] += 1
            return []
        transfer.sender_digests.extend(part.digests)
        return self._compare(transfer)

    def _answered(self, transfer: Transfer, answer: ReadConfirmed) -> list[TransferEffect]:
        if not answer.held:
            return self._fail(transfer, TransferCause.LEASE_LOST, "the lease was not held through the reads")
        transfer.answer = answer
        # It is about all blocks. What was said of some before is in it again, or was not meant.
        num_blocks, transfer.valid_end = (
            len(transfer.plan.block_ids) - transfer.plan.first_block,
            transfer.plan.first_block,
        )
        transfer.sender_digests = list(answer.digests) if len(answer.digests) == num_blocks else []
        return self._compare(transfer) + self._arrive(transfer)

    def _compare(self, transfer: Transfer) -> list[TransferEffect]:
        """Find out how far the leading blocks are valid."""
        plan, before, end = transfer.plan, transfer.valid_end, transfer.confirmed_end
        if transfer.machine.state is TransferState.QUARANTINED:
            return []
        while transfer.valid_end < end:
            block = plan.block_ids[transfer.valid_end]
            digest = transfer.sender_digests[transfer.valid_end - plan.first_block]
            if block != NULL_BLOCK and transfer.digests.get(block) != digest:
                break
            transfer.valid_end += 1
        grown = transfer.valid_end > before and transfer.answer is None
        return [Recorded("prefix_verified", plan.attempt, transfer.valid_end)] if grown else []

    def _arrive(self, transfer: Transfer) -> list[TransferEffect]:
        """Say so when nothing is left to wait for, and nothing is in doubt."""
        if transfer.answer is None or transfer.to_digest or transfer.closing is None:
            return []
        doubt = self._doubt(transfer, transfer.answer.digests)
        if doubt is not None:
            return self._fail(transfer, TransferCause.DIGEST_MISMATCH, doubt)
        transfer.machine.feed(TransferEvent.HELD)
        attempt = transfer.plan.attempt
        self._forget(transfer)
        self._outcomes[transfer.plan.source.node_id, "arrived"] += 1
        stats = TransferStats(transfer.num_bytes, transfer.num_blocks, transfer.read_s)
        return [
            Recorded("confirmed", attempt, transfer.num_blocks),
            Arrived(attempt, transfer.closing, stats),
            Recorded("kv_arrived", attempt, transfer.num_bytes),
        ]

    def _doubt(self, transfer: Transfer, digests: Sequence[int]) -> str | None:
        if not transfer.digests:
            return None
        sender, blocks = transfer.plan.source.node_id, transfer.plan.block_ids[transfer.plan.first_block :]
        if len(digests) != len(blocks):
            return f"{sender} says {len(digests)} digests of {len(blocks)} blocks"
        pairs = zip(blocks, digests, strict=True)
        wrong = [block for block, digest in pairs if transfer.digests.get(block, digest) != digest]
        return f"block {wrong[0]} is not what {sender} computed" if wrong else None

    def _fail(self, transfer: Transfer, cause: TransferCause, story: str) -> list[TransferEffect]:
        transfer.cause = cause
        plan = transfer.plan
        failed = self._note_failure(plan.source, plan.attempt, cause, story, transfer.valid_end)
        return failed + self._give_up(transfer, TransferEvent.FAIL, TransferEvent.FAIL_READING)

    def _note_failure(
        self, source: KVSource, attempt: AttemptKey, cause: TransferCause, story: str, num_valid_blocks: int = 0
    ) -> list[TransferEffect]:
        self.failures[source.node_id, cause] += 1
        self._outcomes[source.node_id, cause.value] += 1
        failed = Failed(attempt, cause, story, num_valid_blocks)
        return [Recorded("kv_failed", attempt, detail=cause.value), failed]

    def _give_up(self, transfer: Transfer, event: TransferEvent, event_reading: TransferEvent) -> list[TransferEffect]:
        """End a transfer, or put it into quarantine, and tell the sender, who may have kept its blocks for it."""
        attempt, reading = transfer.plan.attempt, bool(transfer.reads)
        transfer.machine.feed(event_reading if reading else event)
        effects = self._tell(transfer, Abandon(attempt, reading))
        if reading:
            quarantined = Recorded("quarantined", attempt, transfer.num_reading)
            return [*effects, quarantined, *map(CancelRead, transfer.reads)]
        self._forget(transfer)
        return effects

    def _flush(self, transfer: Transfer) -> list[TransferEffect]:
        if transfer.reads:
            return []
        cancelled = transfer.cause is TransferCause.CANCELLED
        transfer.machine.feed(TransferEvent.READS_ENDED_ABANDONED if cancelled else TransferEvent.READS_ENDED_FAILED)
        attempt = transfer.plan.attempt
        self._forget(transfer)
        effects = [*self._tell(transfer, Abandon(attempt, False)), Recorded("quarantine_released", attempt)]
        return [*effects, Released(attempt)] if transfer.ended else effects

    def _forget(self, transfer: Transfer) -> None:
        del self._transfers[transfer.plan.attempt]
        for read_id in transfer.to_digest:
            del self._digesting[read_id]

    def _tell(self, transfer: Transfer, message: ReaderMessage) -> list[TransferEffect]:
        return self._tell_peer(transfer.peer, message)

    def _tell_peer(self, incarnation: str, message: ReaderMessage) -> list[TransferEffect]:
        peer = self._peers.get(incarnation)
        ready = peer is not None and peer.num_blocks is not None
        return [TellSender(incarnation, message)] if ready else []

    def _transfers_of(self, incarnation: str) -> list[Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.peer == incarnation]

    def _quarantined_blocks(self, incarnation: str) -> int:
        return sum(
            transfer.num_reading
            for transfer in self._transfers_of(incarnation)
            if transfer.machine.state is TransferState.QUARANTINED
        )
