"""Convolutions and recurrences recorded in a program equal single calls, bit for bit, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, Program
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall
from baton.runner.backends.torch_operations import TorchOperations
from tests.support.kernel_inputs import DTYPES, one_request, randn, relative_error
from tests.support.stateful_rows import Chunk, Convolved, Recurred

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

LENGTHS = (40, 9, 20)
STEPS: list[list[Chunk]] = [[(0, 0, 33), (1, 0, 9)], [(0, 33, 35), (2, 0, 20)], [(0, 34, 40)]]
DRAFTS = (0, 1, 2)
HEADS, GROUPS, KEY_DIM, VALUE_DIM = 4, 2, 20, 24
KEYS, VALUES = GROUPS * KEY_DIM, HEADS * VALUE_DIM


def layout_of(call: ConvolutionCall | RecurrenceCall, rows: int, drafts: int) -> StepLayout:
    """The step of a call as that of a program with two groups of layers, of which the second has its block tables."""
    step, slots = call.step, torch.zeros(rows, dtype=torch.int64)
    tables = [torch.full_like(step.block_tables, -1), step.block_tables]
    return StepLayout(
        step.query_start,
        step.seq_lens,
        tables,
        [slots, slots],
        torch.zeros_like(step.query_start),
        kept_lens=step.kept_lens if drafts else None,
    )


def run(program: Program, arguments: Sequence[torch.Tensor], layout: StepLayout) -> None:
    program.run(arguments, layout, torch.zeros(0, dtype=torch.int64))


def layers(dtype: torch.dtype, rule: Any = "delta") -> tuple[Convolved, Recurred]:
    """A convolution of queries, keys and values together, and the recurrence of them."""
    convolved = Convolved(lengths=LENGTHS, shape=(3, 2 * KEYS + VALUES), dtype=dtype)
    shape = (HEADS, KEY_DIM, VALUE_DIM)
    return convolved, Recurred(lengths=LENGTHS, shape=shape, groups=GROUPS, dtype=dtype, decay_per_key=True, rule=rule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["delta", "factor", "plain"])
def test_a_program_computes_the_bits_of_single_calls(dtype: torch.dtype, rule: Any) -> None:
    (convolved, recurred), (convolved_alone, recurred_alone) = layers(dtype, rule), layers(dtype, rule)
    beta, skip = rule != "plain", recurred.call(STEPS[0]).skip
    weights = convolved.call(STEPS[0])
    program = Program(dtype, 2)
    x = program.argument(2 * KEYS + VALUES)
    decay = program.argument(HEADS * KEY_DIM, dtype=torch.float32)
    betas = program.argument(HEADS, dtype=torch.float32) if beta else None
    out = program.argument(VALUES)
    mixed = program.convolve(x, weights.weight, weights.bias, "silu", convolved.view, 1, into="mixed")
    program.recur(
        mixed.columns(0, KEYS),
        mixed.columns(KEYS, 2 * KEYS),
        mixed.columns(2 * KEYS, 2 * KEYS + VALUES),
        decay,
        betas,
        scale=0.3,
        norm_eps=1e-6,
        state=recurred.view,
        group=1,
        has_delta_rule=rule == "delta",
        skip=skip,
        into=out,
    )
    for chunks, drafts in zip(STEPS, DRAFTS, strict=True):
        of_rows, of_states = convolved.call(chunks, drafts), recurred.call(chunks, drafts)
        rows = of_rows.rows.shape[0]
        found = torch.empty(rows, VALUES, dtype=dtype)
        arguments = [of_rows.rows, of_states.decay.view(rows, -1), of_states.beta, found]
        run(
            program,
            [part for part in arguments if part is not None],
            layout_of(of_rows, rows, drafts),
        )
        parts = kernels.convolve(convolved_alone.call(chunks, drafts), threads=1)
        query, key, value = parts.split_with_sizes([KEYS, KEYS, VALUES], dim=1)
        alone = replace(
            recurred_alone.call(chunks, drafts),
            query=query.view(rows, GROUPS, KEY_DIM),
            key=key.view(rows, GROUPS, KEY_DIM),
            value=value.view(rows, HEADS, VALUE_DIM),
            scale=0.3,
        )
        assert torch.equal(found, kernels.recur(alone, threads=1).view(rows, -1))
        for one, other in ((convolved, convolved_alone), (recurred, recurred_alone)):
            assert torch.equal(one.view.memory.nan_to_num(), other.view.memory.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_gates_equal_single_calls(dtype: torch.dtype) -> None:
    """The rows are some columns of wider ones; the gates are the decays and betas of a recurrence."""
    recurred = Recurred(lengths=LENGTHS, shape=(HEADS, KEY_DIM, VALUE_DIM), groups=GROUPS, dtype=dtype)
    alone = replace(recurred)
    call, rows = recurred.call([(0, 0, 35)]), 35
    x, z, weight = (
        randn(rows, 50, dtype=dtype),
        randn(rows, 7 + VALUES, seed=1, dtype=dtype),
        randn(HEADS, VALUE_DIM).to(dtype),
    )
    bias, factor = randn(HEADS, seed=2), -randn(HEADS, seed=3).exp()
    program = Program(dtype, 2)
    wide, of_z, query, key, value = map(program.argument, (50, 7 + VALUES, KEYS, KEYS, VALUES))
    out = program.argument(VALUES)
    decay = program.gate(wide.columns(5, 5 + HEADS), "softplus", bias, factor, (0.5, 0.9), bias, into="decay")
    beta = program.gate(wide.columns(20, 20 + HEADS), "sigmoid", None, None, into="beta")
    how: dict[str, Any] = {"scale": 0.3, "norm_eps": 1e-6, "state": recurred.view, "group": 1, "into": "mixed"}
    mixed = program.recur(query, key, value, decay, beta, **how)
    program.gated_rms_norm(mixed, of_z.columns(7, 7 + VALUES), weight, 1e-5, "silu", gate_first=True, into=out)
    found = torch.empty(rows, VALUES, dtype=dtype)
    flat = [part.flatten(1) for part in (call.query, call.key, call.value)]
    run(program, [x, z, *flat, found], layout_of(call, rows, 0))
    single = kernels.recur(
        replace(
            alone.call([(0, 0, 35)]),
            decay=kernels.gate(x[:, 5 : 5 + HEADS], "softplus", bias, factor, (0.5, 0.9), bias, threads=1),
            beta=kernels.gate(x[:, 20 : 20 + HEADS], "sigmoid", None, None, threads=1),
            scale=0.3,
        ),
        threads=1,
    )
    of_heads = z[:, 7:].view(rows, HEADS, VALUE_DIM)
    normed = kernels.gated_rms_norm(single, of_heads, weight, 1e-5, "silu", gate_first=True, threads=1)
    assert torch.equal(found, normed.flatten(1))


@pytest.mark.parametrize("isa", kernels.available().isas)
@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_products_of_rows_equal_single_calls(dtype: torch.dtype, isa: str) -> None:
    """All rows, and those that sample, are compared with what torch computes, on each instruction set."""
    kernels.use_isa(isa)
    rows, sampled = 35, torch.tensor([3, 4, 20, 34])
    wide, by = randn(rows, 50, dtype=dtype), (9 * randn(rows, 36, seed=1)).to(dtype)
    program = Program(dtype, 2)
    x, multiplier, out = program.argument(50), program.argument(36), program.argument(36, sampled=True)
    plain = program.multiply(x.columns(5, 41), multiplier, None, into="plain")
    activated = program.multiply(plain, x.columns(13, 49), "softplus", into="activated")
    of_heads = program.multiply(activated, x.columns(2, 6), "sigmoid", into="of heads")
    few = program.take_sampled(of_heads, into="few")
    program.multiply(few, program.take_sampled(multiplier, into="few multipliers"), "sigmoid", into=out)
    found = torch.empty(4, 36, dtype=dtype)
    program.run([wide, by, found], one_request(rows), sampled)

    def multiply(one: torch.Tensor, other: torch.Tensor, activation: Any) -> torch.Tensor:
        product = kernels.multiply(one, other, activation, threads=1)
        assert relative_error(product, TorchOperations(1).multiply(one, other, activation).double()) < 3e-3
        return product

    activated_alone = multiply(multiply(wide[:, 5:41], by, None), wide[:, 13:49], "softplus")
    of_heads_alone = multiply(activated_alone, wide[:, 2:6], "sigmoid")
    assert torch.equal(found, multiply(of_heads_alone[sampled], by[sampled], "sigmoid"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_sums_norms_and_activations_equal_single_calls(dtype: torch.dtype) -> None:
    """A sum replaces rows or stands beside them, and a norm behind it has a bias, or weights of heads."""
    rows, nothing = 35, torch.empty(0, dtype=torch.int64)
    one, other = randn(rows, 48, dtype=dtype), randn(rows, 48, seed=1, dtype=dtype)
    weight, bias, of_heads = (randn(*shape, seed=2, dtype=dtype) for shape in ((48,), (48,), (3, 16)))
    program = Program(dtype, 2)
    x, y, out, sums = (program.argument(48) for _ in range(4))
    program.add(x, y, 0.3, into=x)
    beside = program.add(x, y, 1.0, into="beside")
    normed = program.add_layer_norm(y, beside, weight, bias, 1e-5, into="normed")
    activated = program.activate(normed, "gelu", into="activated")
    bounded = program.clamp(activated, 0.5, into="bounded")
    program.layer_norm(bounded, of_heads, None, 1e-5, into=out)
    program.add(beside, beside, 1.0, into=sums)
    given, found, doubled = one.clone(), torch.empty_like(one), torch.empty_like(one)
    program.run([given, other, found, doubled], one_request(rows), nothing)
    assert torch.equal(given, one + other * 0.3)
    total = given + other + other
    assert torch.equal(doubled, total + total)
    alone = kernels.activate(kernels.layer_norm(total, weight, bias, 1e-5, threads=1), "gelu", threads=1)
    alone = kernels.layer_norm(alone.clamp(-0.5, 0.5).view(rows, 3, 16), of_heads, None, 1e-5, threads=1)
    assert torch.equal(found, alone.flatten(1))


def test_sums_and_norms_that_do_not_fit_are_refused() -> None:
    program = Program(torch.float32, 1)
    x = program.argument(16)
    for other in (x.columns(0, 8), program.argument(16, sampled=True), program.argument(24).columns(0, 16)):
        with pytest.raises(KernelArgumentError, match="other: "):
            program.add(x, other, 1.0, into=x)
    for weight in (torch.ones(5), torch.ones(3, 8), torch.ones(1, 2, 8)):
        with pytest.raises(KernelArgumentError, match="weight: "):
            program.layer_norm(x, weight, None, 1e-5, into="out")


def test_products_of_rows_that_do_not_fit_are_refused() -> None:
    program = Program(torch.float32, 1)
    x = program.argument(16)
    for by in (x.columns(0, 7), program.argument(16, sampled=True)):
        with pytest.raises(KernelArgumentError, match="by: must be"):
            program.multiply(x, by, None, into="out")
    rows = torch.zeros(2, 16)
    for argument, parts in (
        ("x", (rows.view(2, 4, 4), rows)),
        ("x", (rows.double(), rows)),
        ("x", (torch.zeros(16, 2).T, rows)),
        ("by", (rows, torch.zeros(16, 2).T)),
        ("by", (rows, rows[:1])),
        ("by", (rows, rows.bfloat16())),
    ):
        with pytest.raises(KernelArgumentError) as error:
            kernels.multiply(*parts, None, threads=1)
        assert error.value.argument == argument


def test_gates_are_float32_while_another_thread_loads_a_model() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert kernels.gate(torch.zeros(2, 4), "sigmoid", None, None, threads=1).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_gates_that_do_not_fit_are_refused() -> None:
    program = Program(torch.float32, 1)
    x = program.argument(16)
    for name, of_gates in (("bias", torch.zeros(15)), ("bias", torch.zeros(16).bfloat16())):
        with pytest.raises(KernelArgumentError, match=name):
            program.gate(x, "sigmoid", of_gates, None, into="gates")
        with pytest.raises(KernelArgumentError, match=name):
            kernels.gate(torch.zeros(2, 16), "sigmoid", of_gates, None, threads=1)
    for rows, argument in (
        (torch.zeros(2, 3, 16), "x"),
        (torch.zeros(16, 2).T, "x"),
        (torch.zeros(2, 16).double(), "x"),
    ):
        with pytest.raises(KernelArgumentError) as error:
            kernels.gate(rows, "sigmoid", None, None, threads=1)
        assert error.value.argument == argument
    heads, weight = torch.zeros(2, 3, 8), torch.zeros(8)
    for argument, parts in (
        ("x", (heads.transpose(0, 2), heads, weight)),
        ("gate", (heads, heads[:1], weight)),
        ("gate", (heads, heads.bfloat16(), weight)),
        ("weight", (heads, heads, weight[:7])),
        ("weight", (heads, heads, heads[0, :2])),
    ):
        with pytest.raises(KernelArgumentError) as error:
            kernels.gated_rms_norm(*parts, 1e-5, "silu", threads=1)
        assert error.value.argument == argument
    with pytest.raises(KernelArgumentError, match="gate: must be rows of 16"):
        program.gated_rms_norm(x, x.columns(0, 8), weight, 1e-5, "silu", into="out")
    with pytest.raises(KernelArgumentError, match=r"n a divisor of 16, or .* of all heads"):
        program.gated_rms_norm(x, x, heads[0], 1e-5, "silu", into="out")


def test_a_step_whose_blocks_do_not_fit_is_refused_before_anything_is_written() -> None:
    convolved = Convolved(lengths=LENGTHS, shape=(3, 16))
    call = convolved.call([(0, 0, 9)])
    program = Program(torch.float32, 2)
    x, out = program.argument(16), program.argument(16)
    program.convolve(x, call.weight, call.bias, None, convolved.view, 1, into=out)
    layout, found = layout_of(call, 9, 1), torch.full((9, 16), 7.0)
    tables = [layout.block_tables[0], torch.full_like(layout.block_tables[1], 99)]
    with pytest.raises(KernelArgumentError, match="block_tables"):
        run(program, [call.rows, found], replace(layout, block_tables=tables))
    with pytest.raises(KernelArgumentError, match="kept_lens"):
        run(program, [call.rows, found], replace(layout, kept_lens=torch.tensor([9])))
    assert (found == 7).all()
    assert convolved.view.memory.isnan().all()


def test_times_are_kept_by_name() -> None:
    convolved = Convolved(lengths=LENGTHS, shape=(3, 16))
    call = convolved.call([(0, 0, 9)])
    program = Program(torch.float32, 2)
    x = program.argument(16)
    program.convolve(x, call.weight, call.bias, None, convolved.view, 1, into="out")
    program.timing = True
    run(program, [call.rows], layout_of(call, 9, 0))
    assert set(program.seconds()) == {"convolve"}


def test_operations_that_do_not_fit_are_not_recorded() -> None:
    convolved, recurred = layers(torch.float32)
    program, state = Program(torch.float32, 1), recurred.view
    x, sampled = program.argument(2 * KEYS + VALUES), program.argument(2 * KEYS + VALUES, sampled=True)
    decay, beta = (program.argument(width, dtype=torch.float32) for width in (HEADS * KEY_DIM, HEADS))
    query, key, value = x.columns(0, KEYS), x.columns(KEYS, 2 * KEYS), x.columns(2 * KEYS, 2 * KEYS + VALUES)

    def refused(argument: str, **change: Any) -> None:
        rows = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
        how: dict[str, Any] = {"scale": 0.3, "norm_eps": 1e-6, "state": state, "group": 0, "into": "out"}
        with pytest.raises(KernelArgumentError) as error:
            program.recur(**{**rows, **how, **change})
        assert error.value.argument == argument

    refused("key", key=x.columns(0, KEY_DIM))
    refused("key", query=x.columns(0, KEYS + 1), key=x.columns(0, KEYS + 1))
    refused("value", value=query)
    refused("decay", decay=program.argument(KEYS, dtype=torch.float32))
    refused("beta", beta=decay)
    refused("query", query=sampled.columns(0, KEYS))
    refused("scale", scale=float("nan"))
    refused("skip", skip=torch.zeros(HEADS + 1))
    refused("state", state=replace(state, shape=(HEADS, KEY_DIM)))
    refused("state", state=replace(state, num_blocks=99))
    weight = randn(2 * KEYS + VALUES, 4)
    for argument, rows, taps in (
        ("x", query, weight),
        ("x", sampled, weight),
        ("state", x, weight[:, :3].contiguous()),
    ):
        with pytest.raises(KernelArgumentError) as error:
            program.convolve(rows, taps, None, None, convolved.view, 0, into="out")
        assert error.value.argument == argument
    half = Program(torch.bfloat16, 1)
    q, k, v, narrow = (half.argument(width) for width in (KEYS, KEYS, VALUES, HEADS * KEY_DIM))
    with pytest.raises(KernelArgumentError, match="decay: must be float32 rows"):
        half.recur(q, k, v, narrow, None, scale=1.0, norm_eps=None, state=state, group=0, into="out")
