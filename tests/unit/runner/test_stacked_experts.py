"""Experts outside of transformers' ExpertsInterface are recognised by what they give, and computed in one way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.routing import ExpertKind
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model.mixtures.chosen import ChosenProduct
from baton.runner.model.mixtures.experts import PackedExperts
from baton.runner.model.mixtures.recognition import fuse_mixtures
from baton.runner.model.mixtures.stacked import stacked_experts_of
from baton.runner.model.stored.layers import hold_experts
from baton.runner.model.stored.quantize import quantized
from baton.runner.model.stored.weight import StoredWeight
from tests.oracle.test_types import DRAWN, alone, in_chunks, prompts
from tests.support.kernel_inputs import randn
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_with
from tests.support.varied_models import write_varied_model

KINDS = {
    "llama4_text": (Llama4TextExperts, ExpertKind(weighs_inputs=True)),
    "longcat_flash": (LongcatFlashExperts, ExpertKind(passes_rest=True)),
}


def experts_of(name: str) -> Any:
    experts = KINDS[name][0](AutoConfig.for_model(**{"pad_token_id": None, **LISTED_TYPES[name]}))
    for seed, parameter in enumerate(experts.parameters()):
        parameter.data = 0.2 * randn(*parameter.shape, seed=seed)
    return experts


@torch.inference_mode()
@pytest.mark.parametrize("name", KINDS)
def test_experts_are_recognised_by_what_they_give(name: str) -> None:
    experts, kind = experts_of(name), KINDS[name][1]
    found = stacked_experts_of(experts, torch.Generator().manual_seed(0), torch.empty(0))
    assert found is not None
    assert found.experts.baton_kind == kind
    # Something else, and a limit that usual rows don't reach.
    for change in (lambda out: 2 * out, lambda out: out.clamp(-1e4, 1e4)):
        handle = experts.register_forward_hook(lambda _part, _given, out, change=change: change(out))
        assert stacked_experts_of(experts, torch.Generator().manual_seed(0), torch.empty(0)) is None
        handle.remove()


@torch.inference_mode()
@pytest.mark.parametrize("name", KINDS)
def test_experts_that_are_multiplied_one_by_one_give_the_same(name: str) -> None:
    """Adapters, ranks and operations of torch multiply them so."""
    experts = experts_of(name)
    total, x = len(experts.gate_up_proj), randn(9, 64, seed=8)
    chosen = torch.stack([torch.arange(9) % total, (torch.arange(9) + 2) % total], dim=1)
    weights = randn(9, 2, seed=9).sigmoid()
    outs = []
    for operations in (CompiledOperations(1, ""), TorchOperations(1)):
        module: Any = stacked_experts_of(experts_of(name), torch.Generator().manual_seed(0), torch.empty(0))
        packed = PackedExperts(operations, module.experts, 1, lambda _: None)
        outs.append(packed.compute(module.experts, x, chosen, weights))
        packed.mixture = None
        outs.append(packed.compute(module.experts, x, chosen, weights))
    assert torch.equal(outs[0], outs[1])
    assert torch.allclose(outs[0], outs[2], atol=1e-5)
    dense = torch.zeros(9, total).scatter_(1, chosen, weights)
    if name == "llama4_text":
        expected = experts((x * dense.T[..., None]).reshape(-1, 64)).view(total, 9, 64).sum(0)
    else:
        expected = experts(x, chosen, weights)
    assert torch.allclose(outs[0], expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_may_have_several_experts_that_take_them_weighted(tmp_path: Path, dtype: str) -> None:
    write_varied_model(tmp_path, {**LISTED_TYPES["llama4_text"], "num_experts_per_tok": 2}, seed=5)
    runner = load_with(tmp_path, dtype=dtype, num_blocks=64)
    assert (runner.model.why_unverified, runner.model.bit_exact_reason) == ("", "")
    assert runner._transformer.why_no_programs == ""


@pytest.mark.parametrize(
    ("name", "quantization"), [("llama4_text", "int8"), ("longcat_flash", "int4"), ("jetmoe", "int4")]
)
def test_they_are_quantised_as_other_experts(tmp_path: Path, name: str, quantization: str) -> None:
    write_varied_model(tmp_path, LISTED_TYPES[name], seed=5)
    runner = load_with(tmp_path, dtype="bfloat16", num_blocks=224, quantization=quantization)
    transformer = runner._transformer
    reasons = (runner.model.why_unverified, runner.model.bit_exact_reason, transformer.why_no_programs)
    assert reasons == ("", "", "")
    packed: list[Any] = []
    for part in transformer._module.modules():
        if isinstance(part, ChosenProduct):
            packed += part._packed
        if (experts := getattr(part, "baton_experts", None)) is not None:
            packed += [*experts._up.packed, *experts._down.packed]
    assert {weight.format.bits for weight in packed} == {int(quantization[3:])}
    assert in_chunks(runner, prompts(name), DRAWN, 40) == alone(runner, prompts(name), DRAWN)


@torch.inference_mode()
@pytest.mark.parametrize("name", KINDS)
def test_those_that_compute_something_else_have_plain_weights_again(name: str) -> None:
    experts, is_transposed = experts_of(name), name == "llama4_text"
    held: dict[str, list[list[StoredWeight]]] = {}
    for parameter, weights in [*experts.named_parameters()]:
        codes = [quantized((weight.T if is_transposed else weight).contiguous(), 8) for weight in weights]
        held[parameter] = [[StoredWeight(one.shape, partial(replace, one), 0)] for one in codes]
    hold_experts(experts, held, are_transposed=is_transposed)
    experts.register_forward_hook(lambda _part, _given, out: 2 * out)
    fuse_mixtures(nn.ModuleDict({"experts": experts, "router": nn.Linear(64, 4)}), TorchOperations(1), torch.empty(0))
    for parameter, of_experts in held.items():
        plain = torch.stack([one.dequantized() for (one,) in of_experts])
        assert torch.equal(getattr(experts, parameter), plain.mT if is_transposed else plain)
