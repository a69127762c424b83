"""Memories that hold some layers of each block: what they give together is what one memory of all layers gives."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.runner import ELEMENT_BYTES, KVLayout, KVMemory, LayerGeometry, LayerGroup
from baton.errors import TransferCause, TransferFailed
from baton.runner.backends.cpu.kernel_file import KernelsUnavailable
from baton.runner.blocks import block_digests as block_digests_module
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.known_bytes import block_filler
from baton.runner.blocks.sub_blocks import Division
from kv_transfer.backends.base import PeerMemory, coalesce
from kv_transfer.layout import MAX_PARTS, part_name
from kv_transfer.piece_plan import PiecePlan, ReadRange

NUM_BLOCKS = 6
MODULUS = 1 << 64
GEOMETRIES = st.builds(
    LayerGeometry, st.sampled_from([1, 3, 8]), st.sampled_from([2, 6, 16]), st.sampled_from([0, 2, 6])
)


@st.composite
def layouts(draw: st.DrawFn, block_size: int | None = None) -> KVLayout:
    """Layouts of one to three groups, whose layers may differ, with scales or without."""
    layers = tuple(draw(st.lists(GEOMETRIES, min_size=1, max_size=6)))
    group_of = [draw(st.integers(0, 2)) for _ in layers]
    members = [tuple(layer for layer, of in enumerate(group_of) if of == group) for group in range(3)]
    groups = tuple(LayerGroup(each, 5 * number or None) for number, each in enumerate(members) if each)
    size = draw(st.sampled_from([16, 32])) if block_size is None else block_size
    return KVLayout(size, layers, draw(st.sampled_from(["float32", "bfloat16", "int8"])), groups)


@st.composite
def divisions(draw: st.DrawFn, num_layers: int) -> list[range | None]:
    """The layers of each memory of a node: all in one, or neighbouring ranges."""
    cuts = sorted(draw(st.sets(st.integers(0, num_layers - 1), max_size=3)) - {0})
    return draw(st.sampled_from([[None], list(itertools.starmap(range, itertools.pairwise([0, *cuts, num_layers])))]))


@dataclass
class Part:
    """One memory of a node, and the bytes of its blocks."""

    memory: KVMemory
    content: bytearray

    @classmethod
    def new(cls, layout: KVLayout, layers: range | None, fill: bytes | None = None) -> Part:
        size = (layout if layers is None else layout.part(layers)).block_bytes
        content = bytearray(fill or bytes(NUM_BLOCKS * size))
        owner = (ctypes.c_char * len(content)).from_buffer(content)
        address = ctypes.addressof(owner)
        return cls(KVMemory(address, NUM_BLOCKS, size, "DRAM", 0, owner, layout=layout, layers=layers), content)

    @property
    def layers(self) -> range:
        assert self.memory.layout is not None
        return range(self.memory.layout.num_layers) if self.memory.layers is None else self.memory.layers

    def place(self, block: int, layer: int) -> slice:
        """By the layout's own words: where a layer lies in the memory, in a block of its group."""
        layout, held = self.memory.layout, self.memory.layers
        assert layout is not None
        element = ELEMENT_BYTES[layout.dtype]
        [group] = [group for group in layout.groups if layer in group.layers]
        before = [each for each in group.layers if each < layer and (held is None or each in held)]
        at = block * self.memory.block_bytes + sum(layout.layer_elements(each) for each in before) * element
        return slice(at, at + layout.layer_elements(layer) * element)

    def sub_block(self, number: int, parts: int, layer: int) -> npt.NDArray[np.int64]:
        """By the layout's own words: the offsets of the bytes that a sub-block has of a layer, in their own order."""
        layout, found = self.memory.layout, []
        assert layout is not None
        (block, index), tokens = divmod(number, parts), layout.block_size // parts
        geometry, element, at = layout.layers[layer], ELEMENT_BYTES[layout.dtype], self.place(block, layer).start
        assert isinstance(geometry, LayerGeometry)
        widths = (geometry.key_dim * element, geometry.value_dim * element, *((2, 2) if layout.has_scales else ()))
        for width in widths:
            shape = (geometry.num_kv_heads, layout.block_size, width)
            offsets = at + np.arange(math.prod(shape)).reshape(shape)
            found.append(offsets[:, index * tokens : (index + 1) * tokens].ravel())
            at += math.prod(shape)
        return np.concatenate(found)


