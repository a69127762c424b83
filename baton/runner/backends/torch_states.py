"""Convolutions, recurrences and gates of layers that keep a state (state_calls.py), and rows in several streams: on
torch alone and on any device.

torch's functions may give a number other bits where a tensor has another shape: the end of a vectorised loop has other
code than its middle, and a sum is cut by its length. So everything but products and sums of two numbers is computed
token by token, in tensors whose shape depends on the layer alone. One sequence is computed after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.rows import GateActivation, GateFunction, Limits
from baton.runner.backends.cpu.kernels.states import require_convolution, require_recurrence, row_stride
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall, StateStep, StateView


def convolve(call: ConvolutionCall) -> torch.Tensor:
    """Compute `Operations.convolve`; raises KernelArgumentError, and writes nothing, for arguments that don't fit."""
    require_convolution(call)
    rows, out = call.rows.float(), torch.zeros_like(call.rows, memory_format=torch.contiguous_format)
    taps, width = call.weight.shape[1], call.weight.shape[0]
    weight = call.weight.T.contiguous()
    states = states_in(call.state)
    for own in list(sequences_of(call.step, call.state, rows.shape[0])):
        before = rows.new_zeros(taps - 1, width) if own.before is None else states[own.before]
        window = torch.cat((before, rows[own.first_row : own.stop_row]))
        for token in range(own.count):
            total = torch.zeros_like(weight[0]) if call.bias is None else call.bias
            for tap in range(taps):
                total = total + weight[tap] * window[token + tap]
            if call.activation == "silu":
                total = functional.silu(total)
            out[own.first_row + token] = total.to(out.dtype)
            if (block := own.after.get(token)) is not None:
                states[block] = window[token + 1 : token + taps]
    return out


def recur(call: RecurrenceCall) -> torch.Tensor:
    """Compute `Operations.recur`; raises KernelArgumentError, and writes nothing, for arguments that don't fit."""
    require_recurrence(call)
    heads = call.state.shape[0]
    out = torch.zeros_like(call.value, memory_format=torch.contiguous_format)
    states = states_in(call.state)
    in_group = heads // call.query.shape[1]
    for own in list(sequences_of(call.step, call.state, out.shape[0])):
        state = out.new_zeros(call.state.shape, dtype=torch.float32) if own.before is None else states[own.before]
        for token in range(own.count):
            row = own.first_row + token
            query, key = (_unit(x[row].float(), call.norm_eps) for x in (call.query, call.key))
            query = (query * call.scale).repeat_interleave(in_group, 0)[:, :, None]
            key = key.repeat_interleave(in_group, 0)[:, :, None]
            value = call.value[row].float()[:, None]
            decay = call.decay[row] if call.rates is None else call.decay[row][:, None] * call.rates.T
            state = state * decay.exp().view(heads, -1, 1)
            added = value
            if call.beta is not None:
                lacking = value - (key * state).sum(1, keepdim=True) if call.has_delta_rule else value
                added = call.beta[row].view(heads, 1, 1) * lacking
            state = state + key * added
            read = (query * state).sum(1)
            if call.skip is not None:
                read = read + call.skip[:, None] * value[:, 0]
            out[row] = read.to(out.dtype)
            if (block := own.after.get(token)) is not None:
                states[block] = state
    return out


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: GateActivation,
    *,
    gate_first: bool,
) -> torch.Tensor:
    """Compute `Operations.gated_rms_norm`, row by row."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    activate = functional.silu if activation == "silu" else torch.sigmoid
    for row, (own, by) in enumerate(zip(x, gate, strict=True)):
        wide, activated = own.float(), activate(by.float())
        if gate_first:
            wide = wide * activated
        normal = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()
        out[row] = (normal if gate_first else normal * activated).to(x.dtype)
    return out


def gate(
    x: torch.Tensor,
    function: GateFunction,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
    limits: Limits,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `Operations.gate`, row by row."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    compute = functional.softplus if function == "softplus" else torch.sigmoid
    for row, own in enumerate(x):
        given = own.float() if bias is None else own.float() + bias
        gates = compute(given if scale is None else given * scale).clamp(*limits)
        out[row] = gates if factor is None else gates * factor
    return out


def mix_streams(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Compute `Operations.mix_streams`, whose numbers are each a sum in one order."""
    num_streams = math.isqrt(factors.shape[1])
    streams = x.view(x.shape[0], num_streams, -1)
    by = factors.float().view(-1, num_streams, num_streams)
    total = streams[:, None, 0].float() * by[:, :, 0, None]
    for place in range(1, num_streams):
        total = total + streams[:, None, place].float() * by[:, :, place, None]
    return (total.to(x.dtype) + streams).flatten(1)


