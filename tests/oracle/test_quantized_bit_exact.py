"""The bits of a quantised model depend on the sequence alone, and nodes that compute it hand off to each other."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model.stored.quantize import Quantization
from baton.runner.spec import TorchSpec
from tests.oracle.test_bit_exact import (
    AMONG_OTHERS,
    FEW_AND_MANY,
    LENGTH,
    LENGTH_IN_TORCH,
    ONE_BY_ONE,
    Run,
    assert_continued_alike,
    assert_interruptions_change_no_bit,
    same_bits,
)
from tests.support.listed_types import LISTED_TYPES
from tests.support.meant_models import GGUF_FILES, write_gguf_model
from tests.support.quantized_models import FP8_FORMATS, ODD_GROUPS, ODD_WIDTHS, PACKED_FORMATS, write_quantized_model

FORMATS = {**PACKED_FORMATS, **FP8_FORMATS}


def run_on(
    directory: Path, dtype: str, num_threads: int, operations: Operations | None, how: str, length: int = LENGTH
) -> Run:
    quantization: Quantization | None = next((known for known in get_args(Quantization) if known == how), None)
    spec = TorchSpec(directory, dtype=dtype, num_blocks=400, num_threads=num_threads, quantization=quantization)
    runner = load_runner(spec, operations=operations)
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    assert runner.model.compute_paths[0].runs.count(" bits a weight") == 1
    return Run(runner._transformer, runner.model.vocab_size, length)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def written(models: Path, architecture: str, how: str) -> Path:
    directory = models / f"{architecture}-{how}"
    if not directory.exists():
        if how in FORMATS:
            write_quantized_model(directory, architecture, FORMATS[how])
        elif how in ODD_GROUPS:
            write_quantized_model(directory, architecture, ODD_GROUPS[how][0], **ODD_WIDTHS[architecture])
        elif how in GGUF_FILES:
            write_gguf_model(directory, architecture, GGUF_FILES[how])
        else:
            write_random_model(directory, LISTED_TYPES[architecture], seed=3)
    return directory


@pytest.mark.parametrize(
    ("architecture", "how", "dtype"),
    [
        # The products of integers are the same in both dtypes, but for what is rounded to 8 bits.
        ("llama", "gptq-int4-asymmetric", "bfloat16"),
        ("llama", "awq-int4", "float32"),
        ("qwen3", "ct-int8-rows", "bfloat16"),
        ("mixtral", "ct-int4", "float32"),
        ("mixtral", "ct-int4", "bfloat16"),
        ("llama", "fp8-block", "float32"),
        ("llama", "fp8-block", "bfloat16"),
        ("qwen3", "fp8-tensor", "float32"),
        ("mixtral", "fp8-channel", "bfloat16"),
        ("qwen2", "int4", "float32"),
        ("qwen2", "int8", "bfloat16"),
        ("qwen3_moe", "int4", "float32"),
        ("glm_moe_dsa", "int8", "float32"),
        ("llama", "gptq-int4-groups-of-96", "bfloat16"),
        ("qwen3_moe", "ct-int4-groups-of-36", "float32"),
        ("qwen3_moe", "ct-int8-groups-of-36", "bfloat16"),
        # All formats of GGUF in one file, and those with the most kinds of numbers in all of a model's matrices.
        ("llama", "gguf-mixed", "float32"),
        ("llama", "gguf-mixed", "bfloat16"),
        ("llama", "gguf-q4_k", "bfloat16"),
        ("llama", "gguf-q6_k", "float32"),
    ],
)
def test_bits_depend_on_the_sequence_alone(models: Path, architecture: str, how: str, dtype: str) -> None:
    directory = written(models, architecture, how)
    run = run_on(directory, dtype, 1, None, how)
    expected = run.compute(run.state("main"), [LENGTH])
    for chunks in (ONE_BY_ONE, FEW_AND_MANY):
        assert run.compute(run.state("main"), chunks).equals(expected), f"in chunks of {chunks}"
    assert run.compute(run.state("main"), AMONG_OTHERS, run.mates(6)).equals(expected), "among others"
    assert same_bits(run.draw(run.state("main"), 41), expected.logits[-1:])

    cached, tail = assert_interruptions_change_no_bit(run, expected)
    assert_continued_alike(run, run_on(directory, dtype, 2, None, how), cached, tail)


@pytest.mark.parametrize("how", ["gptq-int4-asymmetric", "fp8-block", "int8"])
def test_bits_depend_on_the_sequence_alone_without_kernels(models: Path, how: str) -> None:
    directory = written(models, "llama", how)
    run = run_on(directory, "bfloat16", 1, TorchOperations(1), how, LENGTH_IN_TORCH)
    expected = run.compute(run.state("main"), [LENGTH_IN_TORCH])
    assert run.compute(run.state("main"), [7, 93, 1, 1, 1, 27]).equals(expected)
    assert run.compute(run.state("main"), [57, 1, 40, 90], run.mates(6)).equals(expected)
