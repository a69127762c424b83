"""What adapters add to products in the kernels: right, with the same bits in every call, on every instruction set."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.low_rank import LowRank, Outputs, RowAdapters
from baton.runner.model.stored.quantize import quantized
from tests.support import reference_operations as reference

ISAS = kernels.available().isas
ROWS = 21
SLOTS = torch.tensor([-1, 0, 0, 0, 0, 0, 1, -1, 2, 1, 1, 2, 3, 0, 1, 2, -1, -1, 0, 0, 0], dtype=torch.int32)


def adapters_for(k: int, outputs: tuple[int, ...], seed: int = 0) -> list[list[LowRank] | None]:
    """Adapters of several ranks for stacked outputs: with all modules, with one of them, with a bias, and with none."""
    generator = torch.Generator().manual_seed(seed)

    def term(rank: int, part: int, factor: float, biased: bool = False) -> LowRank:
        n = outputs[part]
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, k), (n, rank)))
        bias = torch.randn(n, generator=generator) if biased else None
        return LowRank(a, factor, (Outputs(sum(outputs[:part]), b, bias),))

    every = [term(3 + part, part, 0.5) for part in range(len(outputs))]
    return [every, [term(16, len(outputs) - 1, 2.0)], [term(9, 0, -1.0, biased=True)], None]


def packed_adapters(weight: kernels.Packed, terms: list[list[LowRank] | None], dtype: torch.dtype) -> RowAdapters:
    return RowAdapters(SLOTS, [None if one is None else kernels.adapt(weight, one, dtype) for one in terms])


def expected(x: torch.Tensor, sums: torch.Tensor, terms: list[list[LowRank] | None]) -> torch.Tensor:
    """The sums of a product in float64, with what the rows' adapters add."""
    out = sums.double()
    for row, slot in enumerate(SLOTS.tolist()):
        for term in (terms[slot] if slot >= 0 else None) or ():
            t = term.a.to(x.dtype).double() @ x[row].double()
            for outputs in term.outputs:
                more = outputs.b.to(x.dtype).double() @ t
                if outputs.bias is not None:
                    more = more + outputs.bias.to(x.dtype).double()
                out[row, outputs.first : outputs.stop] += term.factor * more
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "outputs"), [(64, (64, 64)), (100, (40, 7, 90)), (32, (5,))])
def test_adapters_are_added_with_the_same_bits_everywhere(dtype: torch.dtype, k: int, outputs: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, k, generator=generator).to(dtype) for n in outputs]
    x = torch.randn(ROWS, k, generator=generator).to(dtype)
    terms = adapters_for(k, outputs)
    wanted = expected(x, functional.linear(x.double(), torch.cat(weights).double()), terms)
    bits: dict[str, torch.Tensor] = {}
    for isa in ISAS:
        kernels.use_isa(isa)
        weight = kernels.pack(*weights)
        adapters = packed_adapters(weight, terms, dtype)
        plain = kernels.linear(x, weight, out_dtype=torch.float32, threads=1)
        out = kernels.linear(x, weight, out_dtype=torch.float32, threads=2, adapters=adapters)
        torch.testing.assert_close(out.double(), wanted, atol=2e-3, rtol=1e-4)
        unchanged = [row for row, slot in enumerate(SLOTS.tolist()) if slot in (-1, 3)]
        assert torch.equal(out[unchanged], plain[unchanged])
        for row in range(ROWS):
            alone = RowAdapters(SLOTS[row : row + 1], adapters.weights)
            one = kernels.linear(x[row : row + 1], weight, out_dtype=torch.float32, threads=1, adapters=alone)
            assert torch.equal(one[0], out[row]), f"row {row} alone on {isa}"
        bits[isa] = out
    like = [out for isa, out in bits.items() if not isa.startswith("amx")]
    assert all(torch.equal(one, like[0]) for one in like)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [(64, 64), (16, 40)])
def test_stacked_modules_may_have_any_ranks(isa: str, dtype: torch.dtype, outputs: tuple[int, int]) -> None:
    kernels.use_isa(isa)
    generator = torch.Generator().manual_seed(5)
    weight = kernels.pack(*(torch.randn(n, 32, generator=generator).to(dtype) for n in outputs))
    x = torch.randn(3, 32, generator=generator).to(dtype)
    # What the last row computes must not reach the rows before it.
    x[2] = torch.inf
    plain = kernels.linear(x, weight, out_dtype=torch.float32, threads=1)
    matrices = [(torch.randn(9, 32, generator=generator), torch.randn(n, 9, generator=generator)) for n in outputs]
    for ranks in product(range(1, 10), repeat=2):
        firsts = (0, outputs[0])
        terms = [
            LowRank(a[:rank], 0.5, (Outputs(first, b[:, :rank]),))
            for rank, first, (a, b) in zip(ranks, firsts, matrices, strict=True)
        ]
        weights = [kernels.adapt(weight, terms, dtype)]
        out = kernels.linear(x, weight, out_dtype=torch.float32, threads=1, adapters=of_first_slot(3, weights))
        wanted = plain[:2].double()
        for term in terms:
            (part,) = term.outputs
            t = x[:2].double() @ term.a.to(dtype).double().T
            wanted[:, part.first : part.stop] += term.factor * (t @ part.b.to(dtype).double().T)
        torch.testing.assert_close(out[:2].double(), wanted, atol=2e-3, rtol=1e-4)
        for row in range(2):
            alone = of_first_slot(1, weights)
            one = kernels.linear(x[row : row + 1], weight, out_dtype=torch.float32, threads=1, adapters=alone)
            assert torch.equal(one[0], out[row]), f"row {row} alone, ranks {ranks}"


