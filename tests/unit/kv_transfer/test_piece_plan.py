"""The plan of pieces: every byte of every token is moved once, to its place in blocks of another size."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.runner import KVLayout, LayerGeometry, LayerGroup
from baton.messages.ids import AttemptKey, Peer
from baton.messages.kv_cache import NULL_BLOCK
from baton.runner.blocks.sub_blocks import Division, sub_block_rows
from kv_transfer.backends.base import coalesce
from kv_transfer.piece_plan import PiecePlan, ReadRange
from kv_transfer.receiver.block_map import BlockMap
from kv_transfer.receiver.transfer_values import TransferPlan

GROUPS = (LayerGroup((0, 2)), LayerGroup((1,), 5))
LAYERS = (LayerGeometry(2, 3, 2), LayerGeometry(1, 4, 4), LayerGeometry(3, 2, 0))
PLAN = TransferPlan(AttemptKey("a", 1), Peer("p0", "p0.x", "h:1"), 0, (), 0)
Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


def layouts(block_size: int) -> list[KVLayout]:
    """Layouts of this block size: one group, two groups of different layers, and a cache in 8 bits."""
    return [
        KVLayout(block_size, LAYERS, "float32"),
        KVLayout(block_size, LAYERS, "bfloat16", GROUPS),
        KVLayout(block_size, LAYERS, "int8", GROUPS),
    ]


def token_bytes(layout: KVLayout, group: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """By the layout's own words: for each token of a block, the offsets of all its bytes: [block_size, bytes]."""
    size, element = layout.block_size, {"float32": 4, "bfloat16": 2, "int8": 1}[layout.dtype]
    at, columns = 0, []
    for layer in layout.groups[group].layers:
        geometry = layout.layers[layer]
        assert isinstance(geometry, LayerGeometry)
        heads, key, value = geometry.num_kv_heads, geometry.key_dim, geometry.value_dim
        for width in (key * element, value * element, *((2, 2) if layout.has_scales else ())):
            offsets = at + np.arange(heads * size * width).reshape(heads, size, width)
            columns.append(offsets.transpose(1, 0, 2).reshape(size, -1))
            at += heads * size * width
    return np.concatenate(columns, axis=1)