def node_of(layout: KVLayout, divided: Sequence[range | None], rng: Random) -> list[Part]:
    """A node whose blocks hold random bytes, those that no layer uses included."""
    return [
        Part.new(layout, layers, rng.randbytes(NUM_BLOCKS * (layout.part(layers) if layers else layout).block_bytes))
        for layers in divided
    ]


def copy_by_layer(source: Sequence[Part], target: Sequence[Part]) -> None:
    """Give the blocks of a node the KV of those of another node, whose blocks have the same size."""
    layout = source[0].memory.layout
    assert layout is not None
    for block in range(NUM_BLOCKS):
        for layer in layout.groups[block % len(layout.groups)].layers:
            (_, of), (_, to) = part_with(layer, source), part_with(layer, target)
            to.content[to.place(block, layer)] = of.content[of.place(block, layer)]


def no_kernels() -> ctypes.CDLL:
    raise KernelsUnavailable("not built")


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 16]), st.integers(0, 2**32))
def test_the_digests_of_a_nodes_parts_add_up_to_those_of_one_memory(data: st.DataObject, parts: int, seed: int) -> None:
    layout, rng = data.draw(layouts()), Random(seed)
    [whole] = node_of(layout, [None], rng)
    divided = node_of(layout, data.draw(divisions(layout.num_layers)), rng)
    copy_by_layer([whole], divided)
    for group in range(len(layout.groups)):
        blocks = range(group, NUM_BLOCKS, len(layout.groups))
        ids = [block * parts + part for block in blocks for part in range(parts)]
        expected = block_digests(whole.memory)(ids, Division(parts, group))
        found = [block_digests(part.memory)(ids, Division(parts, group)) for part in divided]
        assert [sum(of) % MODULUS for of in zip(*found, strict=True)] == expected
        # What two readers' parts get of one sender's.
        cut = data.draw(st.integers(0, layout.num_layers))
        ranges = range(cut), range(cut, layout.num_layers)
        for part in divided:
            digests, memory = block_digests(part.memory), part.memory
            some = [digests(ids, Division(parts, group, each)) for each in ranges]
            assert [sum(of) % MODULUS for of in zip(*some, strict=True)] == digests(ids, Division(parts, group))
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(block_digests_module, "open_kernels", no_kernels)
                assert block_digests(memory)(ids, Division(parts, group, ranges[0])) == some[0]


def test_parts_on_a_device_are_digested_as_in_host_memory() -> None:
    layers = (LayerGeometry(8, 16, 16),) * 4
    layout = KVLayout(16, layers, "bfloat16", (LayerGroup((0, 2)), LayerGroup((1, 3), 5)))
    [part] = node_of(layout, [range(1, 4)], Random(1))
    cache = torch.frombuffer(part.content, dtype=torch.uint8)
    # Nothing lies at its address.
    on_device = KVMemory(1, NUM_BLOCKS, part.memory.block_bytes, "VRAM", 0, cache, layout=layout, layers=range(1, 4))
    for division in (Division(), Division(1, 1), Division(2, 1, range(2, 4)), Division(4, 0, range(2))):
        ids = [5, 0, 3]
        assert block_digests(on_device)(ids, division) == block_digests(part.memory)(ids, division)


@pytest.mark.parametrize("divided", [[None], [range(3), range(3, 4)], [range(1), range(1, 2), range(2, 4)]])
def test_known_bytes_of_a_nodes_parts_have_the_digests_that_a_reader_of_all_layers_finds(
    divided: list[range | None],
) -> None:
    layout = KVLayout(8, (LayerGeometry(8, 16, 16),) * 4, "float32", (LayerGroup((0, 1, 3)), LayerGroup((2,), 5)))
    sender = node_of(layout, divided, Random(2))
    fillers = [block_filler(part.memory) for part in sender]
    found = [fill(0, "seed") for fill in fillers]
    # Layer 2, the only one of the second group, is in one part.
    holders = (fill for fill, part in zip(fillers, divided, strict=True) if part is None or 2 in part)
    of_second = [fill(1, "seed", 1) for fill in holders]
    [reader] = node_of(layout, [None], Random(3))
    copy_by_layer(sender, [reader])
    assert all(of.keys() == {1, 2, 4, 8} for of in found)
    for parts in (1, 2, 4, 8):
        [expected] = block_digests(reader.memory)([parts - 1], Division(parts))
        assert sum(of[parts] for of in found) % MODULUS == expected
        [expected] = block_digests(reader.memory)([2 * parts - 1], Division(parts, 1))
        assert [of[parts] for of in of_second] == [expected]
    # Each part has bytes of its own.
    assert len({bytes(part.content[: 8 * 32 * 8]) for part in sender}) == len(divided)


