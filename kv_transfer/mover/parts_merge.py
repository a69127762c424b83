"""Divides what a node is told to move among its parts, and merges their answers. Pure.

Each part of a node has a mover of its own (`part_mover.py`), and a peer has one memory for each of its parts. A pair is
a part of this node and a part of a peer that have layers in common.

The rules it keeps:

1. A peer is connected when all its pairs are; when one of them fails, the others are disconnected again. Each call is
   answered once, in the order of the calls.
2. A read becomes one sub-read for each pair with layers that the read moves. It is answered once, when all of them are:
   until then some of it may still write. When one fails, the others are abandoned, and its cause is the read's.
3. A digest of parts of a block is the sum, modulo 2^64, of those of its layers: that of a sub-block is delivered once,
   when all pairs that bring some of it have delivered theirs. A digest that one of them could not compute is reported
   once, and then no more of that read are delivered.
4. Sub-reads of probes have negative ids, like probes.
5. A peer is remembered until it is disconnected and its last read is over.
6. An answer that nobody waits for changes nothing and is counted.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.engine.runner import KVLayout
from baton.errors import TransferCause, TransferFailed
from baton.machine import Machine
from baton.runner.blocks.digest_definition import DIGEST_MODULUS
from kv_transfer.backends.base import PeerGone
from kv_transfer.layout import PeerNode
from kv_transfer.mover.merge_values import (
    MERGE_TABLE,
    AbandonPart,
    ConnectPart,
    Deliver,
    DisconnectPart,
    FillPart,
    MergeEffect,
    MergeEvent,
    MergeState,
    ReadPart,
)
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    Connected,
    ConnectFailed,
    DigestsFailed,
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.piece_plan import ReadRange


class _Pair(NamedTuple):
    part: int
    """The index of this node's part."""
    agent: str
    """The agent of the peer's part."""


@dataclass(slots=True)
class _Peer:
    node: PeerNode
    pairs: dict[_Pair, Collection[int] | None]
    """The pairs, and the groups that have layers in each; None: all groups, which are not known."""
    calls: int = 0
    """Calls of `connect` that are not answered."""
    reads: int = 0
    """Reads that are not over."""
    is_closed: bool = False
    """Whether the peer was disconnected."""


@dataclass(slots=True)
class _Connecting:
    """A call of `connect` that is not answered."""

    peer: _Peer
    waiting: set[_Pair]
    failure: TransferFailed | None = None


@dataclass(slots=True)
class _Read:
    read_id: int
    peer: _Peer
    machine: Machine[MergeState, MergeEvent]
    sub_reads: dict[int, int] = field(default_factory=dict)
    """The part of each sub-read, by its id."""
    waiting: set[int] = field(default_factory=set)
    """Sub-reads that are not answered."""
    shares_missing: Counter[int] = field(default_factory=Counter)
    """How many sub-reads have not delivered their share, for each sub-block whose digest is to be delivered."""
    shares: dict[int, int] = field(default_factory=dict)
    """The sums of the shares that were delivered of those digests."""
    failure: ReadFailed | None = None
    is_stalled: bool = False
    num_bytes: int = 0
    post_s: float = 0.0
    total_s: float = 0.0
    num_descriptors: int = 0


@dataclass(slots=True)
class _Fill:
    fill_id: int
    waiting: set[int]
    """The parts that have not answered."""
    shares: list[Mapping[int, int]] = field(default_factory=list)
    """The digests of the parts that have answered."""
    failure: str | None = None


