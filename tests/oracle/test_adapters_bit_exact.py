"""A row's bits depend on its own adapter alone: not on its mates' adapters, chunks, threads or the way of computing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.model_formats.adapters import open_adapter
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model.random_model import write_random_model
from baton.runner.model.stored.quantize import Quantization
from tests.oracle.test_bit_exact import (
    AMONG_OTHERS,
    BLOCK_SIZE,
    LENGTH,
    LENGTH_IN_TORCH,
    MODELS,
    MOST_MATES,
    ONE_BY_ONE,
    Run,
    assert_interruptions_change_no_bit,
    same_bits,
)
from tests.support.adapter_files import expert_tensors, lora_tensors, write_adapter
from tests.support.load_with import load_with

RANKS = (4, 9, 16)
WIDTHS = {"mixtral": 128, "qwen3_moe": 64, "gpt_oss": 128}
"""The widths of experts in mixtures of 4 with 3 layers of 64."""


class WithoutPrograms(CompiledOperations):
    """The C kernels, called one by one."""

    def __init__(self) -> None:
        super().__init__(1, "")

    def program(self, dtype: torch.dtype) -> None:  # type: ignore[override]  # what operations without programs return
        return None


def run_of(
    directory: Path, name: str, dtype: str, length: int = LENGTH, num_threads: int = 1, **how: Any
) -> tuple[Run, list[str]]:
    """A model with an adapter of each rank; returns their digests, too."""
    base = directory / name
    if not base.exists():
        write_random_model(base, MODELS[name], seed=3)
    runner = load_with(base, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=800, num_threads=num_threads, **how)
    digests = []
    for rank in RANKS:
        files = directory / f"{name}-{rank}"
        if not files.exists():
            tensors = lora_tensors(runner._transformer.adapters.modules, rank, seed=rank, scale=0.1)
            write_adapter(files, tensors, rank)
        digests.append(open_adapter(files).digest())
        runner.adapters.load(files, digests[-1])
    return Run(runner._transformer, runner.model.vocab_size, length), digests


def mix(run: Run, digests: list[str], main: str) -> None:
    """Give the main sequence an adapter, or none, and its mates all of them in turns, and none."""
    every = ["", *digests]
    run.adapters = {"main": main} | {f"mate-{mate}": every[mate % len(every)] for mate in range(MOST_MATES)}


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama_odd_widths", "float32"), ("llama_odd_widths", "bfloat16"), ("phi3", "bfloat16")]
)
def test_bits_depend_on_the_own_adapter_alone(tmp_path: Path, name: str, dtype: str) -> None:
    run, digests = run_of(tmp_path, name, dtype)
    base = run.compute(run.state("main"), [LENGTH])
    mix(run, digests, "")
    assert run.compute(run.state("main"), AMONG_OTHERS, run.mates(6)).equals(base), "without one, beside others"
    mix(run, digests, digests[1])
    expected = run.compute(run.state("main"), [LENGTH])
    assert not np.isclose(expected.logits, base.logits).all()
    for chunks in (ONE_BY_ONE, [7, 7, 7, 64]):
        assert run.compute(run.state("main"), chunks).equals(expected), f"in chunks of {chunks}"
    for count in (1, MOST_MATES):
        bits = run.compute(run.state("main"), AMONG_OTHERS, run.mates(count))
        assert bits.equals(expected), f"among {count} others"
    assert same_bits(run.draw(run.state("main"), 41), expected.logits[-1:]), "drawn after chunks"
    assert_interruptions_change_no_bit(run, expected)
    other, _ = run_of(tmp_path, name, dtype, num_threads=2)
    mix(other, digests, digests[1])
    assert other.compute(other.state("main"), [1, 200, 7, 33], other.mates(5)).equals(expected), "on two threads"
    single, _ = run_of(tmp_path, name, dtype, operations=WithoutPrograms())
    mix(single, digests, digests[1])
    assert single.compute(single.state("main"), [90, 7, 7, 64], single.mates(4)).equals(expected), "in single calls"


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma3_text", "bfloat16"), ("qwen3_moe", "bfloat16"), ("deepseek_v3", "float32")]
)
def test_bits_depend_on_the_own_adapter_alone_in_transformers_loop(tmp_path: Path, name: str, dtype: str) -> None:
    run, digests = run_of(tmp_path, name, dtype)
    base = run.compute(run.state("main"), [LENGTH])
    mix(run, digests, "")
    assert run.compute(run.state("main"), [77, 40, 90], run.mates(6)).equals(base)
    mix(run, digests, digests[1])
    expected = run.compute(run.state("main"), [LENGTH])
    assert run.compute(run.state("main"), [77, 1, 40, 90], run.mates(6)).equals(expected)
    assert same_bits(run.draw(run.state("main"), 41), expected.logits[-1:]), "drawn after chunks"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_bits_depend_on_the_own_adapter_alone_on_quantised_weights(tmp_path: Path, quantization: Quantization) -> None:
    run, digests = run_of(tmp_path, "qwen2", "bfloat16", quantization=quantization)
    base = run.compute(run.state("main"), [LENGTH])
    mix(run, digests, "")
    assert run.compute(run.state("main"), [77, 40, 9], run.mates(6)).equals(base)
    mix(run, digests, digests[2])
    expected = run.compute(run.state("main"), [LENGTH])
    assert run.compute(run.state("main"), AMONG_OTHERS, run.mates(6)).equals(expected)
    single, _ = run_of(tmp_path, "qwen2", "bfloat16", quantization=quantization, operations=WithoutPrograms())
    mix(single, digests, digests[2])
    assert single.compute(single.state("main"), [90, 7, 7, 64], single.mates(4)).equals(expected)


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "float32"), ("gpt_oss", "bfloat16")])
def test_bits_depend_on_the_own_adapter_alone_without_kernels(tmp_path: Path, name: str, dtype: str) -> None:
    run, digests = run_of(tmp_path, name, dtype, LENGTH_IN_TORCH, operations=TorchOperations(1))
    base = run.compute(run.state("main"), [LENGTH_IN_TORCH])
    mix(run, digests, "")
    assert run.compute(run.state("main"), [77, 40, 9], run.mates(6)).equals(base)
    mix(run, digests, digests[2])
    expected = run.compute(run.state("main"), [LENGTH_IN_TORCH])
    assert run.compute(run.state("main"), [77, 1, 40, 90], run.mates(6)).equals(expected)


def run_of_mixture(directory: Path, name: str, dtype: str, length: int = LENGTH, **how: Any) -> tuple[Run, list[str]]:
    """A mixture with adapters of its attention, of its experts, and of both with the router; their digests, too."""
    base = directory / name
    if not base.exists():
        write_random_model(base, MODELS[name], seed=3)
    runner = load_with(base, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=800, **how)
    modules = {name: shape for name, shape in runner.adaptable_modules.items() if "self_attn" in name}
    router = "router" if name == "gpt_oss" else "gate"
    inner, targets = WIDTHS[name], ["mlp.experts.gate_up_proj", "experts.down_proj", f"{router}.weight"]
    shapes = [(2 * inner, 64), (64, inner)]
    digests = []
    for rank, parts in ((4, "a"), (9, "e"), (3, "aer")):
        tensors = lora_tensors(modules, rank, seed=rank, scale=0.1) if "a" in parts else {}
        for layer in range(3):
            if "e" in parts:
                module = f"model.layers.{layer}.mlp.experts"
                tensors |= expert_tensors(module, shapes, 4, rank, seed=layer + rank, scale=0.1)
            if "r" in parts:
                tensors |= lora_tensors({f"model.layers.{layer}.mlp.{router}": (4, 64)}, rank, seed=layer, scale=0.1)
        files = write_adapter(
            directory / f"{name}-{parts}",
            tensors,
            rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=targets,
        )
        digests.append(open_adapter(files).digest())
        runner.adapters.load(files, digests[-1])
    return Run(runner._transformer, runner.model.vocab_size, length), digests


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    [
        ("mixtral", "bfloat16", {}),
        ("qwen3_moe", "float32", {}),
        ("gpt_oss", "bfloat16", {}),
        ("mixtral", "bfloat16", {"quantization": "int8"}),
        ("qwen3_moe", "bfloat16", {"operations": TorchOperations(1)}),
    ],
)
def test_bits_depend_on_the_own_adapter_of_experts_alone(
    tmp_path: Path, name: str, dtype: str, how: dict[str, Any]
) -> None:
    length = LENGTH_IN_TORCH if "operations" in how else LENGTH
    run, digests = run_of_mixture(tmp_path, name, dtype, length, **how)
    base = run.compute(run.state("main"), [length])
    mix(run, digests, "")
    assert run.compute(run.state("main"), [77, 40, 90], run.mates(6)).equals(base), "without one, beside others"
    for digest in digests:
        mix(run, digests, digest)
        expected = run.compute(run.state("main"), [length])
        assert not np.isclose(expected.logits, base.logits).all()
        assert run.compute(run.state("main"), [77, 1, 40, 90], run.mates(6)).equals(expected)
        assert run.compute(run.state("main"), [length], run.mates(MOST_MATES)).equals(expected)
    assert same_bits(run.draw(run.state("main"), 41), expected.logits[-1:]), "drawn after chunks"
    if "operations" not in how:
        other, _ = run_of_mixture(tmp_path, name, dtype, num_threads=2, **how)
        mix(other, digests, digests[2])
        assert other.compute(other.state("main"), [1, 200, 7, 33], other.mates(5)).equals(expected), "on two threads"
