"""Convolutions and recurrences of layers that keep a state (state_calls.py), and what their arguments must be."""

from __future__ import annotations

import ctypes
import math

import torch

from baton.runner.backends.cpu.kernels.attention import require_requests
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.call_structs import KernelConvolutionCall, KernelRecurrenceCall, States
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall, StateStep, StateView

MAX_STATE_DIM = 512
"""The most rows and columns of a head's state."""


def convolve(call: ConvolutionCall, *, threads: int) -> torch.Tensor:
    """Compute `Operations.convolve`. Raises KernelArgumentError, and writes nothing, for tensors that don't fit."""
    require_convolution(call)
    rows = _require_rows("rows", call.rows, call.state.shape[-1])
    out = rows.new_empty(rows.shape)
    structure, kept = convolution_structure(call.weight, call.bias, call.activation, call.state)
    structure.x, structure.out = rows.data_ptr(), out.data_ptr()
    structure.x_stride, structure.out_stride = rows.stride(0), out.shape[1]
    _set_step(structure.states, call.step, rows.shape[0])
    lib = library()
    check_status(lib.convolve(lib.isa, DTYPES[rows.dtype], ctypes.byref(structure), threads))
    del kept  # the memory that the structure pointed to
    return out


def recur(call: RecurrenceCall, *, threads: int) -> torch.Tensor:
    """Compute `Operations.recur`. Raises KernelArgumentError, and writes nothing, for tensors that don't fit."""
    require_recurrence(call)
    heads, key_dim, value_dim = call.state.shape
    query = _require_rows("query", call.query, key_dim)
    key, value = _require_rows("key", call.key, key_dim), _require_rows("value", call.value, value_dim)
    out = value.new_empty(value.shape)
    structure = recurrence_structure(
        *(call.state, query.shape[1], call.decay.ndim == 3, call.scale, call.norm_eps, call.skip, call.rates)
    )
    structure.has_delta_rule = call.has_delta_rule and call.beta is not None
    structure.query, structure.key, structure.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    structure.query_stride, structure.key_stride, structure.value_stride = (x.stride(0) for x in (query, key, value))
    structure.out, structure.out_stride = out.data_ptr(), heads * value_dim
    structure.decay, structure.decay_stride = call.decay.data_ptr(), math.prod(call.decay.shape[1:])
    structure.beta, structure.beta_stride = None if call.beta is None else call.beta.data_ptr(), heads
    _set_step(structure.states, call.step, query.shape[0])
    lib = library()
    check_status(lib.recur(lib.isa, DTYPES[query.dtype], ctypes.byref(structure), threads))
    return out


def convolution_structure(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, state: StateView
) -> tuple[KernelConvolutionCall, object]:
    """The kernel's arguments for a layer, without those of a step; and what must be kept as long as they are used."""
    columns, taps = weight.shape
    of_taps = weight.T.contiguous()
    structure = KernelConvolutionCall(
        states=_states(state),
        weight=of_taps.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        columns=columns,
        taps=taps,
        state_stride=row_stride(state),
        has_silu=activation == "silu",
    )
    return structure, (of_taps, bias, state.memory)


def recurrence_structure(
    state: StateView,
    groups: int,
    decay_per_key: bool,
    scale: float,
    norm_eps: float | None,
    skip: torch.Tensor | None,
    rates: torch.Tensor | None = None,
) -> KernelRecurrenceCall:
    """The kernel's arguments for a layer, without those of a step."""
    heads, key_dim, value_dim = state.shape
    return KernelRecurrenceCall(
        states=_states(state),
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=scale,
        norm_eps=norm_eps or 0.0,
        decay_per_key=decay_per_key,
        has_norm=norm_eps is not None,
        skip=None if skip is None else skip.data_ptr(),
        rates=None if rates is None else rates.data_ptr(),
    )


def require_convolution(call: ConvolutionCall) -> None:
    """Raises KernelArgumentError for tensors, on any device, that don't fit together."""
    rows, weight = call.rows, call.weight
    if rows.ndim != 2 or rows.dtype not in DTYPES:
        raise KernelArgumentError("rows", f"must be [rows, columns] of float32 or bfloat16, is {_of(rows)}")
    require_filter(weight, call.bias, call.state)
    if rows.shape[1] != weight.shape[0]:
        raise KernelArgumentError("rows", f"has {rows.shape[1]} columns, the weight {weight.shape[0]}")
    _require_device(rows.device, weight=weight, bias=call.bias, state=call.state.memory)