class PartsMerge:
    """The reads, peers and fillings of one node in parts."""

    def __init__(self, layers: Sequence[range], layout: KVLayout | None) -> None:
        """`layers`: those of each part of this node. `layout`: of a block of all layers; None: it is not known, so
        there is one part on either side.
        """
        self._layers = layers
        self._layout = layout
        self._peers: dict[str, _Peer] = {}
        self._connecting: defaultdict[_Pair, deque[_Connecting]] = defaultdict(deque)
        """The calls of `connect` that wait for each pair, in their order."""
        self._reads: dict[int, _Read] = {}
        """Reads that are not answered."""
        self._sub_reads: dict[int, _Read] = {}
        """The read of each sub-read; also of those of which only digests are to come."""
        self._fills: dict[int, _Fill] = {}
        self._numbers = itertools.count(1)
        self.counters: Counter[str] = Counter()
        """Answers that nobody waited for, by kind."""

    @property
    def num_open(self) -> int:
        """How many peers, calls, reads and fillings are remembered."""
        return len(self._peers) + len(self._connecting) + len(self._sub_reads) + len(self._fills)

    # Peers.

    def connect(self, node: PeerNode) -> list[MergeEffect]:
        """Connect to a peer; answered by Connected or ConnectFailed."""
        known = self._peers.get(node.incarnation)
        if known is not None and known.node != node and not known.is_closed:
            error = TransferFailed(TransferCause.REFUSED, f"{node.incarnation} changed its memory")
            return [Deliver(ConnectFailed(node.incarnation, error))]
        try:
            pairs = self._pairs(node)
        except TransferFailed as error:
            return [Deliver(ConnectFailed(node.incarnation, error))]
        if known is None or known.node != node:
            known = self._peers[node.incarnation] = _Peer(node, pairs)
        known.is_closed = False
        known.calls += 1
        call = _Connecting(known, set(pairs))
        for pair in pairs:
            self._connecting[pair].append(call)
        memories = {memory.incarnation: memory for memory in node.parts}
        return [ConnectPart(pair.part, memories[pair.agent]) for pair in pairs]

    def disconnect(self, incarnation: str) -> list[MergeEffect]:
        """Drop a peer; an unknown one is fine."""
        peer = self._peers.get(incarnation)
        if peer is None:
            return []
        peer.is_closed = True
        self._forget_closed(peer)
        return [DisconnectPart(*pair) for pair in peer.pairs]

    def _pairs(self, node: PeerNode) -> dict[_Pair, Collection[int] | None]:
        layout = self._layout
        if layout is None:
            if len(node.parts) > 1:
                detail = f"{node.incarnation!r} is in parts, and the layers here are not known"
                raise TransferFailed(TransferCause.LAYOUT_MISMATCH, detail)
            return {_Pair(0, node.parts[0].incarnation): None}
        pairs: dict[_Pair, Collection[int] | None] = {}
        theirs = zip(node.parts, node.layers_of_parts(layout.num_layers), strict=True)
        for (part, ours), (memory, layers) in itertools.product(enumerate(self._layers), theirs):
            common = range(max(ours.start, layers.start), min(ours.stop, layers.stop))
            if common:
                groups = [g for g, group in enumerate(layout.groups) if any(layer in common for layer in group.layers)]
                pairs[_Pair(part, memory.incarnation)] = groups
        return pairs

    def _pair_answered(self, pair: _Pair, failure: TransferFailed | None) -> list[MergeEffect]:
        calls = self._connecting.get(pair)
        if not calls:
            self.counters["connect_unknown"] += 1
            return []
        call = calls.popleft()
        if not calls:
            del self._connecting[pair]
        call.waiting.discard(pair)
        call.failure = call.failure or failure
        return [] if call.waiting else self._call_answered(call)

    def _call_answered(self, call: _Connecting) -> list[MergeEffect]:
        peer, failure, effects = call.peer, call.failure, list[MergeEffect]()
        peer.calls -= 1
        incarnation = peer.node.incarnation
        # A later call connects the pairs again, and decides what becomes of them.
        if failure is not None and not peer.calls:
            if not peer.is_closed and len(peer.pairs) > 1:
                effects += [DisconnectPart(*pair) for pair in peer.pairs]
            peer.is_closed = True
        self._forget_closed(peer)
        return [*effects, Deliver(Connected(incarnation) if failure is None else ConnectFailed(incarnation, failure))]

    def _forget_closed(self, peer: _Peer) -> None:
        if peer.is_closed and not peer.calls and not peer.reads and self._peers.get(peer.node.incarnation) is peer:
            del self._peers[peer.node.incarnation]

    # Reads.

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> list[MergeEffect]:
        """Read sub-blocks of a peer, as `PartMover.read` does. Raises ValueError for a read id that is in use."""
        if read_id in self._reads:
            raise ValueError(f"read {read_id} is in flight")
        peer = self._peers.get(incarnation)
        if peer is None:
            gone = PeerGone(f"{incarnation} is not connected")
            return [Deliver(ReadFailed(read_id, gone.cause, str(gone)))]
        read = _Read(read_id, peer, Machine(f"read {read_id}", MergeState.READING, MERGE_TABLE))
        # A pair that brings all that is read is asked for all digests.
        is_only = len(peer.pairs) == 1
        digested = {} if is_only else self._digested_blocks(peer, ranges, frozenset(to_digest), digest_parts)
        effects: list[MergeEffect] = []
        for pair, groups in peer.pairs.items():
            theirs = [r for r in ranges if groups is None or r.group in groups]
            if theirs or not ranges:
                sub_read = next(self._numbers) * (-1 if read_id < 0 else 1)
                read.sub_reads[sub_read] = pair.part
                groups_here = {r.group for r in theirs}
                wanted = [*to_digest] if is_only else [block for group in groups_here for block in digested[group]]
                read.shares_missing.update(wanted)
                effects.append(ReadPart(pair.part, sub_read, pair.agent, theirs, wanted, digest_parts))
        if not effects:
            return [Deliver(ReadFailed(read_id, TransferCause.REFUSED, f"{incarnation} has none of these layers"))]
        read.waiting = set(read.sub_reads)
        peer.reads += 1
        self._reads[read_id] = read
        self._sub_reads.update(dict.fromkeys(read.sub_reads, read))
        return effects

    def _digested_blocks(
        self, peer: _Peer, ranges: Sequence[ReadRange], wanted: frozenset[int], digest_parts: int
    ) -> dict[int, list[int]]:
        """The local sub-blocks of these ranges whose digests are wanted, by their group of layers."""
        # Without a layout the blocks of both sides have the same size.
        own_size = self._layout.block_size if self._layout is not None else 1
        sender_size = (self._layout is not None and peer.node.parts[0].block_size) or own_size
        each = digest_parts // max(1, own_size // sender_size)
        blocks: defaultdict[int, list[int]] = defaultdict(list)
        for r in ranges if wanted else ():
            span = range(r.local_block * each, (r.local_block + r.count) * each)
            blocks[r.group] += [block for block in span if block in wanted]
        return blocks

    def abandon(self, read_id: int) -> list[MergeEffect]:
        """Start no more of a read; an unknown one changes nothing."""
        read = self._reads.get(read_id)
        return [] if read is None else [AbandonPart(read.sub_reads[each], each) for each in sorted(read.waiting)]

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> list[MergeEffect]:
        """Fill a block of this group of layers in all parts that have such layers."""
        layout = self._layout
        parts = range(len(self._layers))
        if layout is not None:
            layers = layout.groups[group].layers
            parts_with = [part for part in parts if any(layer in self._layers[part] for layer in layers)]
        else:
            parts_with = list(parts)
        number = next(self._numbers)
        self._fills[number] = _Fill(fill_id, set(parts_with))
        return [FillPart(part, number, block, seed, group) for part in parts_with]

    # Answers of the parts.

    def said(self, part: int, event: MoverEvent) -> list[MergeEffect]:
        """Take an event of a part's mover."""
        match event:
            case Connected(agent):
                return self._pair_answered(_Pair(part, agent), None)
            case ConnectFailed(agent, error):
                return self._pair_answered(_Pair(part, agent), error)
            case BlockFilled(number, digests):
                return self._part_filled(part, number, digests, None)
            case FillFailed(number, detail):
                return self._part_filled(part, number, {}, detail)
        read = self._sub_reads.get(event.read_id)
        if read is None or read.sub_reads[event.read_id] != part:
            self.counters[f"{type(event).__name__}_unknown"] += 1
            return []
        match event:
            case BlocksDigested(_, digests):
                return self._digested(read, digests)
            case DigestsFailed(_, detail):
                return self._digests_failed(read, detail)
        if event.read_id not in read.waiting:
            self.counters[f"{type(event).__name__}_unknown"] += 1
            return []
        match event:
            case ReadStalled(_, detail):
                if read.is_stalled:
                    return []
                read.is_stalled = True
                return [Deliver(ReadStalled(read.read_id, detail))]
            case ReadDone() | ReadFailed():
                read.waiting.discard(event.read_id)
                return self._sub_read_done(read, event) if isinstance(event, ReadDone) else self._failed(read, event)

    def _sub_read_done(self, read: _Read, done: ReadDone) -> list[MergeEffect]:
        read.num_bytes += done.num_bytes
        read.num_descriptors += done.num_descriptors
        read.post_s, read.total_s = max(read.post_s, done.post_s), max(read.total_s, done.total_s)
        if read.waiting:
            read.machine.feed(MergeEvent.ONE_DONE)
            return []
        read.machine.feed(MergeEvent.LAST_DONE)
        return self._answer(read)

    def _failed(self, read: _Read, failed: ReadFailed) -> list[MergeEffect]:
        is_first, read.failure = read.failure is None, read.failure or failed
        if not read.waiting:
            read.machine.feed(MergeEvent.LAST_FAILED)
            return self._answer(read)
        read.machine.feed(MergeEvent.ONE_FAILED)
        return self.abandon(read.read_id) if is_first else []

    def _answer(self, read: _Read) -> list[MergeEffect]:
        """All sub-reads are over."""
        del self._reads[read.read_id]
        read.peer.reads -= 1
        self._forget_closed(read.peer)
        if read.machine.state is MergeState.DIGESTING and not read.shares_missing:
            read.machine.feed(MergeEvent.ALL_DIGESTED)
        self._forget_over(read)
        if read.failure is not None:
            return [Deliver(ReadFailed(read.read_id, read.failure.cause, read.failure.detail))]
        return [Deliver(ReadDone(read.read_id, read.num_bytes, read.post_s, read.total_s, read.num_descriptors))]

    def _digested(self, read: _Read, digests: Mapping[int, int]) -> list[MergeEffect]:
        if read.machine.state is MergeState.FAILING:
            return []
        missing, shares, complete = read.shares_missing, read.shares, dict[int, int]()
        for block, share in digests.items():
            still_missing = missing.pop(block, 0) - 1
            if still_missing < 0:
                continue
            total = (shares.pop(block, 0) + share) % DIGEST_MODULUS
            if still_missing:
                missing[block], shares[block] = still_missing, total
            else:
                complete[block] = total
        if not complete:
            return []
        read.machine.feed(MergeEvent.DIGESTED if missing else MergeEvent.ALL_DIGESTED)
        self._forget_over(read)
        return [Deliver(BlocksDigested(read.read_id, complete))]

    def _digests_failed(self, read: _Read, detail: str) -> list[MergeEffect]:
        if read.machine.state is MergeState.FAILING or not read.shares_missing:
            return []
        read.shares_missing.clear()
        read.shares.clear()
        read.machine.feed(MergeEvent.ALL_DIGESTED)
        self._forget_over(read)
        return [Deliver(DigestsFailed(read.read_id, detail))]

    def _forget_over(self, read: _Read) -> None:
        if read.machine.state is MergeState.OVER:
            for sub_read in read.sub_reads:
                del self._sub_reads[sub_read]

    def _part_filled(
        self, part: int, number: int, digests: Mapping[int, int], failure: str | None
    ) -> list[MergeEffect]:
        fill = self._fills.get(number)
        if fill is None or part not in fill.waiting:
            self.counters["fill_unknown"] += 1
            return []
        fill.waiting.discard(part)
        fill.failure = fill.failure or failure
        fill.shares.append(digests)
        if fill.waiting:
            return []
        del self._fills[number]
        if fill.failure is not None:
            return [Deliver(FillFailed(fill.fill_id, fill.failure))]
        keys = set.intersection(*(set(shares) for shares in fill.shares))
        sums = {key: sum(shares[key] for shares in fill.shares) % DIGEST_MODULUS for key in sorted(keys)}
        return [Deliver(BlockFilled(fill.fill_id, sums))]
