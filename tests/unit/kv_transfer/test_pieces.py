"""Ranges of blocks, and the order in which a window posts them."""

from __future__ import annotations

import itertools
from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner import KVLayout
from kv_transfer.backends.base import coalesce, take_ranges
from kv_transfer.mover.pieces import FairWindow, Piece, WindowLimits
from kv_transfer.piece_plan import PiecePlan, ReadRange

BLOCK = 1000
PLAN = PiecePlan.of_equal_blocks(BLOCK)


def window(posts: int = 4, blocks: int = 8, piece: int = 2) -> FairWindow:
    return FairWindow(WindowLimits(blocks * BLOCK, posts, piece * BLOCK))


def pop_all(w: FairWindow) -> list[Piece]:
    return list(iter(w.pop_next, None))


def pairs(ranges: list[ReadRange] | tuple[ReadRange, ...]) -> list[tuple[int, int]]:
    return [(r.local_block + i, r.remote_block + i) for r in ranges for i in range(r.count)]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=20))
def test_coalesced_ranges_are_the_same_pairs_in_the_same_order(blocks: list[tuple[int, int]]) -> None:
    ranges = coalesce([local for local, _ in blocks], [remote for _, remote in blocks])
    assert pairs(ranges) == blocks
    for before, after in itertools.pairwise(ranges):
        assert (before.local_block + before.count, before.remote_block + before.count) != (
            after.local_block,
            after.remote_block,
        )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), max_size=20), st.integers(1, 7))
def test_ranges_hold_one_group_each_also_when_they_are_cut(blocks: list[tuple[int, int, int]], at_once: int) -> None:
    ranges = coalesce(*([block[n] for block in blocks] for n in range(3)))
    assert [(*pair, r.group) for r in ranges for pair in pairs([r])] == blocks
    for before, after in itertools.pairwise(ranges):
        end = (before.local_block + before.count, before.remote_block + before.count, before.group)
        assert end != (after.local_block, after.remote_block, after.group)
    left, cut = deque(ranges), list[ReadRange]()
    while left:
        taken = take_ranges(left, at_once)
        assert sum(r.count for r in taken) == at_once or not left
        cut += taken
    assert [(*pair, r.group) for r in cut for pair in pairs([r])] == blocks


def test_coalesce_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="shorter"):
        coalesce([1, 2], [1])
    with pytest.raises(ValueError, match="shorter"):
        coalesce([1, 2], [1, 2], [0])


def test_neighbours_on_one_side_only_are_not_merged() -> None:
    assert coalesce([1, 2], [5, 7]) == [ReadRange(1, 5, 1), ReadRange(2, 7, 1)]
    assert coalesce([1, 3], [5, 6]) == [ReadRange(1, 5, 1), ReadRange(3, 6, 1)]


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_window_with_a_bound_of_zero_is_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        WindowLimits(*limits)


def test_a_read_is_cut_into_pieces_that_split_ranges() -> None:
    w = window(piece=3)
    w.submit(1, "a", [ReadRange(0, 10, 2), ReadRange(5, 40, 4)], PLAN)
    assert [p.ranges for p in pop_all(w)] == [
        (ReadRange(0, 10, 2), ReadRange(5, 40, 1)),
        (ReadRange(6, 41, 3),),
    ]


def test_bytes_in_flight_are_bounded_and_come_back() -> None:
    w = window(posts=9, blocks=5, piece=2)
    w.submit(1, "a", [ReadRange(0, 0, 8)], PLAN)
    popped = pop_all(w)
    assert [p.num_blocks for p in popped] == [2, 2, 1]
    w.finished(popped[0])
    assert [p.num_blocks for p in pop_all(w)] == [2]
    assert w.queued_reads == 1


def test_posts_in_flight_are_bounded() -> None:
    w = window(posts=2, blocks=100, piece=1)
    w.submit(1, "a", [ReadRange(0, 0, 9)], PLAN)
    popped = pop_all(w)
    assert len(popped) == 2
    w.finished(popped[1])
    assert len(pop_all(w)) == 1


def test_a_block_larger_than_the_window_is_posted_alone() -> None:
    w = FairWindow(WindowLimits(10, 1, 10))
    w.submit(1, "a", [ReadRange(0, 0, 2)], PLAN)
    popped = pop_all(w)
    assert [p.num_blocks for p in popped] == [1]
    w.finished(popped[0])
    assert len(pop_all(w)) == 1


def test_a_short_read_overtakes_a_long_one() -> None:
    w = window(posts=1)
    w.submit(1, "a", [ReadRange(0, 0, 100)], PLAN)
    first = w.pop_next()
    assert first is not None
    w.submit(2, "a", [ReadRange(200, 0, 1)], PLAN)
    turns = []
    for _ in range(3):
        w.finished(first)
        first = w.pop_next()
        assert first is not None
        turns.append(first.read_id)
    assert turns == [1, 2, 1]


def test_a_peer_with_a_full_window_holds_up_no_other() -> None:
    w = window(posts=1)
    w.submit(1, "slow", [ReadRange(0, 0, 10)], PLAN)
    assert w.pop_next() is not None
    w.submit(2, "fast", [ReadRange(50, 0, 2)], PLAN)
    piece = w.pop_next()
    assert piece is not None
    assert piece.incarnation == "fast"
    assert w.pop_next() is None


