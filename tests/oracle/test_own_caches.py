"""A model in stages with caches of their own gives the bits of one process, for each kind of architecture.

The stages before the last are threads of this process, over connected sockets as between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.engine.request import Request
from baton.engine.runner import RunnerLost
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.speculation import SpeculationConfig
from baton.runner.execution.step_thread import StepThread
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model.transformer import Transformer
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_ranks_exact import ALONE, NAMED, NEW_TOKENS, compute, loaded
from tests.oracle.test_token_exact import make_engine
from tests.support.load_with import load_with
from tests.support.tiny_models import TINY_MODELS


@contextmanager
def in_stages(directory: Path, count: int, **settings: Any) -> Iterator[TorchModelRunner]:
    """A runner whose model is divided among so many stages, each with a cache of its own layers."""
    made: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "stages": FakeStages(count, directory)}
    runner = load_with(directory, pipeline_parallel=count, **made | settings)
    try:
        yield runner
    finally:
        runner.close()


def caches_of(runner: TorchModelRunner) -> list[Transformer]:
    """The transformers of all stages."""
    stages = runner._leader
    assert isinstance(stages, FakeStages)
    return [*(worker._transformer for worker in stages.workers), runner._transformer]


def bytes_of_blocks(transformer: Transformer) -> npt.NDArray[np.uint8]:
    """[blocks, bytes of a block]."""
    return transformer.kv_cache.view(torch.uint8).numpy().reshape(transformer.num_blocks, -1)


@pytest.mark.parametrize("name", [*NAMED, "gpt2"])
def test_stages_with_caches_of_their_own_give_the_bits_of_one_process(tmp_path: Path, name: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=NEW_TOKENS, repetition_penalty=1.1)
    dtype, count = ("float32", 3) if name in NAMED else ("bfloat16", 2)
    with loaded(tmp_path, ALONE, dtype=dtype) as alone:
        expected = compute(alone, sampling)
        info, layout = alone.model, alone.layout
        blocks = bytes_of_blocks(alone._transformer).copy()
    with in_stages(tmp_path, count, dtype=dtype) as divided:
        computed = compute(divided, sampling)
        assert computed.tokens == expected.tokens
        assert np.array_equal(np.concatenate(computed.logits), np.concatenate(expected.logits))
        assert divided.layout == layout
        assert (divided.model.numerics, divided.model.fingerprint) == (info.numerics, info.fingerprint)
        assert divided.model.bit_exact
        caches = caches_of(divided)
        assert [len(each.own_layers) for each in caches] == [
            each.memory.own_layout.num_layers for each in caches if each.memory.own_layout is not None
        ]
        if len(layout.groups) == 1:
            # Each stage has its layers of every block, and nothing else.
            assert np.array_equal(np.concatenate([bytes_of_blocks(each) for each in caches], axis=1), blocks)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_swapped_requests_have_the_same_bits(tmp_path: Path, name: str) -> None:
    """Every stage moves its part of a block to its host tier and back."""
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * NEW_TOKENS)
    groups = 3 if name == "gemma3_text" else 1
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 9 * groups, "host_cache_bytes": 64 << 20}
    runs = []
    for made in (loaded(tmp_path, ALONE, **settings), in_stages(tmp_path, 2, **settings)):
        with made as runner:
            limits: dict[str, Any] = {"preemption_mode": "swap", "num_host_blocks": runner.num_host_blocks}
            runs.append(compute(runner, sampling, **limits))
    assert runs[0].num_preemptions > 0
    assert runs[1].tokens == runs[0].tokens


@pytest.mark.parametrize(
    "settings",
    [{"cache_dtype": "int8"}, {"cache_dtype": "fp8", "dtype": "bfloat16"}, {"quantization": "int8"}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_quantised_weights_and_caches_have_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    write_random_model(tmp_path, TINY_MODELS["mixtral"], seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    settings = {"dtype": "float32"} | settings
    with loaded(tmp_path, ALONE, **settings) as runner:
        expected = compute(runner, sampling)
    with in_stages(tmp_path, 2, **settings) as runner:
        computed = compute(runner, sampling)
    assert computed.tokens == expected.tokens
    assert np.array_equal(np.concatenate(computed.logits), np.concatenate(expected.logits))


@pytest.mark.parametrize(("name", "count"), [("llama", 2), ("gemma3_text", 3)])
def test_steps_that_are_decided_ahead_have_the_same_bits(tmp_path: Path, name: str, count: int) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=2 * NEW_TOKENS)
    with loaded(tmp_path, ALONE, dtype="float32") as runner:
        expected = compute(runner, sampling)
    with in_stages(tmp_path, count, dtype="float32") as runner:
        assert compute(runner, sampling, StepThread()).tokens == expected.tokens


def test_drafts_and_the_logprobs_of_prompts_are_those_of_one_process(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen3"], seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * NEW_TOKENS, prompt_logprobs=2, logprobs=2)
    speculation = SpeculationConfig(prompt_lookup_min=1)
    with loaded(tmp_path, ALONE, dtype="float32") as runner:
        expected = compute(runner, sampling, speculation=speculation)
    with in_stages(tmp_path, 2, dtype="float32") as runner:
        # How long drafts are depends on measured times, and so do the steps; the tokens do not.
        assert compute(runner, sampling, speculation=speculation).tokens == expected.tokens


def test_all_stages_count_the_same_blocks_in_the_bytes_of_the_largest_part(tmp_path: Path) -> None:
    write_random_model(tmp_path, {**TINY_MODELS["llama"], "num_hidden_layers": 3}, seed=5)
    with in_stages(tmp_path, 2, dtype="float32", num_blocks=None, cache_bytes=1 << 20) as runner:
        first, second = caches_of(runner)
        assert (len(first.own_layers), len(second.own_layers)) == (2, 1)
        assert first.num_blocks == second.num_blocks == (1 << 20) // first.memory.block_bytes
        assert first.memory.block_bytes == 2 * second.memory.block_bytes


def test_other_weights_on_another_host_are_refused(tmp_path: Path) -> None:
    for seed in (5, 6):
        write_random_model(tmp_path / str(seed), TINY_MODELS["llama"], seed=seed)
    stages = FakeStages(2, tmp_path / "6")
    with pytest.raises(ConfigError, match=r"rank 1 has failed: .* fingerprint .* give all hosts the same files"):
        load_runner(TorchSpec(tmp_path / "5", dtype="float32", num_blocks=64, pipeline_parallel=2), stages=stages)


def test_other_kernels_on_another_host_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    monkeypatch.setattr("baton.runner.remote_stages.stage_worker.numerics_of", lambda *_: "other kernels")
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


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, {**TINY_MODELS["llama"], "num_hidden_layers": 1}, seed=5)
    with pytest.raises(ConfigError, match="1 layers can't be divided among 2 stages"):
        load_runner(TorchSpec(tmp_path, num_blocks=64, pipeline_parallel=2), stages=FakeStages(2, tmp_path))
    with pytest.raises(ConfigError, match="2 hosts compute a model in as many stages, one each, and not in 3"):
        load_runner(TorchSpec(tmp_path, num_blocks=64, pipeline_parallel=3), stages=FakeStages(2, tmp_path))
    with pytest.raises(ConfigError, match="leave --tp out"):
        load_runner(
            TorchSpec(tmp_path, num_blocks=64, pipeline_parallel=2, tensor_parallel=2), stages=FakeStages(2, tmp_path)
        )
