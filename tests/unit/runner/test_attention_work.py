"""How a step's attention is dealt to programs of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from baton.runner.backends.attention_work.dealing import SPLIT, Dealt, Launch, WorkKind, deal

KIND = WorkKind(32, 8, 128, None, False, (16, 64, 128), True)


def dealt(counts: Sequence[int], lengths: Sequence[int]) -> Dealt:
    return deal(np.cumsum([0, *counts]).astype(np.int32), np.array(lengths, np.int32), KIND)


@pytest.mark.parametrize(
    ("counts", "lengths", "launches"),
    [
        ([1] * 64, [512] * 64, [Launch(16, False, False)]),
        ([1] * 128, [4096] * 128, [Launch(16, False, False)]),
        ([1], [2048], [Launch(16, True, False)]),
        ([1] * 64, [131072, *[512] * 63], [Launch(16, True, False)]),
        ([2048], [2048], [Launch(128, False, False)]),
        ([64], [32768], [Launch(128, True, False)]),
        ([1, 5, 300], [40, 40, 300], [Launch(16, False, False), Launch(64, False, False), Launch(128, False, False)]),
    ],
    ids=["short", "long", "one", "ragged", "prompt", "end of a prompt", "mixed"],
)
def test_what_would_take_longest_is_divided(
    counts: Sequence[int], lengths: Sequence[int], launches: Sequence[Launch]
) -> None:
    found = dealt(counts, lengths)
    assert list(found.launches) == launches
    splits = sum(-(-length // SPLIT) for length in lengths)
    if found.launches[0] == Launch(16, True, False):
        assert found.items[0][0, 0] == splits, "one item a split"
    assert found.num_leaves <= KIND.most_leaves


def test_leaves_have_room() -> None:
    """A step whose sums of splits would take too much memory is not divided."""
    lengths = [1 << 20] * 16 + [512] * 1000
    assert dealt([1] * len(lengths), lengths).num_leaves == 0