# Pieces


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([(16, 16), (16, 32), (32, 16)]), st.integers(0, 2**32))
def test_the_pieces_of_all_pairs_move_each_byte_of_each_layer_once(
    data: st.DataObject, sizes: tuple[int, int], seed: int
) -> None:
    layout, rng = data.draw(layouts(sizes[0])), Random(seed)
    reader = node_of(layout, data.draw(divisions(layout.num_layers)), rng)
    sender = node_of(replace(layout, block_size=sizes[1]), data.draw(divisions(layout.num_layers)), rng)
    local_parts, remote_parts = sizes[0] // min(sizes), sizes[1] // min(sizes)
    moves = [
        (block * local_parts + rng.randrange(local_parts), rng.randrange(NUM_BLOCKS * remote_parts), group)
        for block, group in ((block, rng.randrange(len(layout.groups))) for block in range(1, NUM_BLOCKS))
    ]
    expected = [np.frombuffer(bytes(part.content), np.uint8).copy() for part in reader]
    to_write = [np.zeros(len(part.content), np.int64) for part in reader]
    for local, remote, layer in ((to, at, layer) for to, at, group in moves for layer in layout.groups[group].layers):
        (mine, ours), (_, theirs) = part_with(layer, reader), part_with(layer, sender)
        source = np.frombuffer(theirs.content, np.uint8)[theirs.sub_block(remote, remote_parts, layer)]
        expected[mine][ours.sub_block(local, local_parts, layer)] = source
        to_write[mine][ours.sub_block(local, local_parts, layer)] = 1
    written = [np.zeros(len(part.content), np.int64) for part in reader]
    ranges = coalesce(*zip(*moves, strict=True))
    for (mine, ours), theirs in itertools.product(enumerate(reader), sender):
        plan = plan_of_pair(ours, theirs)
        if plan is None:
            continue
        pieces = plan.pieces(ranges)
        assert (plan.count_pieces(ranges), plan.num_bytes(ranges)) == (len(pieces), pieces.lengths.sum())
        for each in ranges:
            assert plan.count_pieces([each]) <= each.count * plan.max_pieces
            assert plan.num_bytes([each]) <= each.count * plan.sub_block_bytes
        for to, at, length in zip(pieces.local.tolist(), pieces.remote.tolist(), pieces.lengths.tolist(), strict=True):
            ours.content[to : to + length] = theirs.content[at : at + length]
            written[mine][to : to + length] += 1
    for mine, ours in enumerate(reader):
        is_kv = to_write[mine] > 0
        assert (np.frombuffer(ours.content, np.uint8) == expected[mine])[is_kv].all()
        assert (written[mine] == 1)[is_kv].all()
        if sizes[0] != sizes[1] or ours.layers not in [theirs.layers for theirs in sender]:
            assert not written[mine][~is_kv].any()
        else:
            # Whole blocks, with what their groups don't use.
            assert written[mine].sum() == (NUM_BLOCKS - 1) * ours.memory.block_bytes


def part_with(layer: int, node: Sequence[Part]) -> tuple[int, Part]:
    """The number of the part that holds a layer, and that part."""
    [found] = [(number, part) for number, part in enumerate(node) if layer in part.layers]
    return found


def plan_of_pair(ours: Part, theirs: Part) -> PiecePlan | None:
    """How a part reads from another; None where they have no layer in common, which must be refused."""
    peer = PeerMemory.of(theirs.memory, "sender", b"agent")
    common = [layer for layer in ours.layers if layer in theirs.layers]
    if common:
        plan = peer.plan_for(ours.memory)
        assert list(plan.common_layers) == common
        return plan
    with pytest.raises(TransferFailed, match="has none of layers") as caught:
        peer.plan_for(ours.memory)
    assert caught.value.cause is TransferCause.LAYOUT_MISMATCH
    return None


