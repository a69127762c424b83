"""The CUDA operations: everything around the kernel on any machine, and the kernel itself where there is a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.errors import ConfigError
from baton.messages.node_report import ComputePath
from baton.messages.sampling import SamplingParams
from baton.runner import TorchSpec, load
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Kernels, triton_kernels
from baton.runner.backends.device import CPU, resolve_device
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model.decode_graphs import DecodeGraphs
from baton.runner.model.random_model import write_random_model
from baton.runner.model.transformer import Transformer
from baton.runner.model_runner import TorchModelRunner
from tests.doubles.fake_attention import fake_paged_attention
from tests.doubles.fake_graph import FakeRecorder
from tests.support.load_with import load_as_on_a_gpu, load_tiny, load_with
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

PROMPTS = {"short": [5, 3], "long": [(7 * i + 1) % 250 for i in range(45)], "block": list(range(16))}


def wrong(call: AttentionCall) -> torch.Tensor:
    """A fake kernel with wrong results."""
    return fake_paged_attention(call) * 1.5


def batch_dependent(call: AttentionCall) -> torch.Tensor:
    """A fake kernel that rounds differently when there are more rows."""
    return fake_paged_attention(call) * (1.0 + 1e-6 * call.query.shape[0])


def no_kernel(call: AttentionCall) -> torch.Tensor:
    raise NotImplementedError("no kernel image is available\nfor this device")


BY_TRITON = ComputePath("attention", "triton")
WAYS: Mapping[Callable[..., torch.Tensor], ComputePath] = {
    fake_paged_attention: BY_TRITON,
    wrong: ComputePath("attention", "plain", "the result of Triton's kernel differs from that of plain attention"),
    batch_dependent: ComputePath("attention", "plain", "Triton's kernel gives a row other bits alone than in a batch"),
    no_kernel: ComputePath(
        "attention", "plain", "Triton's kernel fails with NotImplementedError (no kernel image is available)"
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_random_model(directory, TINY_MODELS["llama"], 0)
    return directory


def tokens_of(runner: TorchModelRunner) -> dict[str, list[int]]:
    driver = RunnerDriver(runner)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=6))
    driver.finish(chunk=7)
    assert not any(request.failed for request in driver.requests.values())
    return {name: request.output for name, request in driver.requests.items()}


def test_biases_of_distances_are_added_the_plain_way() -> None:
    """Steps with them are not recorded as graphs, since not all layers take Triton's way."""
    operations = CudaOperations(CPU, Kernels(no_kernel))
    cache = CacheView(torch.ones(2 * 8 * 16), 2, 8 * 16, 0, 8 * 8, 1, 8, 8, 8)
    starts, lengths, tables = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [8], [[1]]))
    how = AttentionFeatures(1.0, distance_bias=torch.zeros(2, 3))
    operations.paged_attention(AttentionCall(torch.ones(1, 2, 8), cache, starts, lengths, tables, how))
    assert (operations.ways, operations.why_plain) == ({"plain"}, "Triton's kernel adds no biases to scores")


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "deepseek_v3", "gpt_oss"])
def test_every_way_of_attention_gives_the_same_tokens(tmp_path: Path, architecture: str) -> None:
    expected = tokens_of(load_tiny(tmp_path, architecture, operations=TorchOperations(1)))
    for attend, path in WAYS.items() if architecture == "gpt_oss" else ((fake_paged_attention, BY_TRITON),):
        runner = load_as_on_a_gpu(tmp_path, attend)
        assert runner.model.bit_exact
        assert tokens_of(runner) == expected
        assert path in runner.model.compute_paths


def test_a_cache_in_8_bits_gives_the_tokens_that_it_gives_on_a_cpu(llama: Path) -> None:
    kind: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "cache_dtype": "int8"}
    expected = tokens_of(load_with(llama, **kind, operations=TorchOperations(1)))
    runner = load_with(llama, **kind, operations=CudaOperations(CPU, Kernels(fake_paged_attention), FakeRecorder()))
    assert tokens_of(runner) == expected
    assert graphs_of(runner).num_replays > 0


def test_without_triton_attention_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "baton.runner.backends.cuda.triton_attention", raising=False)
    runner = load_tiny(tmp_path, "llama", operations=CudaOperations(CPU, triton_kernels()))
    (path,) = (path for path in runner.model.compute_paths if path.part == "attention")
    assert path.runs == "plain"
    assert "ModuleNotFoundError" in path.why_not_faster


def graphs_of(runner: TorchModelRunner) -> DecodeGraphs:
    graphs = runner._transformer.decode_graphs
    assert graphs is not None
    return graphs


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_decode_steps_that_are_replayed_give_the_same_tokens(tmp_path: Path, architecture: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[architecture], 0)
    expected, runner = load_as_on_a_gpu(tmp_path), load_as_on_a_gpu(tmp_path, record=FakeRecorder())
    graphs = graphs_of(runner)
    # The checks at start have compared them with a whole prompt (two sequences) and with transformers (one).
    assert runner.model.bit_exact
    assert (graphs.sizes, graphs.num_replays) == ([1, 2], 5)
    assert tokens_of(runner) == tokens_of(expected)
    # Steps with a chunk of a prompt are not replayed; the longest prompt's request ends alone.
    assert graphs.sizes == [1, 2]
    assert graphs.num_replays > 8