def require_filter(weight: torch.Tensor, bias: torch.Tensor | None, state: StateView) -> None:
    """Raises KernelArgumentError for a convolution's weight and bias that don't fit its state."""
    if weight.ndim != 2 or weight.shape[1] < 2 or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise KernelArgumentError("weight", f"must be [columns, at least 2] of float32, is {_of(weight)}")
    columns, taps = weight.shape
    if bias is not None:
        _require_float32("bias", bias, (columns,))
    require_state(state, (taps - 1, columns))


def require_recurrence(call: RecurrenceCall) -> None:
    """Raises KernelArgumentError for tensors, on any device, that don't fit together."""
    query, state = call.query, call.state
    if query.ndim != 3 or query.dtype not in DTYPES:
        raise KernelArgumentError("query", f"must be [rows, groups, dim] of float32 or bfloat16, is {_of(query)}")
    rows, groups, key_dim = query.shape
    if len(state.shape) != 3:
        raise KernelArgumentError("state", f"must be [heads, key_dim, value_dim], is {state.shape}")
    heads, _, value_dim = state.shape
    require_heads(state, groups)
    if key_dim != state.shape[1]:
        raise KernelArgumentError("query", f"has heads of {key_dim}, the state of {state.shape[1]}")
    for name, tensor, shape in (("key", call.key, (groups, key_dim)), ("value", call.value, (heads, value_dim))):
        if tensor.shape != (rows, *shape) or tensor.dtype != query.dtype:
            expected = f"{(rows, *shape)} {query.dtype}"
            raise KernelArgumentError(name, f"must be {expected}, is {_of(tensor)}")
    if call.decay.ndim == 3:
        _require_float32("decay", call.decay, (rows, heads, key_dim))
    else:
        _require_float32("decay", call.decay, (rows, heads))
    if call.beta is not None:
        _require_float32("beta", call.beta, (rows, heads))
    require_numbers(call.scale, call.norm_eps)
    require_skip(call.skip, heads)
    require_rates(
        call.rates,
        state,
        groups=groups,
        has_norm=call.norm_eps is not None,
        has_delta_rule=call.has_delta_rule and call.beta is not None,
        decays=call.decay[:1].numel() // heads if rows else 1,
    )
    rows_of_heads = {"key": call.key, "value": call.value, "decay": call.decay, "beta": call.beta}
    _require_device(query.device, **rows_of_heads, skip=call.skip, rates=call.rates, state=state.memory)


