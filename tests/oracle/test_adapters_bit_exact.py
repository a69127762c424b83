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
from baton.runner.loading import load_runner
from baton.runner.model.quantization.quantize import Quantization
from baton.runner.model.random_model import write_random_model
from tests.oracle.test_bit_exact import (
    BLOCK_SIZE,
    LENGTH,
    MODELS,
    MOST_MATES,
    Run,
    assert_interruptions_change_no_bit,
    same_bits,
)
from tests.support.adapter_files import lora_tensors, write_adapter

RANKS = (4, 9, 16)


class WithoutPrograms(CompiledOperations):
    """The C kernels, called one by one."""

    def __init__(self) -> None:
        super().__init__(1, "")

    def program(self, dtype: torch.dtype) -> None:  # type: ignore[override]  # what operations without programs return
        return None


def run_of(directory: Path, name: str, dtype: str, num_threads: int = 1, **how: Any) -> tuple[Run, list[str]]:
    """A model with an adapter of each rank; returns their digests, too."""
    base = directory / name
    if not base.exists():
        write_random_model(base, MODELS[name], seed=3)
    runner = load_runner(base, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=800, num_threads=num_threads, **how)
    digests = []
    for rank in RANKS:
        files = directory / f"{name}-{rank}"
        if not files.exists():
            tensors = lora_tensors(runner._transformer.adapters.modules, rank, seed=rank, scale=0.1)
            write_adapter(files, tensors, rank)
        digests.append(open_adapter(files).digest())
        runner.load_adapter(files, digests[-1])
    return Run(runner._transformer, runner.model.vocab_size), digests


def mix(run: Run, digests: list[str], main: str) -> None:
    """Give the main sequence an adapter, or none, and its mates all of them in turns, and none."""
    every = ["", *digests]
    run.adapters = {"main": main} | {f"mate-{mate}": every[mate % len(every)] for mate in range(MOST_MATES)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama_odd_widths", "phi3"])
def test_bits_depend_on_the_own_adapter_alone(tmp_path: Path, name: str, dtype: str) -> None:
    run, digests = run_of(tmp_path, name, dtype)
    base = run.compute(run.state("main"), [LENGTH])
    mix(run, digests, "")
    assert run.compute(run.state("main"), [77, 1, 40, 9], run.mates(6)).equals(base), "without one, beside others"
    mix(run, digests, digests[1])
    expected = run.compute(run.state("main"), [LENGTH])
    assert not np.isclose(expected.logits, base.logits).all()
    for chunk in (1, 7):
        assert run.compute(run.state("main"), [chunk]).equals(expected), f"in chunks of {chunk}"
    for count in (1, MOST_MATES):
        bits = run.compute(run.state("main"), [77, 1, 40, 9], run.mates(count))
        assert bits.equals(expected), f"among {count} others"
    assert same_bits(run.draw(run.state("main"), 41), expected.logits[-1:]), "drawn after chunks"
    assert_interruptions_change_no_bit(run, expected)
    other, _ = run_of(tmp_path, name, dtype, num_threads=2)
    mix(other, digests, digests[1])
    assert other.compute(other.state("main"), [1, 200, 7], other.mates(5)).equals(expected), "on two threads"
    single, _ = run_of(tmp_path, name, dtype, operations=WithoutPrograms())
    mix(single, digests, digests[1])
    assert single.compute(single.state("main"), [90, 7], single.mates(4)).equals(expected), "in single calls"


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
    assert run.compute(run.state("main"), [77, 1, 40, 9], run.mates(6)).equals(expected)
    single, _ = run_of(tmp_path, "qwen2", "bfloat16", quantization=quantization, operations=WithoutPrograms())
    mix(single, digests, digests[2])
    assert single.compute(single.state("main"), [90, 7], single.mates(4)).equals(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_bits_depend_on_the_own_adapter_alone_without_kernels(tmp_path: Path, name: str, dtype: str) -> None:
    run, digests = run_of(tmp_path, name, dtype, operations=TorchOperations(1))
    base = run.compute(run.state("main"), [LENGTH])
    mix(run, digests, "")
    assert run.compute(run.state("main"), [77, 40, 9], run.mates(6)).equals(base)
    mix(run, digests, digests[2])
    expected = run.compute(run.state("main"), [LENGTH])
    assert run.compute(run.state("main"), [77, 1, 40, 90], run.mates(6)).equals(expected)
