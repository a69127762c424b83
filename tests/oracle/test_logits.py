"""Logits against float64: they keep their float32 sums, also in a model of bfloat16 weights.

Rounded to bfloat16, the two best of many thousand logits would often be equal, and the lower token id would win.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.batch import NewRequestData
from baton.messages.sampling import SamplingParams
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Kernels
from baton.runner.backends.device import CPU
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.execution.input_batch import flatten
from baton.runner.execution.request_table import RequestState
from baton.runner.loading import load_runner
from baton.runner.model import attention
from baton.runner.model.decoder import HiddenAndLogits
from baton.runner.model.mixtures import experts
from baton.runner.model.random_model import write_random_model
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import load_model
from baton.runner.spec import CacheSpec, TorchSpec, WeightSpec
from tests.doubles.fake_attention import fake_paged_attention
from tests.support import reference_operations as reference
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

PROMPT = [(position * 37 + 5) % 256 for position in range(30)]
NEAR, BEST = 10, 20
"""Two token ids: of equal logits the first would be taken, which is not the best one."""

BACKENDS: dict[str, Callable[[], Operations]] = {
    "chosen": lambda: choose_operations(2),
    "torch": lambda: TorchOperations(1),
    "gpu": lambda: CudaOperations(CPU, Kernels(fake_paged_attention)),
    "reference": lambda: reference,
}


@pytest.fixture(params=BACKENDS)
def operations(request: pytest.FixtureRequest) -> Operations:
    return BACKENDS[request.param]()


def compute(directory: Path, operations: Operations) -> HiddenAndLogits:
    """The input and the output of the head for the last token of PROMPT, computed in bfloat16."""
    attention.register()
    experts.register()
    transformer = Transformer(
        load_model(directory, WeightSpec("bfloat16")), operations, 16, CacheSpec(num_blocks=16), 1
    )
    blocks = range(1, 1 + 2 * len(transformer.layout.groups))
    state = RequestState(NewRequestData("one", PROMPT, (), SamplingParams(), blocks, 0))
    step = flatten([state.share(len(PROMPT))], transformer.layout, transformer.row_quantum)
    return transformer.compute_with_hidden(step)


def exact_logits(directory: Path, hidden: np.ndarray) -> np.ndarray:
    """What transformers' head computes of a hidden state, in float64 from the weights as bfloat16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    logits: np.ndarray = hidden.astype(np.float64) @ model.get_output_embeddings().weight.detach().double().numpy().T
    logits /= getattr(model.config, "logits_scaling", 1.0)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return np.tanh(logits / cap) * cap if cap else logits


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "granite", "gpt2"])
def test_the_heads_product_has_float32s_error(tmp_path: Path, operations: Operations, name: str) -> None:
    """bfloat16's rounding alone would be an error of 1e-3."""
    granite = {**TINY_MODELS["llama"], "model_type": "granite", "logits_scaling": 3.0}
    write_random_model(tmp_path, granite if name == "granite" else TINY_MODELS[name], seed=5)
    hidden, logits = compute(tmp_path, operations)[:2]
    expected = exact_logits(tmp_path, hidden)
    assert float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)) < 1e-6


def test_the_better_of_two_logits_that_bfloat16_can_not_tell_apart_is_taken(
    tmp_path: Path, operations: Operations
) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    weights = load_file(tmp_path / "model.safetensors")
    hidden = torch.from_numpy(compute(tmp_path, operations).hidden[0]).bfloat16()
    row, place = hidden.clone(), int(hidden.abs().median(dim=0).indices)
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][NEAR] = row.float()
    # In one place the next bfloat16 further from zero: the logit grows, by much less than bfloat16 resolves.
    row.view(torch.int16)[place] += 1
    weights["lm_head.weight"][BEST] = row.float()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    logits = compute(tmp_path, operations).logits[0]
    assert 0 < logits[BEST] - logits[NEAR] < 1e-3 * logits[BEST]
    driver = RunnerDriver(load_runner(TorchSpec(tmp_path, dtype="bfloat16", num_blocks=16), operations=operations))
    request = driver.add("one", PROMPT)
    driver.finish(chunk=13)
    assert request.output[0] == BEST