def test_padding_and_old_buffer_content_change_no_tokens(llama: Path) -> None:
    """Sequences of different lengths come and go, and buffers still have the content of earlier steps."""
    runner, alone = load_as_on_a_gpu(llama, record=FakeRecorder()), load_as_on_a_gpu(llama)
    prompts = [[(5 * i + 3 * j + 1) % 250 for j in range(1 + 7 * i)] for i in range(9)]
    outputs = []
    for place, prompt in enumerate(prompts):
        single = RunnerDriver(alone)
        outputs.append(single.add(f"alone-{place}", prompt, SamplingParams(temperature=0.0, max_tokens=2 + place)))
        single.finish()
    for count in (1, 9, 2, 8, 3, 5):
        replays, together = graphs_of(runner).num_replays, RunnerDriver(runner)
        for place, prompt in enumerate(prompts[:count]):
            together.add(f"{count}-{place}", prompt, SamplingParams(temperature=0.0, max_tokens=2 + place))
        together.finish()
        for place in range(count):
            assert together.requests[f"{count}-{place}"].output == outputs[place].output
        assert graphs_of(runner).num_replays >= replays + count


def test_graphs_share_memory_and_results_are_copied_before_the_next_replay(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all steps, of several sizes, are compared only after the last step."""
    kept: list[list[npt.NDArray[np.float32]]] = []
    compute = Transformer.compute

    def keep(self: Transformer, *arguments: Any) -> npt.NDArray[np.float32]:
        kept[-1].append(logits := compute(self, *arguments))
        return logits

    monkeypatch.setattr(Transformer, "compute", keep)
    for record in (None, FakeRecorder()):
        kept.append([])
        runner = load_as_on_a_gpu(llama, record=record)
        driver = RunnerDriver(runner)
        for tokens, (name, prompt) in enumerate(PROMPTS.items(), start=2):
            driver.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
        driver.finish()
    assert graphs_of(runner).sizes == [1, 2, 4]
    plain, replayed = kept
    assert len(plain) == len(replayed) > 4
    for one, other in zip(plain, replayed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_graphs_of_other_products_are_not_replayed(llama: Path) -> None:
    """The self check tries several numbers of rows, and a graph holds products of the number that it has seen."""
    recorder, seen = FakeRecorder(), []

    class DependsOnTheBatch(CudaOperations):
        def paged_attention(self, call: AttentionCall) -> torch.Tensor:
            out = super().paged_attention(call)
            return out * (1.0 + 1e-3 * call.query.shape[0]) if self.rows_per_call == 128 else out

    def record(compute: Any) -> Any:
        seen.append(operations.rows_per_call)
        return recorder(compute)

    operations = DependsOnTheBatch(CPU, Kernels(fake_paged_attention), record)
    runner = load_with(llama, dtype="float32", num_blocks=64, operations=operations)
    assert runner.model.bit_exact
    # The last graph is of the single sequence that is compared with transformers.
    assert (seen, graphs_of(runner).sizes) == ([128, 256, 256], [1, 2])


def test_a_lone_token_in_the_middle_of_a_prompt_is_no_decode(llama: Path) -> None:
    outputs = []
    for record in (None, FakeRecorder()):
        driver = RunnerDriver(load_as_on_a_gpu(llama, record=record))
        for name, prompt in {"slow": [9, 8, 7, 6, 5], "quick": [3]}.items():
            driver.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=6))
        driver.finish(chunk=1)
        outputs.append([request.output for request in driver.requests.values()])
    assert outputs[0] == outputs[1]


def test_steps_that_can_not_be_recorded_are_computed_without_graphs(llama: Path) -> None:
    class Asking(CudaOperations):
        def store_kv(self, *arguments: Any) -> None:
            TorchOperations.store_kv(self, *arguments)  # selects by a mask

    operations = Asking(CPU, Kernels(fake_paged_attention), FakeRecorder())
    runner = load_with(llama, dtype="float32", num_blocks=64, operations=operations)
    assert tokens_of(runner) == tokens_of(load_as_on_a_gpu(llama))
    assert (graphs_of(runner).sizes, graphs_of(runner).num_replays) == ([], 0)


def test_steps_whose_layers_read_from_the_device_are_not_recorded(llama: Path) -> None:
    operations = CudaOperations(CPU, Kernels(no_kernel), FakeRecorder())
    runner = load_with(llama, dtype="float32", num_blocks=64, operations=operations)
    tokens_of(runner)
    assert operations.ways == {"plain"}
    assert graphs_of(runner).sizes == []


@pytest.mark.parametrize("name", ["tpu9", "meta", "cuda:x", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:N"):
        resolve_device(name)


def test_the_cpu_is_always_there() -> None:
    assert resolve_device("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused_with_a_reason(llama: Path) -> None:
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="device 'cuda:1' is not available: torch finds no GPU; install"):
        load(TorchSpec(llama, num_blocks=8, device="cuda:1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("architecture", TINY_MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(tmp_path: Path, architecture: str, dtype: str) -> None:
    runner = load_tiny(tmp_path, architecture, dtype=dtype, device="cuda")
    assert (runner.memory.kind, runner.memory.device_id) == ("VRAM", 0)
    assert runner.model.bit_exact
    assert ComputePath("attention", "triton") in runner.model.compute_paths
    if dtype == "float32":
        assert tokens_of(runner) == tokens_of(load_with(tmp_path, dtype=dtype, num_blocks=64))
    if architecture in ("llama", "qwen2", "qwen3", "mistral", "phi3"):
        assert graphs_of(runner).num_replays > 0
    assert tokens_of(runner) == tokens_of(load_with(tmp_path, dtype=dtype, num_blocks=64, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_nixl_registers_a_gpus_memory(llama: Path) -> None:
    from kv_transfer.backends.nixl import NixlBackend

    runner = load_with(llama, dtype="bfloat16", num_blocks=64, device="cuda")
    backend = NixlBackend("gpu-node.run1", runner.memory)
    assert backend.agent_metadata()
    backend.close()
