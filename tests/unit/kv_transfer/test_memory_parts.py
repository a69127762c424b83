"""Memories that hold some layers of each block: what they give together is what one memory of all layers gives."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.runner import ELEMENT_BYTES, KVLayout, KVMemory, LayerGeometry, LayerGroup
from baton.runner.backends.cpu.kernel_file import KernelsUnavailable
from baton.runner.blocks import block_digests as block_digests_module
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.known_bytes import block_filler
from baton.runner.blocks.sub_blocks import Division

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

    def place(self, block: int, layer: int) -> slice:
        """By the layout's own words: where a layer lies in the memory, in a block of its group."""
        layout, held = self.memory.layout, self.memory.layers
        assert layout is not None
        element = ELEMENT_BYTES[layout.dtype]
        [group] = [group for group in layout.groups if layer in group.layers]
        before = [each for each in group.layers if each < layer and (held is None or each in held)]
        at = block * self.memory.block_bytes + sum(layout.layer_elements(each) for each in before) * element
        return slice(at, at + layout.layer_elements(layer) * element)


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
            [of], [to] = ([p for p in parts if layer in (p.memory.layers or range(99))] for parts in (source, target))
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
    found = [block_filler(part.memory)(0, "seed") for part in sender]
    [reader] = node_of(layout, [None], Random(3))
    copy_by_layer(sender, [reader])
    assert all(of.keys() == {1, 2, 4, 8} for of in found)
    for parts in (1, 2, 4, 8):
        [expected] = block_digests(reader.memory)([parts - 1], Division(parts))
        assert sum(of[parts] for of in found) % MODULUS == expected
    # Each part has bytes of its own.
    assert len({bytes(part.content[: 8 * 32 * 8]) for part in sender}) == len(divided)