def test_between_equal_sizes_a_block_is_one_piece_of_the_layers_in_common() -> None:
    layout = KVLayout(16, (LayerGeometry(2, 8, 8),) * 6, "float32", (LayerGroup((0, 2, 4)), LayerGroup((1, 3, 5), 5)))
    each = layout.layer_elements(0) * 4
    plan = PiecePlan.between(layout, 16, range(2, 6), range(4))
    assert (plan.common_layers, plan.sub_block_bytes, plan.max_pieces) == (range(2, 4), each, 1)
    ranges = [ReadRange(1, 5, 2), ReadRange(3, 1, 1, group=1)]
    pieces = plan.pieces(ranges)
    assert pieces.local.tolist() == [2 * each, 4 * each, 6 * each]
    assert pieces.remote.tolist() == [(2 * 5 + 1) * each, (2 * 6 + 1) * each, (2 * 1 + 1) * each]
    assert pieces.lengths.tolist() == [each] * 3
    assert (plan.count_pieces(ranges), plan.num_bytes(ranges)) == (3, 3 * each)


def test_equal_parts_move_whole_blocks() -> None:
    layout = KVLayout.uniform(16, num_layers=6, num_kv_heads=2, head_dim=8, dtype="float32")
    plan = PiecePlan.between(layout, 16, range(2, 5), range(2, 5))
    size = layout.block_bytes // 2
    assert plan == PiecePlan.of_equal_blocks(size, range(2, 5))
    assert plan.pieces([ReadRange(1, 4, 3)]).lengths.tolist() == [3 * size]


@pytest.mark.parametrize("sender_size", [16, 32])
def test_of_a_group_without_common_layers_nothing_is_moved(sender_size: int) -> None:
    layout = KVLayout(16, (LayerGeometry(2, 8, 8),) * 4, "float32", (LayerGroup((0, 1)), LayerGroup((2, 3), 5)))
    plan = PiecePlan.between(layout, sender_size, range(3), range(2, 4))
    ranges = [ReadRange(3, 4, 2)]
    assert (plan.count_pieces(ranges), plan.num_bytes(ranges), len(plan.pieces(ranges))) == (0, 0, 0)
    both = [*ranges, ReadRange(5, 6, 1, group=1)]
    assert plan.num_bytes(both) == plan.pieces(both).lengths.sum() == layout.layer_elements(2) * 4


@pytest.mark.parametrize(
    ("layers", "cause"),
    [
        (range(-1, 2), TransferCause.REFUSED),
        (range(5), TransferCause.REFUSED),
        (range(4, 5), TransferCause.REFUSED),
        (range(2, 2), TransferCause.REFUSED),
        (range(3, 1), TransferCause.REFUSED),
        (range(0, 4, 2), TransferCause.REFUSED),
        (range(3, 0, -1), TransferCause.REFUSED),
        (range(10**30), TransferCause.REFUSED),
        (range(2), TransferCause.LAYOUT_MISMATCH),
        # Its blocks have the size of two layers.
        (range(2, 3), TransferCause.LAYOUT_MISMATCH),
        (None, TransferCause.LAYOUT_MISMATCH),
    ],
)
def test_layers_that_a_peer_can_not_have_are_refused(layers: range | None, cause: TransferCause) -> None:
    layout = KVLayout.uniform(16, num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
    ours = Part.new(layout, range(2, 4))
    peer = PeerMemory.of(ours.memory, "sender", b"agent")
    assert peer.plan_for(ours.memory).common_layers == range(2, 4)
    with pytest.raises(TransferFailed) as caught:
        replace(peer, layers=layers).plan_for(ours.memory)
    assert caught.value.cause is cause


def test_the_agent_of_a_part_may_have_a_longer_name_than_any_node() -> None:
    layout = KVLayout.uniform(16, num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
    ours, longest = Part.new(layout, range(2, 4)), part_name("x" * 128, MAX_PARTS - 1)
    assert PeerMemory.of(ours.memory, longest, b"agent").plan_for(ours.memory).common_layers == range(2, 4)
    with pytest.raises(TransferFailed, match="length of the incarnation"):
        PeerMemory.of(ours.memory, longest + "x", b"agent").plan_for(ours.memory)


def test_without_a_layout_only_equal_layers_can_be_read() -> None:
    ours = replace(Part.new(KVLayout.uniform(16, 4, 2, 8, "float32"), None).memory, layout=None)
    peer = PeerMemory.of(ours, "sender", b"agent")
    assert peer.plan_for(ours).common_layers == range(1)
    with pytest.raises(TransferFailed, match="layout is not known") as caught:
        replace(peer, layers=range(2)).plan_for(ours)
    assert caught.value.cause is TransferCause.LAYOUT_MISMATCH
