"""Implementations choose experts as torch does in float32 and sum them alike; mixtures have their experts' bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.cpu.kernels.product import Ungated
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.quantized_weight import Float8Weight
from baton.runner.backends.routing import (
    PLAIN_EXPERTS,
    ClampedGate,
    ExpertBiases,
    ExpertKind,
    Routing,
    SharedRows,
    choose,
)
from baton.runner.model.stored.quantize import quantized
from tests.support.kernel_inputs import randn

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)
EXPERTS, MOST = 24, 5
ROUTINGS = {
    "softmax": Routing(EXPERTS, MOST, "softmax", torch.float32),
    "softmax, normalised": Routing(EXPERTS, MOST, "softmax", torch.bfloat16, normalised=True),
    "of the chosen": Routing(EXPERTS, MOST, "softmax_of_chosen", torch.float32, factor=0.5),
    "sigmoid in groups": Routing(
        *(EXPERTS, MOST, "sigmoid", torch.float32),
        choice_bias=randn(EXPERTS, seed=7),
        groups=6,
        most_groups=2,
        groups_by_two=True,
        normalised=True,
        eps=1e-6,
        factor=2.5,
    ),
    "of those near": Routing(EXPERTS, MOST, "softmax_of_near", torch.float32, near=0.5),
    "with factors of experts": Routing(
        *(EXPERTS, MOST, "softmax", torch.float32), normalised=True, expert_factors=randn(EXPERTS, seed=8)
    ),
    "softmax in groups": Routing(EXPERTS, MOST, "softmax", torch.float32, groups=4, most_groups=2),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_have_the_experts_that_torch_chooses(operations: Any, name: str) -> None:
    routing = ROUTINGS[name]
    for dtype in (torch.float32, torch.bfloat16):
        logits = (3 * randn(70, EXPERTS)).to(dtype)
        chosen, weights = operations.route(logits, routing)
        expected, of_expected = choose(logits, routing)
        # Scores of equal logits are equal, and then the first expert counts more.
        assert torch.equal(chosen, expected)
        near = 2**-8 if routing.weights_dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(weights, of_expected, rtol=near, atol=0)
        assert torch.equal(weights, weights.to(routing.weights_dtype).float())
        for row in (0, 33, 69):
            alone = operations.route(logits[row : row + 1], routing)
            assert torch.equal(alone[0][0], chosen[row])
            assert torch.equal(alone[1][0], weights[row])


def test_a_row_whose_logits_are_no_numbers_has_experts(operations: Any) -> None:
    for routing in ROUTINGS.values():
        chosen, _ = operations.route(torch.full((2, EXPERTS), float("nan")), routing)
        assert all(sorted({*row}) == sorted(row) and 0 <= min(row) <= max(row) < EXPERTS for row in chosen.tolist())


@pytest.mark.parametrize("given", ["nothing", "rows", "rows and gates", "one row"])
def test_sums_of_experts_equal_those_in_float64(operations: Any, given: str) -> None:
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        outs, rows, gate = (
            randn(40, 48, dtype=dtype),
            randn(9, 48, seed=1, dtype=dtype),
            randn(9, 1, seed=2, dtype=dtype),
        )
        places = torch.randperm(40, generator=torch.Generator().manual_seed(0))[: 9 * 4].view(9, 4).int()
        places[3] = -1
        places[5, 1] = -1
        weights = randn(9, 4, seed=3)
        rows = rows[4:5] if given == "one row" else rows
        shared = None if given == "nothing" else SharedRows(rows, gate if given == "rows and gates" else None)
        out = operations.sum_experts(outs, places, weights, 1.5, shared)
        terms = outs.double()[places.long()] * (weights.double() * (places >= 0))[..., None]
        expected = 1.5 * terms.sum(1)
        if shared is not None:
            expected += rows.double() * (gate.double().sigmoid() if shared.gate is not None else 1.0)
        assert out.dtype == dtype
        assert float((out.double() - expected).abs().max()) < near * float(expected.abs().max())
        one = (
            SharedRows(rows.expand(9, -1)[4:5], gate[4:5] if shared and shared.gate is not None else None)
            if shared
            else None
        )
        assert torch.equal(operations.sum_experts(outs, places[4:5], weights[4:5], 1.5, one)[0], out[4])


EXPERT_KINDS = {
    "weighted behind": PLAIN_EXPERTS,
    "weighted before": ExpertKind(weighs_inputs=True),
    "passing": ExpertKind(passes_rest=True),
    "weighted before, and passing": ExpertKind(weighs_inputs=True, passes_rest=True),
}


def narrowed(weight: torch.Tensor, kind: str) -> Any:
    if kind == "float8":
        return Float8Weight(weight.to(torch.float8_e4m3fn), randn(len(weight), weight.shape[1] // 32, seed=8).abs(), 32)
    return weight if kind == "plain" else quantized(weight, int(kind))


@needs_kernels
@pytest.mark.parametrize("of_experts", [*EXPERT_KINDS, "without gates"])
@pytest.mark.parametrize("kind", ["plain", "8", "4", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_has_the_bits_of_its_experts(dtype: torch.dtype, kind: str, of_experts: str) -> None:
    is_gated = of_experts != "without gates"
    operations, experts, k, inner = CompiledOperations(3, ""), 6, 64, 96

    def weight(seed: int, n: int, width: int) -> Any:
        return narrowed(randn(n, width, seed=seed, dtype=dtype), kind)

    if is_gated:
        ups = [operations.pack_gated(weight(each, inner, k), weight(20 + each, inner, k)) for each in range(experts)]
    else:
        ups = [operations.pack(weight(each, inner, k)) for each in range(experts)]
    downs = [operations.pack(weight(40 + each, k, inner)) for each in range(experts)]
    does = EXPERT_KINDS.get(of_experts, PLAIN_EXPERTS)
    gate: Any = "silu" if is_gated else Ungated("relu_squared")
    mixture: Any = operations.pack_mixture(ups, downs, gate, None, does)
    for num_rows in (1, 7, 150):
        x = randn(num_rows, k, seed=9, dtype=dtype)
        # One expert has many rows, another has none, and one number is no expert's.
        chosen = (torch.rand(num_rows, 3, generator=torch.Generator().manual_seed(1)) ** 2 * (experts + 1)).int()
        of_rows = randn(num_rows, 3, seed=2).softmax(-1)
        outs = torch.zeros(num_rows * 3, k, dtype=dtype)
        for place, expert in enumerate(chosen.flatten().tolist()):
            row = x[place // 3][None]
            if expert < experts:
                given = row * of_rows.flatten()[place].to(dtype) if does.weighs_inputs else row
                if is_gated:
                    middle = operations.gated_linear(given, ups[expert], activation="silu")
                else:
                    middle = operations.activate(operations.linear(given, ups[expert]), "relu_squared")
                outs[place] = operations.linear(middle, downs[expert])
            elif does.passes_rest:
                outs[place] = row
        gives = (chosen.flatten() < experts) | does.passes_rest
        places = torch.arange(num_rows * 3, dtype=torch.int32).where(gives, -1).view(num_rows, 3)
        shared = SharedRows(randn(num_rows, k, seed=4, dtype=dtype), randn(num_rows, 1, seed=5, dtype=dtype))
        of_sum = torch.where(chosen < experts, 1.0, of_rows) if does.weighs_inputs else of_rows
        expected = operations.sum_experts(outs, places, of_sum, 0.7, shared)
        assert torch.equal(operations.mix_experts(x, chosen, of_rows, mixture, 0.7, shared), expected)
    assert operations.mix_experts(x[:0], chosen[:0], of_rows[:0], mixture).shape == (0, k)


@needs_kernels
@pytest.mark.parametrize("kind", ["plain", "8", "4", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chosen_products_have_the_bits_of_each(dtype: torch.dtype, kind: str) -> None:
    operations, experts, k, n = CompiledOperations(3, ""), 6, 64, 96
    packed = [operations.pack(narrowed(randn(n, k, seed=each, dtype=dtype), kind)) for each in range(experts)]
    choice: Any = operations.pack_choice(packed)
    for num_rows in (1, 7, 150):
        # One expert has many rows, another has none, and one number is no expert's.
        chosen = (torch.rand(num_rows, 3, generator=torch.Generator().manual_seed(1)) ** 2 * (experts + 1)).int()
        weights, shared = randn(num_rows, 3, seed=2), SharedRows(randn(1, n, seed=4, dtype=dtype))
        places = torch.arange(num_rows * 3, dtype=torch.int32).view(num_rows, 3).where(chosen < experts, -1)
        for width in (k, 3 * k):
            x = randn(num_rows, width, seed=9, dtype=dtype)
            outs = torch.zeros(num_rows * 3, n, dtype=dtype)
            for place, expert in enumerate(chosen.flatten().tolist()):
                row = x.view(num_rows, -1, k)[place // 3, place % (width // k)]
                if expert < experts:
                    outs[place] = operations.linear(row[None], packed[expert])
            assert torch.equal(operations.multiply_chosen(x, chosen, choice), outs.view(num_rows, -1))
            expected = operations.sum_experts(outs, places, weights, 1.0, shared)
            assert torch.equal(operations.multiply_chosen(x, chosen, choice, weights, shared), expected)


def test_clamped_gates_equal_those_in_float64(operations: Any) -> None:
    gate = ClampedGate(limit=2.0, alpha=1.7)
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        rows = (3 * randn(9, 2 * 37)).to(dtype)
        out = operations.clamped_gate(rows, gate)
        first, second = rows.double()[:, ::2].clamp(max=2.0), rows.double()[:, 1::2].clamp(-2.0, 2.0)
        assert out.dtype == dtype
        assert torch.allclose(out.double(), (second + 1) * first * (1.7 * first).sigmoid(), rtol=near, atol=near)
        assert torch.equal(operations.clamped_gate(rows[4:5], gate)[0], out[4])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_with_biases_and_a_clamped_gate_has_the_bits_of_its_experts(dtype: torch.dtype) -> None:
    operations, experts, k, inner, gate = CompiledOperations(2, ""), 5, 64, 32, ClampedGate(7.0, 1.7)
    ups = [operations.pack(randn(2 * inner, k, seed=each, dtype=dtype)) for each in range(experts)]
    downs = [operations.pack(randn(k, inner, seed=20 + each, dtype=dtype)) for each in range(experts)]
    biases = ExpertBiases(randn(experts, 2 * inner, seed=40, dtype=dtype), randn(experts, k, seed=41, dtype=dtype))
    mixture: Any = operations.pack_mixture(ups, downs, gate, biases)
    x, of_rows = randn(9, k, seed=9, dtype=dtype), randn(9, 2, seed=2)
    chosen = torch.stack([torch.arange(9) % experts, (torch.arange(9) + 2) % experts], dim=1).int()
    outs = []
    for place, expert in enumerate(chosen.flatten().tolist()):
        up = operations.linear(x[place // 2][None], ups[expert], biases.up[expert])
        outs.append(operations.linear(operations.clamped_gate(up, gate), downs[expert], biases.down[expert]))
    places = torch.arange(18, dtype=torch.int32).view(9, 2)
    expected = operations.sum_experts(torch.cat(outs), places, of_rows)
    assert torch.equal(operations.mix_experts(x, chosen, of_rows, mixture), expected)


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    operations, weight = CompiledOperations(1, ""), randn(64, 64)
    gated, plain = operations.pack_gated(weight, weight), operations.pack(weight)
    fewer = operations.pack_gated(weight[:32], weight[:32])
    assert operations.pack_mixture([gated, fewer], [plain] * 2, "silu") is None
    assert operations.pack_mixture([gated, gated], [plain, operations.pack(weight.bfloat16())], "silu") is None
    mixture: Any = operations.pack_mixture([gated], [plain], "silu")
    x, chosen, weights = randn(3, 64), torch.zeros(3, 2, dtype=torch.int32), randn(3, 2)
    for changed in ({"x": x[:, :32]}, {"x": x.bfloat16()}, {"chosen": chosen.long()}, {"weights": weights[:2]}):
        given: dict[str, Any] = {"x": x, "chosen": chosen, "weights": weights, **changed}
        with pytest.raises(KernelArgumentError):
            operations.mix_experts(given["x"], given["chosen"], given["weights"], mixture)
    assert operations.pack_choice([gated]) is None
    choice: Any = operations.pack_choice([plain])
    for changed in ({"x": x[:, :32].contiguous()}, {"x": x.bfloat16()}, {"chosen": chosen[:2]}, {"weights": weights.T}):
        given = {"x": x, "chosen": chosen, "weights": weights, **changed}
        with pytest.raises(KernelArgumentError):
            operations.multiply_chosen(given["x"], given["chosen"], choice, given["weights"])
    with pytest.raises(KernelArgumentError, match="places"):
        operations.sum_experts(x, chosen + 3, weights)
    with pytest.raises(KernelArgumentError, match="not of 24"):
        operations.route(x, ROUTINGS["softmax"])
    for wrong in (
        {"most": 13, "most_groups": 1},
        {"groups": 5},
        {"choice_bias": randn(3)},
        {"expert_factors": randn(3)},
    ):
        with pytest.raises(ValueError, match=r"experts|bias"):
            replace(ROUTINGS["sigmoid in groups"], **wrong)