def require_recurred_rows(
    query: Rows, key: Rows, value: Rows, decay: Rows, beta: Rows | None, state: StateView
) -> None:
    """Raises KernelArgumentError for rows of a program that don't fit a recurrence's state."""
    if len(state.shape) != 3:
        raise KernelArgumentError("state", f"must be [heads, key_dim, value_dim], is {state.shape}")
    heads, key_dim, value_dim = state.shape
    require_heads(state, query.width // key_dim)
    if query.width % key_dim != 0 or key.width != query.width:
        raise KernelArgumentError(
            "key", f"and query of {key.width} and {query.width} columns have no heads of {key_dim}"
        )
    if value.width != heads * value_dim:
        raise KernelArgumentError("value", f"has {value.width} columns, the state {heads * value_dim}")
    for name, rows, widths in (("decay", decay, (heads, heads * key_dim)), ("beta", beta, (heads,))):
        if rows is not None and (rows.width not in widths or rows.dtype != torch.float32):
            raise KernelArgumentError(name, f"must be float32 rows of {' or '.join(map(str, widths))} columns")
    if any(rows is not None and rows.sampled for rows in (query, key, value, decay, beta)):
        raise KernelArgumentError("query", "and all others must be all rows, of which the state needs each")


def require_heads(state: StateView, groups: int) -> None:
    """Raises KernelArgumentError for a recurrence's state that is too large, or heads that can't share the groups."""
    if len(state.shape) != 3 or not all(1 <= dim <= MAX_STATE_DIM for dim in state.shape[1:]):
        raise KernelArgumentError("state", f"must be [heads, 1 to {MAX_STATE_DIM}, 1 to the same], is {state.shape}")
    heads = state.shape[0]
    if groups < 1 or heads < 1 or heads % groups != 0:
        raise KernelArgumentError("query", f"{heads} heads can't share {groups} queries and keys evenly")
    require_state(state, state.shape)


def require_numbers(scale: float, norm_eps: float | None) -> None:
    """Raises KernelArgumentError for a scale or an epsilon that is not finite, or an epsilon below zero."""
    if not math.isfinite(scale):
        raise KernelArgumentError("scale", f"must be finite, is {scale}")
    if norm_eps is not None and not (math.isfinite(norm_eps) and norm_eps >= 0):
        raise KernelArgumentError("norm_eps", f"must be finite and not negative, is {norm_eps}")


def require_skip(skip: torch.Tensor | None, heads: int) -> None:
    """Raises KernelArgumentError for numbers that are not one for each head."""
    if skip is not None:
        _require_float32("skip", skip, (heads,))


def require_rates(
    rates: torch.Tensor | None, state: StateView, *, groups: int, has_norm: bool, has_delta_rule: bool, decays: int
) -> None:
    """Raises KernelArgumentError for rates of decay that don't fit a recurrence.

    `decays`: numbers of decay for each head.
    """
    if rates is None:
        return
    heads, key_dim, value_dim = state.shape
    _require_float32("rates", rates, (key_dim, heads))
    if value_dim != 1 or groups != 1 or has_norm or has_delta_rule:
        raise KernelArgumentError("rates", "need values of one number, one query and key, no norm and no delta rule")
    if decays != 1:
        raise KernelArgumentError("decay", f"has {decays} numbers for each head, and with rates one")


def require_state(state: StateView, shape: tuple[int, ...]) -> None:
    """Raises KernelArgumentError for a state of another shape, or one that reaches out of its block or the memory."""
    memory = state.memory
    if tuple(state.shape) != shape:
        raise KernelArgumentError("state", f"must be {shape}, is {tuple(state.shape)}")
    if memory.ndim != 1 or memory.dtype != torch.float32 or not memory.is_contiguous():
        raise KernelArgumentError("state", "memory must be one dimension of float32, contiguous")
    if state.block_size < 1 or state.num_blocks < 1:
        raise KernelArgumentError("state", "has no blocks, or blocks of no tokens")
    end = state.offset + (math.prod(shape) if len(shape) != 2 else (shape[0] - 1) * row_stride(state) + shape[1])
    if state.row_stride is not None and (len(shape) != 2 or state.row_stride < shape[1]):
        raise KernelArgumentError("state", f"of {shape} has no rows {state.row_stride} numbers apart")
    if state.offset < 0 or end > state.block_stride:
        raise KernelArgumentError("state", "reaches beyond its block")
    if (state.num_blocks - 1) * state.block_stride + end > memory.shape[0]:
        raise KernelArgumentError("state", f"memory of {memory.shape[0]} is too small for {state.num_blocks} blocks")


def row_stride(state: StateView) -> int:
    """Numbers from one row of a convolution's state to the next one."""
    return state.shape[-1] if state.row_stride is None else state.row_stride


def require_kept_lens(kept_lens: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Raises KernelArgumentError for lengths that are not one for each sequence."""
    if kept_lens.shape != seq_lens.shape or kept_lens.dtype != torch.int32 or not kept_lens.is_contiguous():
        raise KernelArgumentError("kept_lens", f"must be int32 {tuple(seq_lens.shape)}, contiguous")
    if not kept_lens.is_cpu:
        raise KernelArgumentError("kept_lens", "must be on the CPU")


def _states(state: StateView) -> States:
    if not state.memory.is_cpu:
        raise KernelArgumentError("state", "must be on the CPU")
    return States(
        memory=state.memory.data_ptr(),
        num_blocks=state.num_blocks,
        block_stride=state.block_stride,
        offset=state.offset,
        block_size=state.block_size,
    )


def _set_step(states: States, step: StateStep, rows: int) -> None:
    """Fill in the fields of a step; raises KernelArgumentError for tensors that don't fit."""
    states.table_stride = require_requests(step.query_start, step.seq_lens, step.block_tables)
    require_kept_lens(step.kept_lens, step.seq_lens)
    states.query_start, states.seq_lens = step.query_start.data_ptr(), step.seq_lens.data_ptr()
    states.kept_lens, states.block_tables = step.kept_lens.data_ptr(), step.block_tables.data_ptr()
    states.num_seqs, states.table_width = step.block_tables.shape
    states.rows = rows


def _require_rows(name: str, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The rows themselves, on the CPU and each contiguous, with gaps between them allowed."""
    if not rows.is_cpu:
        raise KernelArgumentError(name, "must be on the CPU")
    strides = rows.stride()
    if (strides[-1] != 1 and dim > 1) or (rows.ndim == 3 and strides[1] != dim and rows.shape[1] > 1):
        raise KernelArgumentError(name, "has rows that are not contiguous")
    return rows


def _require_float32(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise KernelArgumentError(name, f"must be {shape} torch.float32, contiguous, is {_of(tensor)}")


def _require_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise KernelArgumentError(name, f"must be on {device}, is on {tensor.device}")


def _of(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