def test_peers_take_turns() -> None:
    w = window(posts=2, piece=1)
    w.submit(1, "a", [ReadRange(0, 0, 5)], PLAN)
    w.submit(2, "b", [ReadRange(9, 0, 5)], PLAN)
    assert [p.incarnation for p in pop_all(w)] == ["a", "b", "a", "b"]


def test_the_parts_of_a_peer_have_one_window_and_one_turn() -> None:
    w, small = window(posts=3, blocks=6, piece=2), PiecePlan.of_equal_blocks(BLOCK // 2)
    w.submit(1, "a", [ReadRange(0, 0, 9)], PLAN)
    w.submit(2, "a/1", [ReadRange(20, 0, 9)], small)
    w.submit(3, "a/12", [ReadRange(40, 0, 9)], PLAN)
    w.submit(4, "b", [ReadRange(60, 0, 9)], PLAN)
    popped = pop_all(w)
    assert [p.incarnation for p in popped] == ["a", "b", "a/1", "b", "a/12", "b"]
    of_a = [p for p in popped if p.incarnation != "b"]
    assert [p.num_blocks for p in of_a] == [2, 4, 2]
    assert sum(p.num_bytes for p in of_a) == 6 * BLOCK
    w.finished(of_a[1])
    (after,) = pop_all(w)
    assert (after.incarnation, after.num_blocks) == ("a", 2)
    assert w.withdraw(2, "a/1")
    assert w.queued_reads == 3


def test_a_sub_block_that_fits_no_window_waits_for_the_other_parts_of_its_peer() -> None:
    w = window(posts=4, blocks=2, piece=1)
    w.submit(1, "a", [ReadRange(0, 0, 1)], PLAN)
    w.submit(2, "a/1", [ReadRange(5, 0, 1)], PiecePlan.of_equal_blocks(3 * BLOCK))
    (first,) = pop_all(w)
    w.finished(first)
    (second,) = pop_all(w)
    assert (second.incarnation, second.num_bytes) == ("a/1", 3 * BLOCK)


def test_a_withdrawn_read_is_never_popped() -> None:
    w = window()
    w.submit(1, "a", [ReadRange(0, 0, 5)], PLAN)
    w.submit(2, "a", [ReadRange(9, 9, 1)], PLAN)
    piece = w.pop_next()
    assert piece is not None
    assert w.withdraw(1, "a")
    assert not w.withdraw(1, "a")
    assert not w.withdraw(1, "b")
    assert [p.read_id for p in pop_all(w)] == [2]
    assert w.queued_reads == 0


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 9), st.integers(1, 5))
def test_every_block_is_popped_once_in_order_within_the_bounds(seed: int, posts: int, blocks: int, piece: int) -> None:
    rng = Random(seed)
    w = window(posts, blocks, piece)
    wanted: dict[int, list[tuple[int, int]]] = {}
    got: dict[int, list[tuple[int, int]]] = {}
    flying: list[Piece] = []
    for read_id in range(rng.randrange(1, 8)):
        start = read_id * 100
        ranges = [
            ReadRange(start + 20 * i, rng.randrange(50), rng.randrange(1, 12)) for i in range(rng.randrange(1, 4))
        ]
        wanted[read_id] = pairs(ranges)
        w.submit(read_id, rng.choice("ab"), ranges, PLAN)
    while w.queued_reads or flying:
        popped = w.pop_next()
        if popped is None:
            w.finished(flying.pop(rng.randrange(len(flying))))
            continue
        flying.append(popped)
        got.setdefault(popped.read_id, []).extend(pairs(popped.ranges))
        mine = [p for p in flying if p.incarnation == popped.incarnation]
        assert len(mine) <= posts
        assert sum(p.num_blocks for p in mine) <= blocks
        assert popped.num_blocks <= piece
    assert got == wanted


def test_a_piece_between_different_block_sizes_has_a_bounded_number_of_descriptors() -> None:
    plan = PiecePlan.between(KVLayout.uniform(16, num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32"), 8)
    assert plan.max_pieces == 16
    w = FairWindow(WindowLimits(descriptors=100))
    w.submit(1, "a", [ReadRange(0, 0, 20)], plan)
    pieces = pop_all(w)
    assert [piece.num_blocks for piece in pieces] == [6, 6, 6, 2]
    assert max(len(plan.pieces(piece.ranges)) for piece in pieces) == 96


def test_a_piece_between_different_layers_has_a_bounded_number_of_descriptors() -> None:
    layout = KVLayout.uniform(16, num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
    plan = PiecePlan.between(layout, 16, range(3), range(1, 4))
    w = FairWindow(WindowLimits(descriptors=8))
    w.submit(1, "a", [ReadRange(0, 0, 20)], plan)
    pieces = pop_all(w)
    assert [piece.num_blocks for piece in pieces] == [8, 8, 4]
    assert [plan.count_pieces(piece.ranges) for piece in pieces] == [8, 8, 4]
