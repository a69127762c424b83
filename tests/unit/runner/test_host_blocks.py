"""The copies between a cache and its host tier: gathered as on a GPU, they are those of one block after the other."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch

from baton.engine.batch import BlockCopy
from baton.runner.blocks import gathered_host_blocks
from baton.runner.blocks.gathered_host_blocks import GatheredHostBlocks
from baton.runner.blocks.host_blocks import HostBlocks

NUM_BLOCKS, NUM_HOST_BLOCKS, WIDTH = 30, 40, 6


@dataclass
class Step:
    blocks_to_swap_out: list[BlockCopy]
    blocks_to_swap_in: list[BlockCopy]


def random_step(chance: Random) -> Step:
    """Some blocks go out, mostly to neighbours; some come in, of them and of others, one of them twice."""
    first = chance.randrange(NUM_HOST_BLOCKS - 12)
    to = [*range(first, first + 9), *chance.sample([*range(first), *range(first + 9, NUM_HOST_BLOCKS)], 3)]
    chance.shuffle(to)
    out = [BlockCopy(chance.randrange(NUM_BLOCKS), host) for host in to]
    back = chance.sample(range(NUM_BLOCKS), 8)
    sources = [*to[:4], *(chance.randrange(NUM_HOST_BLOCKS) for _ in back[5:]), to[0]]
    return Step(out, [BlockCopy(host, block) for host, block in zip(sources, back, strict=True)])


@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_gathered_copies_are_those_of_single_blocks(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_host_blocks, "_GATHERED_BYTES", at_once * WIDTH * 4)
    cache, host = (torch.arange(n * WIDTH, dtype=torch.float32).view(n, WIDTH) for n in (NUM_BLOCKS, NUM_HOST_BLOCKS))
    one_by_one, gathered = HostBlocks(cache, -host), GatheredHostBlocks(cache.clone(), -host)
    chance = Random(at_once)
    for _ in range(20):
        step = random_step(chance)
        assert gathered.execute(step) == one_by_one.execute(step) == 20
        assert torch.equal(gathered._cache, one_by_one._cache)
        assert torch.equal(gathered._blocks, one_by_one._blocks)
    assert gathered.execute(Step([], [])) == 0


def test_neighbours_cross_together() -> None:
    assert list(gathered_host_blocks._runs([4, 5, 6, 6, 9, 10])) == [(0, 4, 3), (3, 6, 1), (4, 9, 2)]
    assert list(gathered_host_blocks._runs([])) == []
