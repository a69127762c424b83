"""Programs of the kernels: what they refuse to record or run, and scratch memory that grows with the steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelArgumentError, Program
from tests.support.kernel_inputs import one_request, randn

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.available().reason)

WIDTH = 64


_randn = partial(randn, dtype=torch.bfloat16)


def _normed_product(threads: int = 2) -> tuple[Program, torch.Tensor, kernels.Packed]:
    """A program that computes out[sampled] = norm(x) times a weight."""
    program, scale, packed = Program(torch.bfloat16, threads), _randn(WIDTH, seed=1), kernels.pack(_randn(80, WIDTH))
    x, out = program.argument(WIDTH), program.argument(80, sampled=True)
    normed = program.rms_norm(x, scale, 1e-6, plus_one=False, into="normed")
    program.linear(program.take_sampled(normed, into="sampled"), packed, None, into=out)
    return program, scale, packed


def test_steps_of_any_size_follow_each_other() -> None:
    program, scale, packed = _normed_product()
    for rows in (1, 3, 200, 2, 700, 64):
        x, sampled = _randn(rows, WIDTH, seed=rows), torch.arange(rows - 1, -1, -2)
        out = torch.empty(len(sampled), 80, dtype=torch.bfloat16)
        program.run([x, out], one_request(rows), sampled)
        expected = kernels.linear(kernels.rms_norm(x, scale, 1e-6, threads=1), packed, threads=1)[sampled]
        assert torch.equal(out, expected)


def test_products_write_float32_rows_and_norms_only_of_such() -> None:
    program, packed = Program(torch.bfloat16, 2), kernels.pack(_randn(96, WIDTH))
    x, out = program.argument(WIDTH), program.argument(96, dtype=torch.float32)
    program.linear(x, packed, None, into=out)
    rows, got = _randn(3, WIDTH), torch.empty(3, 96)
    program.run([rows, got], one_request(3), torch.tensor([2]))
    assert torch.equal(got, kernels.linear(rows, packed, out_dtype=torch.float32, threads=1))
    with pytest.raises(KernelArgumentError, match=r"arguments: .* must be \(3, 96\) torch.float32"):
        program.run([rows, got.bfloat16()], one_request(3), torch.tensor([2]))
    with pytest.raises(KernelArgumentError, match=r"packed for this instruction set from torch.float32"):
        program.linear(out, kernels.pack(_randn(8, 96)), None, into="out")
    with pytest.raises(KernelArgumentError, match=r"all operands must be torch\.bfloat16"):
        program.rms_norm(x, _randn(WIDTH), 1e-6, plus_one=False, into=program.argument(WIDTH, dtype=torch.float32))


def test_nothing_is_taken_of_rows_without_columns() -> None:
    """Angles of layers that rotate nothing are such rows; the kernel would take rows of no bytes for a selection."""
    program = Program(torch.bfloat16, 1)
    x, out = program.argument(WIDTH), program.argument(WIDTH)
    assert program.take_sampled(x.columns(0, 0), into="nothing").width == 0
    program.scale(x, 2.0, into=out)
    program.timing = True
    program.run([_randn(3, WIDTH), _randn(3, WIDTH)], one_request(3), torch.tensor([2]))
    assert set(program.seconds()) == {"activate"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_multiplied_and_divided_by_numbers_as_by_torch(dtype: torch.dtype) -> None:
    program = Program(dtype, 2)
    x, *outs = (program.argument(WIDTH) for _ in range(3))
    for divides, out in zip((False, True), outs, strict=True):
        program.scale(x, 0.7, divides=divides, into=out)
    rows = _randn(9, WIDTH).to(dtype)
    times, over = torch.empty(2, 9, WIDTH, dtype=dtype)
    program.run([rows, times, over], one_request(9), torch.tensor([8]))
    assert torch.equal(times, rows * 0.7)
    assert torch.equal(over, rows / 0.7)


@pytest.mark.parametrize("threads", [1, 2])
def test_streams_have_the_bits_of_single_calls(threads: int) -> None:
    """Rows are parts of wider ones, where they may be."""
    program = Program(torch.bfloat16, threads)
    wide, of_rows, factors, out, summed, sized = (program.argument(width) for width in (300, 60, 16, 240, 300, 120))
    of_product, padded = program.argument(24), kernels.pack(_randn(24, 60))
    streams = wide.columns(20, 260)
    mixed = program.mix_streams(streams, factors, into="mixed")
    scale = _randn(60, seed=9)
    scaled = program.multiply_columns(mixed.columns(60, 120), scale, into="scaled")
    program.correct_streams(mixed, scaled, factors.columns(3, 7), 2, into=out)
    program.resize(program.mean_of_streams(streams, 4, into="mean"), of_rows, 1e-5, sized.columns(60, 120))
    program.add_to_columns(summed, of_rows, range(60, 300))
    program.linear(of_rows, padded, None, into=of_product)
    rows = [_randn(9, width, seed=width) for width in (300, 60, 16)]
    given = [*rows, *(torch.zeros(9, width, dtype=torch.bfloat16) for width in (240, 300, 120, 24))]
    given[4] = _randn(9, 300, seed=4)
    before = given[4].clone()
    program.run(given, one_request(9), torch.tensor([8]))
    x, like, by = rows
    expected = kernels.mix_streams(x[:, 20:260], by, threads=1)
    own = expected[:, 60:120] * scale
    assert torch.equal(given[3], kernels.correct_streams(expected, own, by[:, 3:7], 2, threads=1))
    mean = kernels.mean_of_streams(x[:, 20:260], 4, threads=1)
    assert torch.equal(given[5][:, 60:], kernels.resize(mean, like, 1e-5, threads=1))
    assert not given[5][:, :60].any()
    assert torch.equal(given[4], before + torch.cat([torch.zeros_like(like), *[like] * 4], dim=1))
    assert torch.equal(given[6], kernels.linear(like, padded, threads=1))


def test_rows_are_padded_with_zeros() -> None:
    """Where wider rows, of no numbers, were padded before."""
    program, wide, narrow = Program(torch.bfloat16, 2), kernels.pack(_randn(8, 60)), kernels.pack(_randn(8, 40))
    rows = [program.argument(width) for width in (60, 40, 8, 8)]
    program.linear(rows[0], wide, None, into=rows[2])
    program.linear(rows[1], narrow, None, into=rows[3])
    x, out = _randn(9, 40), torch.empty(9, 8, dtype=torch.bfloat16)
    program.run([torch.full((9, 60), torch.nan).bfloat16(), x, out.clone(), out], one_request(9), torch.tensor([8]))
    assert torch.equal(out, kernels.linear(x, narrow, threads=1))


def test_times_are_kept_when_asked_for() -> None:
    program, _, _ = _normed_product()
    arguments = [_randn(5, WIDTH), torch.empty(1, 80, dtype=torch.bfloat16)]
    program.run(arguments, one_request(5), torch.tensor([4]))
    assert not program.seconds()
    program.timing = True
    program.run(arguments, one_request(5), torch.tensor([4]))
    seconds = program.seconds()
    assert set(seconds) == {"linear", "rms_norm", "take_rows"}
    assert min(seconds.values()) > 0
    program.forget_times()
    assert not program.seconds()


def test_a_step_of_other_shapes_is_refused() -> None:
    program, _, _ = _normed_product()
    x, out, layout, sampled = _randn(5, WIDTH), torch.zeros(1, 80).bfloat16(), one_request(5), torch.tensor([4])
    for arguments in ([x[:4], out], [x.float(), out], [x, torch.zeros(2, 80).bfloat16()], [x.T.contiguous().T, out]):
        with pytest.raises(KernelArgumentError, match="arguments"):
            program.run(arguments, layout, sampled)
    for wrong in (torch.tensor([5]), torch.tensor([-1])):
        with pytest.raises(KernelArgumentError, match="index"):
            program.run([x, out], layout, wrong)
    with pytest.raises(KernelArgumentError, match="sampled"):
        program.run([x, out], layout, sampled.int())
    with pytest.raises(KernelArgumentError, match="query_start"):
        program.run([x, out], replace(layout, sample_start=layout.sample_start[:1]), sampled)
    assert not out.any()


def test_operations_that_the_kernels_can_not_take_are_not_recorded() -> None:
    program = Program(torch.bfloat16, 1)
    x, gated = program.argument(WIDTH), kernels.pack_gated(_randn(8, WIDTH), _randn(8, WIDTH))
    with pytest.raises(KernelArgumentError, match="gated"):
        program.linear(x, gated, None, into="out")
    with pytest.raises(KernelArgumentError, match="gated"):
        program.gated_linear(x, kernels.pack(_randn(8, WIDTH)), "silu", into="out")
    for weight in (_randn(8, WIDTH + 32), _randn(8, WIDTH).float()):
        with pytest.raises(KernelArgumentError):
            program.linear(x, kernels.pack(weight), None, into="out")
    streams = program.argument(4 * WIDTH)
    for wrong in (
        lambda: program.mix_streams(streams, program.argument(15), into="out"),
        lambda: program.correct_streams(streams, program.argument(8), program.argument(4), 0, into="out"),
        lambda: program.correct_streams(streams, x, program.argument(4), 4, into="out"),
        lambda: program.mean_of_streams(streams, 3, into="out"),
        lambda: program.mean_of_streams(streams, 1, into=streams),
        lambda: program.resize(x, streams, 1e-5, x),
        lambda: program.sparse_gate(program.argument(7), 1.0, "silu", into="out"),
        lambda: program.multiply_columns(x, _randn(8), into="out"),
        lambda: program.add_to_columns(streams, x, range(100)),
    ):
        with pytest.raises(KernelArgumentError):
            wrong()
    with pytest.raises(KernelArgumentError, match="weight"):
        program.rms_norm(x, _randn(48), 1e-6, plus_one=False, into="out")
    with pytest.raises(KernelArgumentError, match="cos"):
        program.rotate(x, 16, program.argument(32), program.argument(32))
    with pytest.raises(KernelArgumentError, match="dtype"):
        Program(torch.float16, 1)
