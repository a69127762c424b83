"""Mixtures whose experts' products are parts of their own are recognised by what they give, and computed as others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE

from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model.mixtures.separate import mixture_of_separate_products
from tests.oracle.test_types import DRAWN, in_chunks, prompts
from tests.support.kernel_inputs import randn
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


class SingleCalls(CompiledOperations):
    """The kernels without programs, which multiply experts one by one."""

    def program(self, _dtype: torch.dtype) -> Any:
        return None

    def pack_mixture(self, *_: Any) -> None:
        """None: experts are multiplied one by one."""

    def pack_choice(self, *_: Any) -> None:
        """The same of experts with one product."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_give_the_bits_of_single_calls(tmp_path: Path, dtype: str) -> None:
    write_varied_model(tmp_path, LISTED_TYPES["jetmoe"], seed=5)
    answers = []
    for operations in (None, SingleCalls(1, "")):
        runner = load_with(tmp_path, dtype=dtype, num_blocks=224, operations=operations)
        assert (runner.model.why_unverified, runner.model.bit_exact_reason) == ("", "")
        assert (runner._transformer.why_no_programs == "") == (operations is None)
        answers.append(in_chunks(runner, prompts("jetmoe"), DRAWN, 40))
    assert answers[0] == answers[1]
