"""Mixtures whose experts' products are parts of their own are recognised by what they give, and computed as others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE

from baton.runner.backends.cpu.kernels import Program
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model.mixtures.fused import FusedMixture
from baton.runner.model.mixtures.separate import mixture_of_separate_products
from tests.support.kernel_inputs import one_request, randn
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_with
from tests.support.varied_models import write_varied_model


@torch.inference_mode()
def test_mixtures_are_recognised_by_what_they_give() -> None:
    mixture: Any = JetMoeMoE(AutoConfig.for_model(**{"pad_token_id": None, **LISTED_TYPES["jetmoe"]}))
    for seed, parameter in enumerate(mixture.parameters()):
        parameter.data = 0.2 * randn(*parameter.shape, seed=seed)
    operations = TorchOperations(1)
    assert mixture_of_separate_products(mixture, operations) is not None
    # Something else, and a limit that usual rows don't reach.
    for part, change in (
        (mixture, lambda out: 2 * out),
        (mixture.output_linear, lambda out: out + 1),
        (mixture.input_linear, lambda out: out.clamp(-50, 50)),
    ):
        handle = part.register_forward_hook(lambda _part, _given, out, change=change: change(out))
        assert mixture_of_separate_products(mixture, operations) is None
        handle.remove()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_gives_the_bits_of_single_calls(tmp_path: Path, dtype: torch.dtype) -> None:
    write_varied_model(tmp_path, LISTED_TYPES["jetmoe"], seed=5)
    runner = load_with(tmp_path, dtype=str(dtype).removeprefix("torch."), num_blocks=64)
    assert (runner.model.why_unverified, runner.model.bit_exact_reason) == ("", "")
    mixtures = [part for part in runner._transformer._module.modules() if isinstance(part, FusedMixture)]
    assert len(mixtures) == LISTED_TYPES["jetmoe"]["num_hidden_layers"]
    width = LISTED_TYPES["jetmoe"]["hidden_size"]
    program = Program(dtype, 2)
    given, mixed = program.argument(width), program.argument(width)
    program.scale(mixtures[0].record(program, given, into="mixed"), 1.0, into=mixed)
    for rows in (1, 9, 40):
        x, out = randn(rows, width, seed=rows).to(dtype), torch.empty(rows, width, dtype=dtype)
        program.run([x, out], one_request(rows), torch.tensor([rows - 1]))
        assert torch.equal(out, mixtures[0].rows(x))