def correct_streams(x: torch.Tensor, result: torch.Tensor, factors: torch.Tensor, active: int) -> torch.Tensor:
    """Compute `Operations.correct_streams`."""
    streams = x.view(x.shape[0], factors.shape[1], -1)
    difference = result - streams[:, active]
    return (difference[:, None] * (factors + 1.0)[:, :, None] + streams).flatten(1)


def mean_of_streams(x: torch.Tensor, num_streams: int) -> torch.Tensor:
    """Compute `Operations.mean_of_streams`."""
    streams = x.float().chunk(num_streams, dim=-1)
    return (sum(streams, torch.zeros_like(streams[0])) / num_streams).to(x.dtype)


def nearest_root(x: torch.Tensor) -> torch.Tensor:
    """The square root of each number, rounded to the nearest one: torch's own depends on the place of a number."""
    return x.double().sqrt().float().to(x.dtype)


def above_cutoff(rows: torch.Tensor, deviations: float) -> torch.Tensor:
    """How far the numbers of rows [T, N] are above their mean and so many standard deviations; 0 for those below."""
    spread = rows.std(-1, keepdim=True, unbiased=False)
    return functional.relu(rows - (rows.mean(-1, keepdim=True) + deviations * spread))


def _unit(x: torch.Tensor, norm_eps: float | None) -> torch.Tensor:
    """Each row of x [G, DK], divided by its length where there is an epsilon."""
    return x if norm_eps is None else x / (x.square().sum(-1, keepdim=True) + norm_eps).sqrt()


def states_in(state: StateView) -> torch.Tensor:
    """A view of the states of all blocks: [blocks, *shape]."""
    strides = [row_stride(state), 1] if len(state.shape) == 2 else [state.shape[1] * state.shape[2], state.shape[2], 1]
    first = state.memory.storage_offset() + state.offset
    return state.memory.as_strided((state.num_blocks, *state.shape), (state.block_stride, *strides), first)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of a sequence, and the blocks with its states."""

    first_row: int
    stop_row: int
    before: int | None
    """The block with the state before the first row; None at the begin of the sequence."""
    after: dict[int, int]
    """The block that gets the state behind a row, by the row's place among those of the sequence."""

    @property
    def count(self) -> int:
        return self.stop_row - self.first_row


def sequences_of(step: StateStep, state: StateView, num_rows: int) -> Iterator[SequenceRows]:
    """The sequences that have rows; raises KernelArgumentError for rows, lengths and blocks that the kernels refuse."""
    starts: list[int] = step.query_start.tolist()
    lengths: list[tuple[int, int]] = list(zip(step.seq_lens.tolist(), step.kept_lens.tolist(), strict=True))
    tables: list[list[int]] = step.block_tables.tolist()
    if starts[0] != 0 or starts[-1] > num_rows or starts != sorted(starts):
        raise KernelArgumentError(
            "query_start", "must begin at 0, never decrease, and end at the number of rows or before"
        )
    for index, ((length, kept), table) in enumerate(zip(lengths, tables, strict=True)):
        first_row, stop_row = starts[index], starts[index + 1]
        start = length - (stop_row - first_row)
        if first_row == stop_row:
            continue
        end = max(start, min(length, kept))
        if start < 0 or end > len(table) * state.block_size:
            raise KernelArgumentError(
                "seq_lens", "must be at least the sequence's rows and at most what its block table holds"
            )
        first_stripe = max(0, start - 1) // state.block_size
        stripes = range(first_stripe, -(-end // state.block_size))
        if any(not 0 <= table[stripe] < state.num_blocks for stripe in stripes):
            raise KernelArgumentError("block_tables", "names a block outside the cache")
        before = table[first_stripe] if start > 0 else None
        if before == 0:
            raise KernelArgumentError("block_tables", "names no block with the state that a sequence goes on from")
        written = {stripe: min((stripe + 1) * state.block_size, end) - 1 for stripe in stripes}
        after = {token - start: table[stripe] for stripe, token in written.items() if token >= start and table[stripe]}
        yield SequenceRows(first_row, stop_row, before, after)
