"""A program gives the same bits as single calls, and models that can't be recorded still run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.engine.batch import NewRequestData
from baton.messages.sampling import SamplingParams
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.execution.input_batch import flatten
from baton.runner.execution.request_table import RequestState
from baton.runner.model import attention
from baton.runner.model.mixtures import experts
from baton.runner.model.random_model import write_random_model
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import load_model
from baton.runner.spec import CacheSpec, WeightSpec
from tests.support.listed_types import LISTED_TYPES

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

BLOCK_SIZE = 16
MODELS = {
    **LISTED_TYPES,
    "qwen3_windows": {
        **LISTED_TYPES["qwen3"],
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen2_wide": {
        **LISTED_TYPES["qwen2"],
        "hidden_size": 320,
        "intermediate_size": 1088,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "kimi_linear_without_attention": {
        **LISTED_TYPES["kimi_linear"],
        "first_k_dense_replace": 4,
        "layer_types": ["linear_attention"] * 4,
    },
    "afmoe_without_experts": {**LISTED_TYPES["afmoe"], "num_dense_layers": 4},
    "gpt2_quick_gelu": {**LISTED_TYPES["gpt2"], "activation_function": "quick_gelu"},
    "gemma3n_sparse": {
        **LISTED_TYPES["gemma3n_text"],
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.5, 0.0],
        "altup_active_idx": 1,
    },
    "llama_odd_widths": {**LISTED_TYPES["llama"], "intermediate_size": 120, "head_dim": 24},
}
RECORDED = [
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "qwen3_windows", "qwen2_wide"),
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "exaone4", "smollm3", "hunyuan_v1_dense"),
    *("lfm2", "qwen3_5_text", "olmo_hybrid", "bamba", "kimi_linear_without_attention", "afmoe_without_experts"),
    *("qwen2_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
]
CASES = [
    (name, dtype, (1, 2, 5)[(place + turn) % 3])
    for place, name in enumerate(RECORDED)
    for turn, dtype in enumerate(("float32", "bfloat16"))
]
"""Every model in both dtypes, with numbers of threads in turns."""
LENGTHS = (150, 41, 90, 3, 64, 1, 77, 20)


class SingleCalls(CompiledOperations):
    """The same kernels without programs, one call for each operation."""

    def program(self, dtype: torch.dtype) -> None:  # type: ignore[override]  # what operations without programs return
        return None


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    kernels.use_isa(None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(models: Path, name: str, dtype: str, operations: CompiledOperations | TorchOperations) -> Transformer:
    directory = models / name
    if not directory.exists():
        write_random_model(directory, MODELS[name], seed=5)
    attention.register()
    experts.register()
    return Transformer(load_model(directory, WeightSpec(dtype)), operations, BLOCK_SIZE, CacheSpec(num_blocks=200), 1)


def both(models: Path, name: str, dtype: str, threads: int) -> tuple[Transformer, Transformer]:
    """The model with programs, and the same model operation by operation."""
    return load(models, name, dtype, CompiledOperations(threads, "")), load(
        models, name, dtype, SingleCalls(threads, "")
    )


def requests(transformer: Transformer) -> list[RequestState]:
    """A request of each length, with blocks of its own."""
    rng, states, first, groups = Random(3), [], 1, len(transformer.layout.groups)
    for length in LENGTHS:
        count = -(-length // BLOCK_SIZE) * groups
        tokens = [rng.randrange(256) for _ in range(length)]
        data = NewRequestData(f"of-{length}", tokens, (), SamplingParams(), range(first, first + count), 0)
        states.append(RequestState(data))
        first += count
    return states


def steps() -> list[list[int]]:
    """The tokens that a step computes of each request: chunks with and without rows that sample, and single rows."""
    rng, left, plan = Random(4), list(LENGTHS), []
    for most in (40, 1, 1, 70, 1, 9, 1, 300):
        counts = [min(most if most == 1 else most - rng.randint(0, most // 2), one) for one in left]
        left = [one - count for one, count in zip(left, counts, strict=True)]
        plan.append(counts)
    assert not any(left), "every request samples in the end"
    return plan


def compute(
    transformer: Transformer, states: Sequence[RequestState], counts: Sequence[int], *, every_row: bool = False
) -> npt.NDArray[np.float32]:
    shares = [state.share(count) for state, count in zip(states, counts, strict=True) if count]
    batch = flatten(shares, transformer.layout, transformer.row_quantum)
    rows = np.arange(int(batch.query_start[-1])) if every_row else None
    logits = transformer.compute(batch, rows)
    for share in shares:
        share.state.num_computed_tokens = share.stop
    return logits


def bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return array.view(np.uint32)


def assert_same(one: Transformer, other: Transformer) -> None:
    """Compute the same steps on both; logits and the whole cache must be equal bit by bit."""
    states, others = requests(one), requests(other)
    for index, counts in enumerate(steps()):
        every_row = index == 3
        got = compute(one, states, counts, every_row=every_row)
        expected = compute(other, others, counts, every_row=every_row)
        assert np.array_equal(bits(got), bits(expected)), f"step {index}"
    assert torch.equal(one.kv_cache.view(torch.uint8), other.kv_cache.view(torch.uint8))
    assert one.kv_cache.any()


@pytest.mark.parametrize(("name", "dtype", "threads"), CASES)
def test_one_call_gives_the_bits_of_many(models: Path, name: str, dtype: str, threads: int) -> None:
    recorded, single = both(models, name, dtype, threads)
    assert recorded.why_no_programs == ""
    assert single.why_no_programs
    assert_same(recorded, single)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(("olmo2", "olmo3", "glm4"), ("float32", "bfloat16")),
        *(("starcoder2", "float32"), ("phi", "bfloat16"), ("cohere", "bfloat16")),
        *(("granite", "bfloat16"), ("lfm3", "float32"), ("nemotron", "bfloat16")),
        *(("gpt2", "bfloat16"), ("opt", "float32"), ("gpt_neox", "bfloat16")),
        *product(("apertus", "nemotron_h", "gemma3n_sparse"), ("float32", "bfloat16")),
    ],
)
def test_parts_that_few_models_have_are_recorded(models: Path, name: str, dtype: str) -> None:
    """Norms of all heads, and around their mean; other rotations, gates of heads, activations, and sums with factors.

    Learned positions, layers with products of their own, and heads whose queries, keys and values are neighbours.
    The angles of olmo are float32 in bfloat16, too; glm4 rotates pairs of neighbours. Gemma 3n has several streams.
    """
    recorded, single = both(models, name, dtype, threads=2)
    assert recorded.why_no_programs == ""
    assert_same(recorded, single)


@pytest.mark.parametrize("isa", kernels.available().isas)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_gives_the_bits_of_many_on_every_instruction_set(models: Path, dtype: str, isa: str) -> None:
    kernels.use_isa(isa)
    assert_same(*both(models, "qwen3_windows", dtype, threads=2))


def test_models_that_can_not_be_recorded_run_in_single_calls(models: Path) -> None:
    transformer, single = both(models, "gpt2_quick_gelu", "float32", threads=2)
    assert transformer.why_no_programs
    assert_same(transformer, single)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_widths_that_single_calls_pad_are_padded_in_programs(models: Path, dtype: str) -> None:
    recorded, single = both(models, "llama_odd_widths", dtype, threads=2)
    assert recorded.why_no_programs == ""
    assert_same(recorded, single)


def test_torchs_operations_have_no_programs(models: Path) -> None:
    assert load(models, "llama", "float32", TorchOperations(1)).why_no_programs


def test_a_refused_step_changes_nothing_and_the_next_one_is_right(models: Path) -> None:
    recorded, single = both(models, "llama", "bfloat16", threads=2)
    states, others = requests(recorded), requests(single)
    counts = [min(length, 30) for length in LENGTHS]
    assert np.array_equal(bits(compute(recorded, states, counts)), bits(compute(single, others, counts)))
    before = recorded.kv_cache.clone()
    batch = flatten([states[0].share(5), states[2].share(60)], recorded.layout, 1)
    for array, name in ((batch.slots, "slots"), (batch.block_tables, "block_tables")):
        kept = array.flat[0]
        array.flat[0] = 10**6
        with pytest.raises(KernelArgumentError) as caught:
            recorded.compute(batch)
        assert caught.value.argument == name
        array.flat[0] = kept
    assert torch.equal(recorded.kv_cache, before)
    rest = [length - count for length, count in zip(LENGTHS, counts, strict=True)]
    assert np.array_equal(bits(compute(recorded, states, rest)), bits(compute(single, others, rest)))
