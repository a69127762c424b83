"""One suite over the movers of nodes in parts: divided equally and unequally, in this process and over a stream, with
the in-process fake and with NIXL. What arrives, and its digests, are those of blocks that are not divided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from baton.engine.runner import KVLayout, KVMemory, LayerGeometry, LayerGroup
from baton.errors import TransferCause
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.sub_blocks import Division
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.layout import part_name
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    Connected,
    ConnectFailed,
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
)
from kv_transfer.piece_plan import ReadRange
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.support.node_parts import PartsNode, layer_of

WIDTHS = (8, 16, 24, 8, 40, 16)
GROUPS = (LayerGroup((0, 1, 3, 4)), LayerGroup((2, 5), 64))
LAYOUT = KVLayout(8, tuple(LayerGeometry(2, width, width + 8) for width in WIDTHS), "float32", GROUPS)
NUM_BLOCKS = 24
PROBE = NUM_BLOCKS
WHOLE = (range(6),)
IN_TWO = (range(3), range(3, 6))
IN_THREE = (range(2), range(2, 5), range(5, 6))
LIVES = (f"life{n}" for n in itertools.count())


@dataclass(frozen=True)
class Shape:
    """How a reader and a sender are divided, and which parts of the reader are over a stream."""

    ours: Sequence[range]
    theirs: Sequence[range]
    remote: Sequence[int] = ()


SHAPES = {
    "one": Shape(WHOLE, WHOLE),
    "two": Shape(IN_TWO, IN_TWO),
    "two-of-one": Shape(IN_TWO, WHOLE),
    "one-of-two": Shape(WHOLE, IN_TWO),
    "two-of-three": Shape(IN_TWO, IN_THREE),
    "two-with-a-stream": Shape(IN_TWO, IN_TWO, (1,)),
    "three-of-two-with-streams": Shape(IN_THREE, IN_TWO, (1, 2)),
}


class Pair:
    """A sender and a reader that is connected to it."""

    def __init__(
        self,
        shape: Shape,
        kind: str,
        sender_block_size: int = LAYOUT.block_size,
        layout: KVLayout = LAYOUT,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        life = next(LIVES)
        self.kind = kind
        self.fabric = FakeTransferFabric(sender_must_pump=True)
        self.sender = PartsNode(
            f"p.{life}", replace(layout, block_size=sender_block_size), shape.theirs, num_blocks, self._make_backend
        )
        self.reader = PartsNode(f"d.{life}", layout, shape.ours, num_blocks, self._make_backend, shape.remote)
        self.name = self.sender.incarnation
        self.sender.fill(seed=1)
        self.sender.mover.set_num_readers(1)
        self.connect()

    def _make_backend(self, agent: str, memory: KVMemory) -> TransferBackend:
        return FakeTransferBackend(self.fabric, agent, memory) if self.kind == "fake" else NixlBackend(agent, memory)

    def connect(self) -> None:
        self.reader.mover.connect(self.sender.node)
        assert self.reader.events.next() == Connected(self.name)

    def freeze(self, part: int) -> None:
        self.fabric.freeze(part_name(self.name, part))

    def thaw(self, part: int) -> None:
        self.fabric.thaw(part_name(self.name, part))

    def read(self, read_id: int, pairs: Sequence[tuple[int, int]], to_digest: Sequence[int] = ()) -> None:
        """Read these blocks (local, remote), which are of the same group on both sides."""
        ranges = [ReadRange(local, remote, 1, self.reader.group_of(local)) for local, remote in pairs]
        self.reader.mover.read(read_id, self.name, ranges, to_digest)

    def outcome(self, num_digests: int = 0, num_reads: int = 1) -> tuple[list[MoverEvent], dict[int, int]]:
        """The answers to so many reads, and so many digests."""
        answers: list[MoverEvent] = []
        digests: dict[int, int] = {}
        while len(answers) < num_reads or len(digests) < num_digests:
            event = self.reader.events.next()
            if isinstance(event, BlocksDigested):
                assert not digests.keys() & event.digests.keys()
                digests |= event.digests
            else:
                answers.append(event)
        return answers, digests

    def close(self) -> None:
        for part in range(len(self.sender.memories)):
            if self.kind == "fake":
                self.thaw(part)
        self.reader.close()
        self.sender.close()


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture
def pairs_of() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args: object, **kwargs: object) -> Pair:
        made.append(Pair(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(shape: Shape, pairs_of: Callable[..., Pair]) -> Pair:
    return pairs_of(shape, "fake")


@pytest.mark.parametrize("kind", ["fake", "nixl"])
def test_what_arrives_and_its_digests_are_those_of_undivided_blocks(
    shape: Shape, kind: str, pairs_of: Callable[..., Pair]
) -> None:
    pair = pairs_of(shape, kind)
    # Neighbours in both groups, and blocks that are alone.
    pairs = [(local, (local + 4) % NUM_BLOCKS) for local in (0, 1, 2, 3, 8, 11, 20)]
    pair.read(1, pairs, [local for local, _ in pairs if local != 8])
    (done,), digests = pair.outcome(len(pairs) - 1)
    assert isinstance(done, ReadDone)
    theirs, ours = pair.sender.whole, pair.reader.gather()
    num_bytes = 0
    for local, remote in pairs:
        group = pair.reader.group_of(local)
        for layer in GROUPS[group].layers:
            assert layer_of(ours, local, group, layer) == layer_of(theirs, remote, group, layer)
            num_bytes += len(layer_of(ours, local, group, layer))
        if local != 8:
            (digest,) = block_digests(theirs)([remote], Division(1, group))
            assert digests[local] == digest
            assert list(pair.sender.digests([remote], Division(1, group))) == [digest]
    # Between memories of the same layers blocks are moved whole, with bytes that a group leaves unused.
    assert done.num_bytes >= num_bytes
    assert layer_of(ours, 4, 0, 0) == bytes(len(layer_of(ours, 4, 0, 0))), "nobody asked for it"


@pytest.mark.parametrize("kind", ["fake", "nixl"])
@pytest.mark.parametrize("sender_block_size", [4, 16])
def test_blocks_of_another_size_are_divided_among_parts_too(
    kind: str, sender_block_size: int, pairs_of: Callable[..., Pair]
) -> None:
    layout = KVLayout(8, LAYOUT.layers, "float32")
    pair = pairs_of(SHAPES["three-of-two-with-streams"], kind, sender_block_size, layout)
    mover, parts = pair.reader.mover, max(1, 8 // sender_block_size)
    mover.read(1, pair.name, [ReadRange(4, 6, 4)], (4, 5, 6, 7), parts)
    (done,), digests = pair.outcome(4)
    assert isinstance(done, ReadDone)
    theirs = block_digests(pair.sender.whole)([6, 7, 8, 9], Division(max(1, sender_block_size // 8)))
    assert [digests[block] for block in (4, 5, 6, 7)] == theirs
    assert block_digests(pair.reader.gather())([4, 5, 6, 7], Division(parts)) == theirs


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("kind", ["fake", "nixl"])
def test_known_bytes_of_all_parts_are_probed(
    shape: Shape, kind: str, group: int, pairs_of: Callable[..., Pair]
) -> None:
    pair = pairs_of(shape, kind)
    pair.sender.mover.fill(-1, PROBE, "theirs", group)
    pair.reader.mover.fill(-1, PROBE + 1, "ours", group)
    theirs, ours = pair.sender.events.next_of(BlockFilled), pair.reader.events.next_of(BlockFilled)
    assert theirs.digests[1] != ours.digests[1]
    pair.reader.mover.read(-1, pair.name, [ReadRange(PROBE + 1, PROBE, 1, group)], (PROBE + 1,))
    (done,), digests = pair.outcome(1)
    assert isinstance(done, ReadDone)
    assert done.read_id == -1
    assert digests == {PROBE + 1: theirs.digests[1]}
    assert list(pair.sender.digests([PROBE], Division(1, group))) == [theirs.digests[1]]


def test_many_reads_are_each_answered_once(pair: Pair) -> None:
    for read_id in range(1, 21):
        pair.read(read_id, [(read_id, read_id)], (read_id,))
    answers, digests = pair.outcome(20, 20)
    assert {answer.read_id for answer in answers if isinstance(answer, ReadDone)} == set(range(1, 21))
    assert len(digests) == 20
    assert pair.reader.mover.figures.reads_in_flight == 0


def test_an_unknown_peer_is_gone(pair: Pair) -> None:
    pair.reader.mover.read(1, "nobody", [ReadRange(0, 0, 1)])
    assert pair.reader.events.failure() == (1, TransferCause.PEER_GONE)
    pair.reader.mover.disconnect("nobody")
    pair.reader.mover.abandon(1)


def test_ranges_that_do_not_fit_are_refused(pair: Pair) -> None:
    pair.reader.mover.read(1, pair.name, [ReadRange(0, 0, 1), ReadRange(1, NUM_BLOCKS + 2, 1)])
    assert pair.reader.events.failure() == (1, TransferCause.REFUSED)
    pair.read(1, [(2, 2)])
    pair.reader.events.next_of(ReadDone)


def test_a_read_waits_for_the_slowest_part(pair: Pair) -> None:
    last = len(pair.sender.memories) - 1
    pair.freeze(last)
    pair.read(1, [(n, n) for n in range(8)])
    pair.read(2, [(9, 9)])
    # Each mover has posted what it was told before it answers the second call: it posts behind the calls of a turn.
    pair.connect()
    pair.connect()
    assert pair.reader.events.empty()
    assert pair.reader.mover.figures.reads_in_flight > 0
    pair.reader.mover.abandon(2)
    pair.thaw(last)
    answers, _ = pair.outcome(num_reads=2)
    assert {answer.read_id for answer in answers if isinstance(answer, ReadDone | ReadFailed)} == {1, 2}
    assert pair.reader.mover.figures.reads_in_flight == 0


def test_a_peer_of_which_one_part_is_killed_is_gone_once(pair: Pair) -> None:
    """Nothing is answered before the other parts have ended: their reads may still write."""
    last = len(pair.sender.memories) - 1
    for part in range(last + 1):
        pair.freeze(part)
    pair.read(1, [(n, n) for n in range(8)])
    pair.connect()
    pair.fabric.kill(part_name(pair.name, last))
    for part in range(last + 1):
        pair.thaw(part)
    assert pair.reader.events.failure() == (1, TransferCause.PEER_GONE)
    assert pair.reader.mover.figures.reads_in_flight == 0
    pair.reader.mover.connect(pair.sender.node)
    assert pair.reader.events.next_of(ConnectFailed).error.cause is TransferCause.PEER_GONE
    assert pair.reader.events.empty()


def test_a_peer_is_disconnected_and_connected_again(pair: Pair) -> None:
    pair.reader.mover.disconnect(pair.name)
    pair.read(1, [(0, 0)])
    pair.reader.events.next_of(ReadFailed)
    pair.connect()
    pair.connect()
    pair.read(1, [(0, 0)])
    pair.reader.events.next_of(ReadDone)


def test_a_peer_that_changed_its_memory_is_refused(pair: Pair) -> None:
    node = pair.sender.node
    changed = replace(node, parts=[replace(part, num_blocks=1) for part in node.parts])
    pair.reader.mover.connect(changed)
    assert pair.reader.events.next_of(ConnectFailed).error.cause is TransferCause.REFUSED
    pair.read(1, [(0, 0)])
    pair.reader.events.next_of(ReadDone)


@pytest.mark.parametrize("change", [{"num_blocks": 0}, {"base_address": 0}, {"kind": "DISK"}, {"block_bytes": 8}])
def test_a_part_out_of_bounds_connects_none(pair: Pair, change: dict[str, object]) -> None:
    pair.reader.mover.disconnect(pair.name)
    *others, last = pair.sender.node.parts
    pair.reader.mover.connect(replace(pair.sender.node, parts=[*others, replace(last, **change)]))  # type: ignore[arg-type]
    pair.reader.events.next_of(ConnectFailed)
    pair.read(1, [(0, 0)])
    pair.reader.events.next_of(ReadFailed)
    pair.connect()
    pair.read(1, [(0, 0)])
    pair.reader.events.next_of(ReadDone)


def test_stop_answers_everything_later_at_once(pair: Pair) -> None:
    pair.reader.mover.stop()
    pair.read(3, [(0, 0)])
    assert pair.reader.events.failure() == (3, TransferCause.CANCELLED)
    pair.reader.mover.connect(pair.sender.node)
    pair.reader.events.next_of(ConnectFailed)
    pair.reader.mover.fill(1, PROBE, "seed")
    assert pair.reader.events.next_of(FillFailed).fill_id == 1
