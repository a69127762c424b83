"""A model in stages on several hosts: what its stages must have in common, and how they fail.

The stages before the last are threads of this process, over connected sockets as between hosts. That they give the
bits of one process is in test_ranks_exact.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from baton.engine.request import Request
from baton.engine.runner import RunnerLost
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.runner.stages import stage_worker
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_ranks_exact import ALONE, caches_of, loaded
from tests.oracle.test_token_exact import make_engine
from tests.support.load_with import load_with
from tests.support.tiny_models import TINY_MODELS


@contextmanager
def in_stages(directory: Path, count: int, **settings: Any) -> Iterator[TorchModelRunner]:
    """A runner whose model is divided among so many stages, as on several hosts."""
    made: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "stages": FakeStages(count, directory)}
    runner = load_with(directory, pipeline_parallel=count, **made | settings)
    try:
        yield runner
    finally:
        runner.close()


def test_all_stages_count_the_same_blocks_in_the_bytes_of_the_largest_part(tmp_path: Path) -> None:
    write_random_model(tmp_path, {**TINY_MODELS["llama"], "num_hidden_layers": 3}, seed=5)
    with in_stages(tmp_path, 2, dtype="float32", num_blocks=None, cache_bytes=1 << 20) as runner:
        first, second = caches_of(runner)
        assert (len(first.own_layers), len(second.own_layers)) == (2, 1)
        assert first.num_blocks == second.num_blocks == (1 << 20) // first.memory.block_bytes
        assert first.memory.block_bytes == 2 * second.memory.block_bytes


def test_the_stages_of_one_cpu_share_the_bytes_of_cache_and_host_tier(tmp_path: Path) -> None:
    write_random_model(tmp_path, {**TINY_MODELS["llama"], "num_hidden_layers": 3}, seed=5)
    sizes: dict[str, Any] = {"num_blocks": None, "cache_bytes": 1 << 20, "host_cache_bytes": 1 << 21}
    settings = {"dtype": "float32", **sizes}
    with loaded(tmp_path, ALONE, **settings) as alone, loaded(tmp_path, (1, 2), **settings) as runner:
        caches = caches_of(runner)
        assert {cache.num_blocks for cache in caches} == {alone.memory.num_blocks}
        assert sum(cache.memory.block_bytes for cache in caches) == alone.memory.block_bytes
        assert runner.num_host_blocks == alone.num_host_blocks > 0


def test_other_weights_on_another_host_are_refused(tmp_path: Path) -> None:
    for seed in (5, 6):
        write_random_model(tmp_path / str(seed), TINY_MODELS["llama"], seed=seed)
    stages = FakeStages(2, tmp_path / "6")
    with pytest.raises(ConfigError, match=r"rank 1 has failed: .* fingerprint .* give all hosts the same files"):
        load_runner(TorchSpec(tmp_path / "5", dtype="float32", num_blocks=64, pipeline_parallel=2), stages=stages)


def test_other_kernels_on_another_host_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    monkeypatch.setattr("baton.runner.stages.stage_worker.numerics_of", lambda *_: "other kernels")
    with pytest.raises(ConfigError, match=r"rank 1 computes with other kernels, and this process with .*equal"):
        load_runner(
            TorchSpec(tmp_path, dtype="float32", num_blocks=64, pipeline_parallel=2), stages=FakeStages(2, tmp_path)
        )


def test_a_missing_model_on_another_host_is_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path / "here", TINY_MODELS["llama"], seed=5)
    with pytest.raises(ConfigError, match=r"rank 1 has failed: .*there"):
        load_runner(
            TorchSpec(tmp_path / "here", num_blocks=64, pipeline_parallel=2), stages=FakeStages(2, tmp_path / "there")
        )


def test_a_stage_that_fails_in_a_step_ends_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    with in_stages(tmp_path, 2, dtype="float32") as runner:
        engine = make_engine(runner)
        engine.scheduler.add_request(
            Request("first", RequestSpec([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
        )
        engine.step()
        # Another thread tells why, maybe after the step has ended.
        reasons: SimpleQueue[str] = SimpleQueue()
        runner.on_lost(reasons.put)

        def fails(*_: Any, **__: Any) -> None:
            raise MemoryError("no memory for rows")

        monkeypatch.setattr(caches_of(runner)[0], "compute_stage", fails)
        for turn in range(2):
            engine.scheduler.add_request(
                Request(f"later-{turn}", RequestSpec([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
            )
            with pytest.raises(RunnerLost, match="rank 1 has failed: MemoryError: no memory for rows"):
                engine.step()
        assert "no memory for rows" in reasons.get(timeout=60.0)
        assert reasons.empty()


def test_a_host_on_a_gpu_computes_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    monkeypatch.setattr(stage_worker, "resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(ConfigError, match="rank 2 has failed: several ranks of a stage share the memory of a host"):
        load_runner(
            TorchSpec(tmp_path, dtype="float32", num_blocks=64, tensor_parallel=2),
            stages=FakeStages(2, tmp_path, tensor_parallel=2),
            start_ranks=FakeRankGroup,
        )


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, {**TINY_MODELS["llama"], "num_hidden_layers": 1}, seed=5)
    with pytest.raises(ConfigError, match="1 layers can't be divided among 2 stages"):
        load_runner(TorchSpec(tmp_path, num_blocks=64, pipeline_parallel=2), stages=FakeStages(2, tmp_path))
    with pytest.raises(ConfigError, match="2 hosts compute a model in as many stages, one each, and not in 3"):
        load_runner(TorchSpec(tmp_path, num_blocks=64, pipeline_parallel=3), stages=FakeStages(2, tmp_path))
