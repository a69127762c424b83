"""Logits of whole quantised models are those of float64 with the dequantised weights, but for the roundings allowed.

tests/support/rounding_oracle.py says which roundings these are, and derives the bounds from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.batch import NewRequestData
from baton.messages.sampling import SamplingParams
from baton.runner.backends.cpu import kernels
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.paged_cache import read_blocks
from baton.runner.execution.input_batch import flatten
from baton.runner.execution.request_table import RequestState
from baton.runner.model.attention import cache_views
from baton.runner.model.transformer import Transformer
from baton.runner.model_runner import TorchModelRunner
from baton.runner.parts import Shard
from tests.support.float64_model import Float64Model
from tests.support.gguf_files import SCALE_STARTS
from tests.support.load_with import load_with
from tests.support.meant_models import (
    GGUF_FILES,
    MEANT_MODELS,
    SHAPES,
    VOCAB_SIZE,
    MeantModel,
    write_for_load,
    write_odd_groups,
)
from tests.support.quantized_models import FP8_FORMATS, ODD_GROUPS, PACKED_FORMATS
from tests.support.rounding_oracle import DisturbedModel, RunnerRecording, RunnerRoundings

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

BLOCK_SIZE = 16
TOKENS = [(7 * position + 3) % VOCAB_SIZE for position in range(21)]
"""Not a multiple of the rows to which a step of odd widths is padded."""
CHUNKS = (9, 5, 1)
"""The prompt in two chunks, then one token a step."""
CHECKED = (3, 20)
"""The positions of which the logits of VOCAB_SIZE tokens are compared: all of most models, the first of GGUF's."""
ODD_MIXTURE = ("qwen3_moe", "ct-int8-groups-of-36")
CACHE_DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class RecordingOperations(CompiledOperations):
    """The kernels in single calls, which keep the inputs of their products."""

    def __init__(self) -> None:
        super().__init__(1, "")
        self.inputs: list[tuple[int, torch.Tensor]] = []
        """The id of each product's weight, and its input."""

    def program(self, dtype: torch.dtype) -> None:  # type: ignore[override]  # what operations without programs return
        return None

    def pack_mixture(self, *_: Any) -> None:
        """None: experts are multiplied one by one."""

    def linear(self, x: torch.Tensor, weight: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        self.inputs.append((id(weight), x.clone()))
        return super().linear(x, weight, *arguments, **keywords)

    def gated_linear(self, x: torch.Tensor, weight: Any, **keywords: Any) -> torch.Tensor:
        self.inputs.append((id(weight), x.clone()))
        return super().gated_linear(x, weight, **keywords)


@dataclass(frozen=True)
class Computed:
    """The logits of every position, and what they were computed with."""

    logits: torch.Tensor
    recording: RunnerRecording


def compute(runner: TorchModelRunner, chunks: Sequence[int]) -> torch.Tensor:
    """The logits of every position of TOKENS, in chunks of which the last one repeats: float64 [T, vocabulary]."""
    transformer: Transformer = runner._transformer
    blocks = range(1, 1 + -(-len(TOKENS) // BLOCK_SIZE))
    state = RequestState(NewRequestData("one", TOKENS, (), SamplingParams(), blocks, 0))
    found, sizes = [], [*chunks, *[chunks[-1]] * len(TOKENS)]
    while state.num_computed_tokens < len(TOKENS):
        count = min(sizes.pop(0), len(TOKENS) - state.num_computed_tokens)
        step = flatten([state.share(count)], transformer.layout, transformer.row_quantum)
        found.append(transformer.compute(step, np.arange(count)))
        state.num_computed_tokens += count
    return torch.from_numpy(np.concatenate(found)).double()


def record(written: MeantModel, dtype: str, cache_dtype: str = "auto") -> Computed:
    """Compute all positions in one step, in single calls."""
    operations = RecordingOperations()
    runner = load(written, dtype, cache_dtype, operations=operations)
    operations.inputs.clear()
    logits = compute(runner, [len(TOKENS)])
    transformer, cached = runner._transformer, []
    for view in cache_views(transformer.kv_cache, transformer.layout, Shard()).values():
        rows = read_blocks(view, torch.tensor([1, 2]), torch.float32)
        key, value = (each[:, : len(TOKENS)].transpose(0, 1) for each in rows)
        cached.append((key, value))
    layers = expert_layers(transformer)
    return Computed(logits, RunnerRecording([(layers.get(key), x) for key, x in operations.inputs], cached))


def expert_layers(transformer: Transformer) -> dict[int, str]:
    """The names of experts' layers, those of gates for gates and ups, by the ids of their packed weights."""
    found: dict[int, str] = {}
    for path, part in transformer._module.named_modules():
        experts = getattr(part, "baton_experts", None)
        if experts is not None:
            found |= {id(weight): f"{path}.{number}.gate_proj" for number, weight in enumerate(experts._up.packed)}
            found |= {id(weight): f"{path}.{number}.down_proj" for number, weight in enumerate(experts._down.packed)}
    return found


def load(written: MeantModel, dtype: str, cache_dtype: str, **how: Any) -> TorchModelRunner:
    options = {**written.options, **how}
    return load_with(written.directory, dtype=dtype, num_blocks=8, cache_dtype=cache_dtype, **options)


def excess(found: torch.Tensor, disturbed: DisturbedModel, most: int | None = None) -> float:
    """The largest difference of the checked logits, as a share of its bound.

    `most`: look at so many logits only, those with the largest differences; deriving bounds is what takes time.
    """
    logits = disturbed.logits(TOKENS)[list(CHECKED), :VOCAB_SIZE].flatten()
    differences = (found[list(CHECKED), :VOCAB_SIZE].flatten() - logits.detach()).abs()
    checked = differences.argsort(descending=True)[:most]
    return float((differences[checked] / disturbed.bound(logits[checked])).max())


def check(written: MeantModel, dtype: str, cache_dtype: str = "auto") -> None:
    is_narrow = dtype == "bfloat16"
    model = written.in_float64(is_narrow=is_narrow)
    roundings = RunnerRoundings(written.blocks, is_narrow, CACHE_DTYPES[cache_dtype])
    computed = record(written, dtype, cache_dtype)
    served = compute(load(written, dtype, cache_dtype), CHUNKS)
    assert torch.equal(served, computed.logits), "a served step has the bits of the recorded one"
    assert excess(served, DisturbedModel(model, roundings, computed.recording)) < 1
    # With other roundings a mixture may choose other experts.
    if not model.is_mixture:
        # Its bounds are wide: the logits with the largest differences say enough.
        assert excess(served, DisturbedModel(model, roundings), most=16) < 1


@pytest.mark.parametrize("name", MEANT_MODELS)
def test_logits_are_float64s_of_the_dequantised_weights(tmp_path: Path, name: str) -> None:
    check(MEANT_MODELS[name](tmp_path / "model", "llama"), "float32")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("ct-int8-rows", "qwen2"),
        ("int4", "qwen2"),
        ("gptq-int4-asymmetric", "qwen3_moe"),
        ("fp8-block", "qwen3_moe"),
        ("int4", "qwen3_moe"),
    ],
)
def test_other_architectures_compute_float64s_logits(tmp_path: Path, architecture: str, name: str) -> None:
    """With biases and a tied head, and with experts, a router and norms of queries and keys."""
    check(MEANT_MODELS[name](tmp_path / "model", architecture), "float32")


@pytest.mark.parametrize(("architecture", "name"), [*(("llama", name) for name in ODD_GROUPS), ODD_MIXTURE])
def test_groups_of_any_multiple_of_4_compute_float64s_logits(tmp_path: Path, architecture: str, name: str) -> None:
    """The rows of the mixture are padded, and padding may reach experts that no token reaches."""
    check(write_odd_groups(tmp_path / "model", architecture, name), "float32")


@pytest.mark.parametrize(("name", "cache_dtype"), [("awq-int4", "int8"), ("ct-int8-rows", "fp8")])
def test_a_cache_in_8_bits_adds_its_rounding(tmp_path: Path, name: str, cache_dtype: str) -> None:
    check(MEANT_MODELS[name](tmp_path / "model", "llama"), "float32", cache_dtype)


@pytest.mark.parametrize("name", ["gptq-int4", "int8", "fp8-channel"])
def test_bfloat16_adds_its_rounding(tmp_path: Path, name: str) -> None:
    check(MEANT_MODELS[name](tmp_path / "model", "llama"), "bfloat16")


@pytest.mark.parametrize("architecture", SHAPES)
def test_the_float64_model_is_transformers(tmp_path: Path, architecture: str) -> None:
    """transformers' norms, softmax and routers round to float32 in every dtype."""
    from transformers import AutoModelForCausalLM

    written = write_for_load(tmp_path / "model", architecture, 8)
    plain = load_file(written.directory / "model.safetensors")
    config = written.in_float64()._config
    module = AutoModelForCausalLM.from_pretrained(
        written.directory, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    with torch.inference_mode():
        expected = module(torch.tensor([TOKENS])).logits[0]
    found = Float64Model(config, plain).logits(TOKENS)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def scale_off(tensors: dict[str, torch.Tensor], layer: str) -> None:
    """One scale of one group (of fp8: of a row) is 2 percent too large."""
    name = next(name for name in tensors if name.startswith(f"{layer}.") and "scale" in name)
    tensors[name].view(-1)[5 % tensors[name].numel()] *= 1.02


def zero_off(tensors: dict[str, torch.Tensor], layer: str) -> None:
    """One zero point is one too large or too small."""
    name = next(name for name in tensors if name.startswith(f"{layer}.") and "zero" in name)
    tensors[name].view(torch.uint8).view(-1)[0] ^= 1


def nibbles_swapped(tensors: dict[str, torch.Tensor], layer: str) -> None:
    """The two codes of one byte are swapped."""
    name = next(name for name in tensors if name.startswith(f"{layer}.") and ("qweight" in name or "packed" in name))
    codes = tensors[name].view(torch.uint8).view(-1)
    place = next(place for place, byte in enumerate(codes.tolist()) if byte // 16 != byte % 16)
    codes[place] = codes[place] % 16 * 16 + codes[place] // 16


def block_scale_off(tensors: dict[str, torch.Tensor], layer: str) -> None:
    """The largest scale of all blocks is 10 percent too large: one of 32 numbers in rows four times as wide."""
    name = next(name for name in tensors if name.startswith(f"{layer}."))
    kind = name.rpartition(".")[2].upper()
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks, start = tensors[name].view(-1, num_bytes), SCALE_STARTS[kind][0]
    scales = blocks[:, start : start + 2].contiguous().view(torch.float16)
    scales[int(scales.abs().argmax())] *= 1.1
    blocks[:, start : start + 2] = scales.view(torch.uint8)


Damage = Callable[[dict[str, torch.Tensor], str], None]
DAMAGES: list[tuple[str, Damage]] = [
    *((name, scale_off) for name in (*PACKED_FORMATS, *FP8_FORMATS)),
    *((name, block_scale_off) for name in GGUF_FILES),
    *((name, zero_off) for name in MEANT_MODELS if "asymmetric" in name or name == "awq-int4"),
    *((name, nibbles_swapped) for name in MEANT_MODELS if "-int4" in name),
]


DAMAGED = ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")


@pytest.mark.parametrize(
    ("name", "damage", "layer"),
    [(*one, DAMAGED[place % 2]) for place, one in enumerate(DAMAGES)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_oracle_finds_one_wrong_number(tmp_path: Path, name: str, damage: Damage, layer: str) -> None:
    written = MEANT_MODELS[name](tmp_path / "model", "llama")
    tensors = load_file(written.directory / "model.safetensors")
    damage(tensors, layer)
    save_file(tensors, written.directory / "model.safetensors", {"format": "pt"})
    computed = record(written, "float32")
    disturbed = DisturbedModel(written.in_float64(), RunnerRoundings(written.blocks), computed.recording)
    assert excess(computed.logits, disturbed, most=8) > 1
