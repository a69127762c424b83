"""What ranks of one host exchange through shared memory. The ranks are threads of this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels.barrier import BarrierTag
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.ranks import host_ranks
from baton.runner.backends.ranks.host_ranks import HostRanks, SharedFiles
from baton.runner.parts import Shard
from baton.runner.spec import CacheSpec
from baton.runner.stage_spec import StageSpec
from tests.support.process_counts import shared_memory_segments


@pytest.fixture
def files() -> Iterator[SharedFiles]:
    made = SharedFiles.make()
    yield made
    made.close()


def on_every_rank(files: SharedFiles, size: int, run: Callable[[HostRanks], None]) -> None:
    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(run, HostRanks(Shard(rank, size), files, makes_cache=True)) for rank in range(size)]:
            done.result()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_columns_of_all_ranks_come_side_by_side(files: SharedFiles, size: int) -> None:
    widths = [3 + rank for rank in range(size)]

    def run(ranks: HostRanks) -> None:
        rank, rng = ranks.shard.rank, Random(7)
        for turn in range(200):
            rows = rng.randrange(0, 1 + 20 * turn)
            own = torch.full((rows, widths[rank]), float(turn * size + rank))
            gathered = ranks.gather(own, widths)
            expected = torch.cat([torch.full((rows, n), float(turn * size + k)) for k, n in enumerate(widths)], dim=1)
            assert torch.equal(gathered, expected)

    on_every_rank(files, size, run)


def test_rows_of_all_ranks_come_to_their_places(files: SharedFiles) -> None:
    def run(ranks: HostRanks) -> None:
        rank, rng = ranks.shard.rank, np.random.default_rng(3)
        for _ in range(100):
            owners = torch.from_numpy(rng.integers(0, 2, size=37))
            places = (owners == rank).nonzero().flatten()
            own = places[:, None].to(torch.bfloat16).expand(-1, 8).contiguous()
            merged = ranks.merge_rows(own, places, 37)
            assert torch.equal(merged, torch.arange(37)[:, None].to(torch.bfloat16).expand(-1, 8))

    on_every_rank(files, 2, run)


def test_a_lost_rank_ends_the_barriers_of_all(files: SharedFiles) -> None:
    first, second = (HostRanks(Shard(rank, 3), files, makes_cache=True) for rank in range(2))
    arrived = threading.Barrier(3)

    def wait(ranks: HostRanks) -> None:
        arrived.wait()
        with pytest.raises(RankLost):
            ranks.barrier.wait(BarrierTag.DONE)
        with pytest.raises(RankLost):
            ranks.gather(torch.zeros(1, 1), [1, 1, 1])

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait, ranks) for ranks in (first, second)]
        arrived.wait()
        first.barrier.abort()
        for one in waiting:
            one.result(timeout=60)


def test_ranks_that_wait_with_different_tags_are_lost(files: SharedFiles) -> None:
    """Tags are compared one by one: here the third is the mean of all three."""
    ranks = [HostRanks(Shard(rank, 3), files, makes_cache=True) for rank in range(3)]
    reasons = (BarrierTag.GATHER, BarrierTag.STEP, BarrierTag.MERGE)
    assert sum(reasons) == 3 * reasons[2]
    with ThreadPoolExecutor(3) as pool:
        barrier = [pool.submit(one.barrier.wait, reason) for one, reason in zip(ranks, reasons, strict=True)]
        errors = [str(one.exception(timeout=60)) for one in barrier]
    assert any("compute different operations" in error for error in errors)
    assert all("rank" in error for error in errors)


def test_an_interrupt_ends_the_wait_for_other_ranks(files: SharedFiles) -> None:
    ranks = HostRanks(Shard(0, 2), files, makes_cache=True)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            ranks.barrier.wait(BarrierTag.GATHER)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_memory_of_an_unusually_large_exchange_is_given_back(
    files: SharedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_ranks, "_KEPT_BYTES", 4 << 20)

    def run(ranks: HostRanks) -> None:
        own = torch.ones(1, (6 << 20) // 4)
        gathered = ranks.gather(own, [own.shape[1]])
        assert int(gathered.sum()) == own.shape[1]
        before = blocks_in_memory(files)
        ranks.trim()
        assert before - blocks_in_memory(files) >= 2 << 20
        assert int(ranks.gather(own, [own.shape[1]]).sum()) == own.shape[1]

    on_every_rank(files, 1, run)


def blocks_in_memory(files: SharedFiles) -> int:
    return sum(512 * os.fstat(descriptor).st_blocks for descriptor in files.descriptors)


def test_a_cache_that_the_machine_has_no_memory_for_is_refused(files: SharedFiles) -> None:
    with pytest.raises(ConfigError, match="no memory for a KV cache of 1125899906842624 bytes"):
        HostRanks(Shard(0, 2), files, makes_cache=True).cache_memory(1 << 50)


@pytest.mark.parametrize(
    ("threads", "size", "expected"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (2, 3, [1, 1, 1]), (7, 4, [2, 2, 2, 1])]
)
def test_ranks_share_the_threads(threads: int, size: int, expected: list[int]) -> None:
    spec = StageSpec("model", "abc", "float32", 16, CacheSpec(16), threads, 1, size)
    assert [spec.threads_of(rank) for rank in range(size)] == expected


def test_ranks_of_all_stages_have_numbers_of_their_own() -> None:
    stages = [StageSpec("model", "abc", "float32", 16, CacheSpec(16), 2, 1, 2, index, 3) for index in range(3)]
    # The last stage leads.
    assert [[stage.number_of(rank) for rank in range(2)] for stage in stages] == [[2, 3], [4, 5], [0, 1]]


def test_shared_files_have_no_name_and_go_away_with_their_descriptors() -> None:
    before, in_shm = len(os.listdir("/proc/self/fd")), shared_memory_segments()
    files = SharedFiles.make()
    assert SharedFiles.of(files.descriptors) == files
    assert len(set(files.descriptors)) == len(files.descriptors)
    HostRanks(Shard(), files, makes_cache=True).cache_memory(1 << 20)
    assert shared_memory_segments() == in_shm
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_cache_is_written_by_one_rank_alone(files: SharedFiles) -> None:
    """Another rank that maps it later must not erase what the first one has computed."""
    memory = HostRanks(Shard(), files, makes_cache=True).cache_memory(4096)
    memory.fill_(7)
    assert HostRanks(Shard(), files, makes_cache=False).cache_memory(4096).tolist() == [7] * 4096
