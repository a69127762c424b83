"""Which sequences of a decode step share leading blocks, and so walk splits of keys together on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runner.backends.attention_work.dealing import SPLIT, Int32Array
from baton.runner.backends.cuda.shared_splits import find_in_groups, find_shared_splits


def sharers(found: Int32Array, split: int) -> set[frozenset[int]]:
    """The sets of at least two sequences that share a split."""
    sets = defaultdict(set)
    for sequence, first in zip(found[0].tolist(), found[1 + split].tolist(), strict=True):
        sets[first].add(sequence)
    for first, members in sets.items():
        # A set begins at its first place, and its places are neighbours.
        assert set(found[0, first : first + len(members)].tolist()) == members
    return {frozenset(members) for members in sets.values() if len(members) > 1}


def expected_sharers(tables: Int32Array, lengths: Int32Array, block_size: int, split: int) -> set[frozenset[int]]:
    sets = defaultdict(set)
    stop = (split + 1) * SPLIT
    for sequence, length in enumerate(lengths.tolist()):
        if length >= stop:
            sets[tables[sequence, : -(-stop // block_size)].tobytes()].add(sequence)
    return {frozenset(members) for members in sets.values() if len(members) > 1}


def grown_tables(random: Random, lengths: Sequence[int], block_size: int) -> Int32Array:
    """Tables that begin as some earlier one's, up to a random full block, and continue with blocks of their own."""
    tables = np.zeros((len(lengths), -(-max(lengths) // block_size)), dtype=np.int32)
    unused = iter(random.sample(range(1, tables.size + 1), tables.size))
    for sequence, length in enumerate(lengths):
        width, same = -(-length // block_size), 0
        if sequence and random.random() < 0.8:
            parent = random.randrange(sequence)
            full = (min(length, lengths[parent]) - 1) // block_size
            same = random.choice([full, random.randint(0, full)])
            tables[sequence, :same] = tables[parent, :same]
        tables[sequence, same:width] = [next(unused) for _ in range(same, width)]
    return tables


@given(
    seed=st.integers(0, 1 << 30),
    lengths=st.lists(st.integers(1, 5 * SPLIT), min_size=1, max_size=40),
    block_size=st.sampled_from([8, 16, 48, 64, 512, 1024]),
)
def test_sharers_are_all_sequences_with_the_same_leading_blocks(seed: int, lengths: list[int], block_size: int) -> None:
    tables, counts = grown_tables(Random(seed), lengths, block_size), np.array(lengths, dtype=np.int32)
    found = find_shared_splits(tables, counts, block_size)
    expected = [expected_sharers(tables, counts, block_size, split) for split in range(5)]
    saved = sum(len(members) - 1 for sets in expected for members in sets)
    if found is None:
        assert saved * 16 < (-(-counts // SPLIT)).sum() or saved == 0
        return
    assert found.dtype == np.int32
    assert sorted(found[0].tolist()) == list(range(len(lengths)))
    assert [sharers(found, split) for split in range(found.shape[0] - 1)] == expected[: found.shape[0] - 1]
    assert not any(expected[found.shape[0] - 1 :])


BLOCK = 64
BLOCKS = SPLIT // BLOCK


def found_in(*tables: Sequence[int], lengths: Sequence[int] | None = None) -> Int32Array | None:
    width = max(map(len, tables))
    padded = np.array([[*table, *[0] * (width - len(table))] for table in tables], dtype=np.int32)
    counts = np.array(lengths or [len(table) * BLOCK for table in tables], dtype=np.int32)
    return find_shared_splits(padded, counts, BLOCK)


SPLIT_OF_A = list(range(10, 10 + BLOCKS))


@pytest.mark.parametrize(
    "other",
    [
        [99, *SPLIT_OF_A],
        SPLIT_OF_A[1:] + SPLIT_OF_A[:1],
        [SPLIT_OF_A[0], *range(50, 50 + BLOCKS - 2), SPLIT_OF_A[-1]],
        [*SPLIT_OF_A[:-1], 99],
        SPLIT_OF_A[:-1],
        [0] * BLOCKS,
    ],
    ids=[
        "one block later",
        "in another order",
        "the first and the last one",
        "all but the last one",
        "too short",
        "null",
    ],
)
def test_other_blocks_are_not_shared(other: list[int]) -> None:
    assert found_in(SPLIT_OF_A, other) is None
    assert found_in([*SPLIT_OF_A, 5], [*other, 6]) is None


def test_padding_of_null_blocks_is_not_shared() -> None:
    assert found_in([0], [0], [0], lengths=[1, 1, 1]) is None
    found = found_in([0], SPLIT_OF_A, [0], SPLIT_OF_A, [0], lengths=[1, SPLIT, 1, SPLIT, 1])
    assert found is not None
    assert found.tolist() == [[1, 3, 0, 2, 4], [0, 0, 2, 3, 4]]


def test_a_split_is_shared_by_those_that_see_all_of_it() -> None:
    found = found_in([*SPLIT_OF_A, 1], SPLIT_OF_A, [*SPLIT_OF_A, 2], lengths=[SPLIT + 1, SPLIT - 1, SPLIT])
    assert found is not None
    assert sharers(found, 0) == {frozenset({0, 2})}
    both = [*SPLIT_OF_A, *range(50, 50 + BLOCKS)]
    found = found_in(both, both, [*both, 1], lengths=[2 * SPLIT, 2 * SPLIT - 1, 2 * SPLIT + 1])
    assert found is not None
    assert sharers(found, 0) == {frozenset({0, 1, 2})}
    assert all(1 not in members for split in range(found.shape[0] - 1)[1:] for members in sharers(found, split))


def test_a_few_shared_splits_among_many_do_not_pay() -> None:
    def step(own: int) -> Int32Array | None:
        return found_in(*([*SPLIT_OF_A, *range(start, start + own * BLOCKS)] for start in (1000, 2000)))

    # One is saved of 16, and of 18.
    assert step(7) is not None
    assert step(8) is None


def test_groups_with_a_window_and_steps_with_several_queries_share_nothing() -> None:
    tables = np.array([[SPLIT_OF_A, SPLIT_OF_A]] * 2, dtype=np.int32)
    lengths = np.array([SPLIT, SPLIT], dtype=np.int32)

    def find(*starts: int) -> list[bool]:
        found = find_in_groups(tables, lengths, np.array(starts, dtype=np.int32), BLOCK, (None, 100))
        return [places is not None for places in found]

    assert find(0, 1, 2) == [True, False]
    assert find(0, 0, 1) == [True, False]
    assert find(0, 2, 3) == [False, False]
    assert find_in_groups(tables[:, :1], lengths[:1], np.array([0, 1], dtype=np.int32), BLOCK, (None, 9)) == [None] * 2