class Cache:
    """The memory of a node, in which each byte says of which token of which group it is."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.memory = np.zeros(num_blocks * layout.block_bytes, np.int64)

    def places(self, block: int, group: int, offset: int) -> Offsets:
        inside: Offsets = token_bytes(self.layout, group)[offset]
        return block * self.layout.block_bytes + inside

    def token(self, table: list[int], group: int, position: int) -> Offsets:
        stripe, offset = divmod(position, self.layout.block_size)
        return self.places(table[stripe * len(self.layout.groups) + group], group, offset)


def known(group: int, position: int, count: int) -> Offsets:
    return np.arange(1, count + 1) + 1000 * (position + 1) + 1_000_000 * group


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, st.integers(1, 40), st.integers(0, 2), st.integers(0, 8), st.randoms(use_true_random=False))
def test_every_byte_of_every_token_is_moved_once_to_its_place(
    sender_size: int, reader_size: int, num_tokens: int, which: int, hits: int, rng: Random
) -> None:
    small, large = sorted((sender_size, reader_size))
    if large % small:
        with pytest.raises(ValueError, match="don't fit"):
            PiecePlan.between(layouts(reader_size)[which], sender_size)
        return
    layout = layouts(reader_size)[which]
    sender, reader = Cache(replace(layout, block_size=sender_size), 100), Cache(layout, 100)
    groups = range(len(layout.groups))
    tables = []
    for cache in (sender, reader):
        size = cache.layout.block_size
        table = rng.sample(range(1, 100), -(-num_tokens // size) * len(groups))
        for group, layers in enumerate(layout.groups):
            # What no query from the last token on sees is not there.
            gone = max(0, num_tokens - layers.window) // size if layers.window else 0
            for stripe in range(gone):
                table[stripe * len(groups) + group] = NULL_BLOCK
        tables.append(table)
    theirs, ours = tables
    count = {group: token_bytes(layout, group).shape[1] for group in groups}
    for group in groups:
        for position in range(num_tokens):
            sender.memory[sender.token(theirs, group, position)] = known(group, position, count[group])
    first_stripe = min(hits, (num_tokens - 1) // reader_size)
    plan = replace(PLAN, num_prompt_tokens=num_tokens, block_ids=tuple(ours), first_block=first_stripe * len(groups))
    view = BlockMap(sender_size, reader_size, layout.windows).view(plan)
    assert view.num_blocks == len(theirs)
    local, remote, group_of = [], [], []
    first = view.first_block
    while first < view.num_blocks:
        # Offers come in parts, as the prompt is computed.
        end = min(view.num_blocks, first + rng.randint(1, 8))
        for each, remote_sub_block, group in view.reads(first, theirs[first:end]):
            local.append(each)
            remote.append(remote_sub_block)
            group_of.append(group)
        assert [bool(wanted) for wanted in view.wanted(first, end)] == [
            any(view.local[entry * view.sizes.sender_parts + part] for part in range(view.sizes.sender_parts))
            for entry in range(first, end)
        ]
        assert all(
            block != NULL_BLOCK
            for wanted, block in zip(view.wanted(first, end), theirs[first:end], strict=True)
            if wanted
        )
        first = end
    to_read, pair = coalesce(local, remote, group_of), PiecePlan.between(layout, sender_size)
    pieces = pair.pieces(to_read)
    assert pair.count_pieces(to_read) == len(pieces)
    assert pair.num_bytes(to_read) == pieces.lengths.sum()
    written = np.zeros(len(reader.memory), np.int64)
    rows = zip(pieces.local.tolist(), pieces.remote.tolist(), pieces.lengths.tolist(), strict=True)
    for to, at, length in rows:
        reader.memory[to : to + length] = sender.memory[at : at + length]
        written[to : to + length] += 1
    assert written.max(initial=0) <= 1
    mine = np.zeros(len(reader.memory), np.bool_)
    for block in ours[first_stripe * len(groups) :]:
        if block != NULL_BLOCK:
            mine[block * layout.block_bytes : (block + 1) * layout.block_bytes] = True
    assert not written[~mine].any()
    for group, layers in enumerate(layout.groups):
        seen = max(0, num_tokens - layers.window) if layers.window else 0
        for position in range(max(seen, first_stripe * reader_size), num_tokens):
            place = reader.token(ours, group, position)
            assert (written[place] == 1).all()
            assert reader.memory[place].tolist() == known(group, position, count[group]).tolist()
    # What other requests can't use is named: blocks that have a token of the prompt without its bytes.
    lacking = [
        entry
        for entry in range(first_stripe * len(groups), len(ours))
        if ours[entry] != NULL_BLOCK
        for stripe, group in [divmod(entry, len(groups))]
        if any(
            not written[reader.token(ours, group, position)].all()
            for position in range(stripe * reader_size, min(num_tokens, (stripe + 1) * reader_size))
        )
    ]
    assert sorted(view.partly_filled) == lacking


def test_between_equal_sizes_a_range_is_one_piece() -> None:
    layout = layouts(16)[1]
    size = layout.block_bytes
    plan = PiecePlan.between(layout, 16)
    assert (plan.sub_block_bytes, plan.max_pieces, plan.local_parts, plan.remote_parts) == (size, 1, 1, 1)
    ranges = [ReadRange(3, 7, 5), ReadRange(1, 2, 1, group=1)]
    pieces = plan.pieces(ranges)
    assert pieces.local.tolist() == [3 * size, size]
    assert pieces.remote.tolist() == [7 * size, 2 * size]
    assert pieces.lengths.tolist() == [5 * size, size]
    assert (plan.count_pieces(ranges), plan.num_bytes(ranges)) == (2, 6 * size)


def test_between_equal_sizes_neighbours_of_different_groups_are_one_piece() -> None:
    plan = PiecePlan.between(layouts(16)[1], 16)
    ranges = coalesce([4, 5, 6, 7, 9], [14, 15, 16, 18, 20], [0, 1, 0, 1, 0])
    assert len(ranges) == 5
    pieces = plan.pieces(ranges)
    assert (pieces.lengths // plan.sub_block_bytes).tolist() == [3, 1, 1]
    assert plan.count_pieces(ranges) == 3


@pytest.mark.parametrize("parts", [1, 2, 4, 16])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_sub_blocks_of_a_block_have_each_of_its_bytes_once(which: int, parts: int) -> None:
    layout = layouts(16)[which]
    element = (4, 2, 1)[which]
    for group, layers in enumerate(layout.groups):
        rows = sub_block_rows(layout, Division(parts, group))
        num_bytes = sum(layout.layer_elements(layer) for layer in layers.layers) * element
        assert rows.num_bytes * parts == num_bytes
        spans = [
            range(at + index * length, at + (index + 1) * length)
            for index in range(parts)
            for at, length in zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)
        ]
        assert sorted(at for span in spans for at in span) == list(range(num_bytes))
        # In the order of a whole block of so few tokens.
        small = sub_block_rows(replace(layout, block_size=16 // parts), Division(1, group))
        assert small.lengths.tolist() == rows.lengths.tolist()
        assert small.starts.tolist() == [0, *np.cumsum(rows.lengths)[:-1].tolist()]
    with pytest.raises(ValueError, match="no 3 equal parts"):
        sub_block_rows(layout, Division(3))


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("windows", [(None,), (None, None, None)])
def test_each_read_has_the_group_of_its_entry_wherever_an_offer_begins(
    sizes: tuple[int, int], windows: tuple[None, ...]
) -> None:
    blocks = tuple(range(5, 5 + 8 * len(windows) * 16 // sizes[1]))
    view = BlockMap(*sizes, windows).view(replace(PLAN, num_prompt_tokens=128, block_ids=blocks, first_block=0))
    parts, remote = view.sizes.sender_parts, range(100, 100 + view.num_blocks)
    for first in range(view.num_blocks):
        for end in (first + 1, view.num_blocks):
            assert view.reads(first, remote[first:end]) == [
                (view.local[entry * parts + part], remote[entry] * parts + part, entry % len(windows))
                for entry in range(first, end)
                for part in range(parts)
            ]


def test_a_view_counts_blocks_of_the_sender() -> None:
    small, large = BlockMap(16, 32), BlockMap(32, 16)
    plan = replace(PLAN, num_prompt_tokens=70, block_ids=(5, 6, 7), first_block=1)
    of_small = small.view(plan)
    assert (of_small.first_block, of_small.num_blocks) == (2, 5)
    assert of_small.local == [0, 0, 12, 13, 14]
    assert of_small.reads(2, (40, 41, 42)) == [(12, 40, 0), (13, 41, 0), (14, 42, 0)]
    assert [of_small.reader_end(end) for end in range(2, 6)] == [1, 1, 2, 3]
    assert of_small.digest_ids(2, 5, 1) == [12, 13, 14]
    assert of_small.digest_ids(2, 4, 2) == [24, 25, 26, 27]
    assert [parts for parts in range(20) if of_small.divides(parts)] == [1, 2, 4, 8, 16]
    plan = replace(PLAN, num_prompt_tokens=70, block_ids=(5, 6, 7, 8, 9), first_block=1)
    of_large = large.view(plan)
    assert (of_large.first_block, of_large.num_blocks) == (0, 3)
    assert of_large.local == [0, 6, 7, 8, 9, 0]
    assert of_large.reads(0, (40, 41, 42)) == [(6, 81, 0), (7, 82, 0), (8, 83, 0), (9, 84, 0)]
    assert [of_large.reader_end(end) for end in range(4)] == [1, 2, 4, 5]
    assert of_large.digest_ids(0, 3, 2) == [0, 6, 7, 8, 9, 0]
    for view, digest_parts in [(of_small, 1), (of_small, 4), (of_large, 2), (of_large, 8)]:
        assert list(view.iter_digest_ids(0, 3, digest_parts)) == list(view.digest_ids(0, 3, digest_parts))
    assert [parts for parts in range(40) if of_large.divides(parts)] == [2, 4, 8, 16, 32]
    with pytest.raises(ValueError, match="5 blocks were planned for 90 tokens"):
        large.view(replace(plan, num_prompt_tokens=90))