def of_first_slot(num_rows: int, weights: list[Any]) -> RowAdapters:
    return RowAdapters(torch.zeros(num_rows, dtype=torch.int32), weights)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [64, 40, 5])
def test_gate_and_up_are_changed_before_the_activation(isa: str, n: int) -> None:
    kernels.use_isa(isa)
    generator = torch.Generator().manual_seed(2)
    gate, up, x = (torch.randn(rows, 64, generator=generator) for rows in (n, n, ROWS))
    terms = adapters_for(64, (n, n))
    sums = expected(x, functional.linear(x.double(), torch.cat((gate, up)).double()), terms)
    weight = kernels.pack_gated(gate, up)
    adapters = packed_adapters(weight, terms, torch.float32)
    out = kernels.gated_linear(x, weight, activation="silu", threads=1, adapters=adapters)
    torch.testing.assert_close(out.double(), functional.silu(sums[:, :n]) * sums[:, n:], atol=2e-2, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_of_quantised_weights_compute_from_rows_that_are_not(isa: str, bits: int) -> None:
    kernels.use_isa(isa)
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(70, 64, generator=generator)
    x = torch.randn(ROWS, 64, generator=generator)
    weight = kernels.pack(quantized(matrix, bits), matrix[:20])
    terms = adapters_for(64, (70, 20))
    adapters = packed_adapters(weight, terms, torch.float32)
    plain = kernels.linear(x, weight, threads=1)
    out = kernels.linear(x, weight, threads=1, adapters=adapters)
    torch.testing.assert_close(out.double(), expected(x, plain, terms), atol=2e-3, rtol=1e-4)


def test_the_reference_computes_the_same() -> None:
    generator = torch.Generator().manual_seed(4)
    matrix, x = torch.randn(30, 64, generator=generator), torch.randn(ROWS, 64, generator=generator)
    terms = adapters_for(64, (30,))
    weight = reference.pack(matrix)
    adapters = RowAdapters(SLOTS, [None if one is None else reference.adapt(weight, one, x.dtype) for one in terms])
    out = reference.linear(x, weight, adapters=adapters)
    sums = functional.linear(x.double(), matrix.double())
    torch.testing.assert_close(out.double(), expected(x, sums, terms), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_may_have_an_adapter_of_its_own(isa: str, dtype: torch.dtype) -> None:
    """Several groups of columns and pieces of k, so that weights and adapters are prefetched while others are added."""
    kernels.use_isa(isa)
    generator = torch.Generator().manual_seed(6)
    k, outputs, ranks = 320, (192, 100), (16, 2, 64, 7, 33, 16, 1, 40)
    matrices = [torch.randn(n, k, generator=generator).to(dtype) for n in outputs]
    x = torch.randn(len(ranks), k, generator=generator).to(dtype)
    weight = kernels.pack(*matrices)
    terms = []
    for rank in ranks:
        a = torch.randn(rank, k, generator=generator) / k
        b = torch.randn(sum(outputs), rank, generator=generator)
        terms.append([LowRank(a, 0.5, (Outputs(0, b),))])
    weights = [kernels.adapt(weight, one, dtype) for one in terms]
    slots = torch.arange(len(ranks), dtype=torch.int32)
    out = kernels.linear(x, weight, out_dtype=torch.float32, threads=1, adapters=RowAdapters(slots, weights))
    sums = functional.linear(x.double(), torch.cat(matrices).double())
    for row, (term,) in enumerate(terms):
        (part,) = term.outputs
        t = term.a.to(dtype).double() @ x[row].double()
        wanted = sums[row] + term.factor * (part.b.to(dtype).double() @ t)
        torch.testing.assert_close(out[row].double(), wanted, atol=2e-3, rtol=1e-4)
        alone = RowAdapters(slots[row : row + 1], weights)
        one = kernels.linear(x[row : row + 1], weight, out_dtype=torch.float32, threads=1, adapters=alone)
        assert torch.equal(one[0], out[row]), f"row {row} alone"


def test_terms_of_more_ranks_than_a_panel_can_count_are_refused() -> None:
    weight = kernels.pack(torch.ones(8, 32))
    term = LowRank(torch.empty(1, 32).expand(1 << 15, 32), 1.0, ())
    with pytest.raises(KernelArgumentError, match="terms"):
        kernels.adapt(weight, [term, term], torch.float32)


def test_slots_must_be_those_of_the_rows() -> None:
    weight = kernels.pack(torch.ones(8, 32))
    adapters = RowAdapters(SLOTS, [kernels.adapt(weight, [LowRank(torch.ones(1, 32), 1.0, ())], torch.float32)] * 4)
    with pytest.raises(KernelArgumentError, match="slots"):
        kernels.linear(torch.ones(3, 32), weight, threads=1, adapters=adapters)
