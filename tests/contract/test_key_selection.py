"""Every implementation selects the keys with the largest scores, and attends to these alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.key_selection import SelectionCall, positions_in, words_of
from baton.runner.backends.paged_cache import CacheView
from tests.support.kernel_inputs import randn

HEADS, WIDTH, FIRST, KEY, VALUE, SIZE, MOST = 5, 16, 40, 56, 32, 16, 20
LENGTHS, QUERIES = (3, 90, 200), (3, 1, 70)
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 6e-3}


@dataclass
class Step:
    """Sequences whose keys have numbers for their selection behind those that give attention its scores."""

    cache: CacheView
    tables: torch.Tensor
    keys: list[torch.Tensor]
    queries: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def make(cls, operations: Any, dtype: torch.dtype, *, equal: bool = False) -> Step:
        """`equal`: all keys of a sequence are the same."""
        width = -(-max(LENGTHS) // SIZE)
        blocks = 1 + width * len(LENGTHS)
        memory = torch.zeros(blocks * SIZE * KEY, dtype=dtype)
        cache = CacheView(memory, blocks, SIZE * KEY, 0, 0, 1, SIZE, KEY, VALUE, values_in_keys=True)
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        tables = order.view(len(LENGTHS), width).to(torch.int32)
        keys = []
        for index, length in enumerate(LENGTHS):
            rows = randn(length, 1, KEY, seed=index, dtype=dtype)
            keys.append(rows[:1].repeat(length, 1, 1) if equal else rows)
            position = torch.arange(length)
            slots = tables[index, position // SIZE].long() * SIZE + position % SIZE
            operations.store_kv(keys[-1], None, cache, slots)
        queries = randn(sum(QUERIES), HEADS, WIDTH, seed=7, dtype=dtype)
        return cls(cache, tables, keys, queries, randn(sum(QUERIES), HEADS, seed=8))

    def select(self, operations: Any, rows: Sequence[tuple[int, int, int]] = ()) -> torch.Tensor:
        """The selection of some sequences' rows (sequence, first row, row behind the last); without any, of all."""
        rows = rows or [(index, 0, count) for index, count in enumerate(QUERIES)]
        firsts = torch.tensor([0, *QUERIES]).cumsum(0).tolist()
        places = [range(firsts[index] + first, firsts[index] + stop) for index, first, stop in rows]
        chosen = [place for part in places for place in part]
        lengths = [LENGTHS[index] - QUERIES[index] + stop for index, _, stop in rows]
        selected: torch.Tensor = operations.select_keys(
            SelectionCall(
                self.queries[chosen].contiguous(),
                self.weights[chosen].contiguous(),
                self.cache,
                FIRST,
                torch.tensor([0, *map(len, places)]).cumsum(0).to(torch.int32),
                torch.tensor(lengths, dtype=torch.int32),
                self.tables[[index for index, *_ in rows]],
                0.3,
                MOST,
            )
        )
        return selected

    def rows(self) -> list[tuple[int, int, torch.Tensor]]:
        """Each query row's place, how many keys the row sees, and these keys."""
        found, place = [], 0
        for length, count, keys in zip(LENGTHS, QUERIES, self.keys, strict=True):
            for row in range(count):
                seen = length - count + row + 1
                found.append((place, seen, keys[:seen, 0].double()))
                place += 1
        return found


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def test_keys_with_the_largest_scores_are_selected(operations: Any, dtype: torch.dtype) -> None:
    step = Step.make(operations, dtype)
    selected = step.select(operations)
    for place, seen, keys in step.rows():
        positions = positions_in(selected[place]).tolist()
        assert len(positions) == min(MOST, seen)
        assert max(positions) < seen
        own = keys[:, FIRST : FIRST + WIDTH]
        scores = step.weights[place].double() @ (step.queries[place].double() @ own.T * 0.3).relu()
        others = sorted(set(range(seen)) - set(positions))
        if others:
            assert float(scores[positions].min()) > float(scores[others].max()) - 1e-4


def test_of_equal_scores_the_first_keys_are_selected(operations: Any, dtype: torch.dtype) -> None:
    step = Step.make(operations, dtype, equal=True)
    for place, seen, _ in step.rows():
        assert positions_in(step.select(operations)[place]).tolist() == list(range(min(MOST, seen)))


def test_a_row_selects_the_same_keys_in_every_chunk_and_batch(operations: Any, dtype: torch.dtype) -> None:
    step = Step.make(operations, dtype)
    whole = step.select(operations)
    chunks = step.select(operations, [(2, 0, 7), (0, 0, 3)])
    assert torch.equal(chunks[:7], whole[4:11, : chunks.shape[1]])
    assert torch.equal(chunks[7:], whole[:3, : chunks.shape[1]])
    for row in (0, 33, 69):
        alone = step.select(operations, [(2, row, row + 1)])
        assert torch.equal(alone[0], whole[4 + row, : alone.shape[1]])


@pytest.mark.parametrize("heads", [4, 40])
def test_rows_attend_to_selected_keys_alone(operations: Any, dtype: torch.dtype, heads: int) -> None:
    """The queries are narrower than the keys, whose first numbers are their values."""
    step = Step.make(operations, dtype)
    query = randn(sum(QUERIES), heads, FIRST, seed=9, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    chosen = [torch.randperm(seen, generator=generator)[: 1 + seen // 3] for _, seen, _ in step.rows()]
    # Whole tiles of keys that nobody has selected are left out.
    chosen[3] = torch.tensor([1, 70])
    selected = torch.stack([words_of(positions, -(-max(LENGTHS) // 64)) for positions in chosen])
    starts = torch.tensor([0, *QUERIES]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    how = AttentionFeatures(0.2)
    out = operations.paged_attention(AttentionCall(query, step.cache, starts, lengths, step.tables, how, selected))
    for (place, _, keys), positions in zip(step.rows(), chosen, strict=True):
        scores = query[place].double() @ keys[positions, :FIRST].T * 0.2
        expected = scores.softmax(-1) @ keys[positions, :VALUE]
        assert float((out[place].double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    one = AttentionCall(
        query[40:41].clone(),
        step.cache,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([LENGTHS[2] - QUERIES[2] + 37], dtype=torch.int32),
        step.tables[2:],
        how,
        selected[40:41].clone(),
    )
    assert torch.equal(operations.paged_attention(one)[0], out[40]), "a row does not depend on the other rows"
