"""Which columns and heads each rank computes."""

from __future__ import annotations

import pytest
import torch

from baton.engine.runner import KVLayout, LayerGeometry
from baton.errors import ConfigError
from baton.runner.backends.paged_cache import keys_and_values
from baton.runner.model.attention import cache_views
from baton.runner.parts import Shard, columns_of_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_columns", [0, 1, 5, 63, 64, 100, 128, 896, 32000, 151937])
def test_every_column_is_one_ranks(num_columns: int, size: int) -> None:
    bounds = columns_of_ranks(num_columns, size)
    owners = [rank for rank, columns in enumerate(bounds) for _ in columns]
    assert len(bounds) == size
    assert len(owners) == num_columns
    assert [Shard(rank, size).columns(num_columns) for rank in range(size)] == bounds
    widths = [len(columns) for columns in bounds]
    # By groups of columns no share can be more than one group larger than another one.
    assert max(widths) - min(widths) <= 64


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 2), (4, 2, 4), (14, 2, 2), (9, 3, 3), (9, 3, 9), (8, 1, 4), (16, 16, 8)]
)
def test_every_query_head_has_its_key_value_head(heads: int, kv_heads: int, size: int) -> None:
    found = []
    for rank in range(size):
        own = Shard(rank, size).heads(heads, kv_heads)
        group = len(own.queries) // len(own.kv)
        found += [(head, own.kv[place // group]) for place, head in enumerate(own.queries)]
    assert found == [(head, head // (heads // kv_heads)) for head in range(heads)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "possible"), [(9, 3, 2, "1, 3, 9"), (14, 2, 4, "1, 2, 14"), (12, 4, 3, "1, 2, 4, 12")]
)
def test_other_numbers_of_heads_are_refused_with_the_sizes_that_would_do(
    heads: int, kv_heads: int, size: int, possible: str
) -> None:
    with pytest.raises(ConfigError, match=f"divided among {size} ranks; {possible} would do"):
        Shard(0, size).heads(heads, kv_heads)


def test_a_rank_is_one_of_its_ranks() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        Shard(2, 2)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_finds_its_heads_in_blocks_of_all(size: int) -> None:
    layout = KVLayout(4, (LayerGeometry(4, 24, 16), LayerGeometry(1, 40, 32, values_in_keys=True)), "float32")
    memory = torch.arange(3 * layout.block_elements, dtype=torch.float32)
    whole = cache_views(memory, layout, Shard())
    for rank in range(size):
        shard = Shard(rank, size)
        for layer, view in cache_views(memory, layout, shard).items():
            heads = shard.kv_heads(whole[layer].num_kv_heads)
            for own, every in zip(keys_and_values(view), keys_and_values(whole[layer]), strict=True):
                assert torch.equal(own, every[:, heads.start : heads.stop])
