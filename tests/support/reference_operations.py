"""The operations in plain numpy, one row at a time: slow and obviously row-invariant, to test the kernels against.

Each row is computed by the same calls on the same shapes, whatever the other rows are, in float32, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.backends import torch_states
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu.kernels.attention import require_distance_bias
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.rows import (
    NO_LIMITS,
    GateActivation,
    GateFunction,
    Limits,
    RowActivation,
    Xielu,
)
from baton.runner.backends.cpu.kernels.states import require_convolution, require_recurrence
from baton.runner.backends.key_selection import SelectionCall, positions_in, select_by_torch
from baton.runner.backends.low_rank import LowRank, RowAdapters
from baton.runner.backends.paged_cache import CacheView, read_blocks, write_rows
from baton.runner.backends.quantized_product import narrow_product
from baton.runner.backends.quantized_weight import NarrowWeight
from baton.runner.backends.ranks.ranks import ONE_RANK
from baton.runner.backends.routing import ClampedGate, Routing, SharedRows, choose
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall
from baton.runner.backends.torch_states import sequences_of, states_in
from baton.runner.backends.weight_rows import Weight, read_weight

Array = npt.NDArray[np.float32]

_erf = np.vectorize(math.erf, otypes=[np.float32])


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] in float32, or the stacked gate and up weights [2 N, K]."""

    rows: Array
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PackedStack:
    """Weights of which some are quantised, stacked over their outputs."""

    parts: tuple[PackedWeight | NarrowWeight, ...]


packs_quantized = True
heads_are_independent = False
ranks = ONE_RANK


def numerics() -> str:
    return "reference-3"


def program(dtype: torch.dtype) -> None:
    """Returns None: these operations have no programs."""


def _array(tensor: torch.Tensor) -> Array:
    return np.ascontiguousarray(tensor.detach().to(torch.float32).numpy())


def pack(*weights: Weight) -> PackedWeight | PackedStack:
    read = [read_weight(weight) for weight in weights]
    tensors = [weight for weight in read if isinstance(weight, torch.Tensor)]
    if len(tensors) == len(read):
        return PackedWeight(np.concatenate([_array(weight) for weight in tensors]), tensors[0].dtype)
    parts = (
        PackedWeight(_array(weight), weight.dtype) if isinstance(weight, torch.Tensor) else weight for weight in read
    )
    return PackedStack(tuple(parts))


pack_own = pack


def pack_heads(weights: Sequence[torch.Tensor]) -> Sequence[PackedWeight]:
    return [PackedWeight(_array(weight), weight.dtype) for weight in weights]


def pack_gated(gate: Weight, up: Weight) -> PackedWeight | PackedStack:
    return pack(gate, up)


def adapt(weight: PackedWeight | PackedStack, terms: Sequence[LowRank], dtype: torch.dtype) -> tuple[LowRank, ...]:
    return tuple(terms)


def held_rows(
    weight: PackedWeight | NarrowWeight | PackedStack, index: torch.Tensor, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(len(index)), take_rows(weight, index, dtype)


def take_rows(
    weight: PackedWeight | NarrowWeight | PackedStack, index: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if isinstance(weight, PackedStack):
        sizes = [part.rows.shape[0] if isinstance(part, PackedWeight) else part.shape[0] for part in weight.parts]
        whole = [take_rows(part, torch.arange(n), dtype) for part, n in zip(weight.parts, sizes, strict=True)]
        return torch.cat(whole)[index]
    if isinstance(weight, PackedWeight):
        return torch.from_numpy(weight.rows[index.numpy()]).to(weight.dtype)
    return weight.dequantized(dtype or torch.float32)[index]


def linear(
    x: torch.Tensor,
    weight: PackedWeight | PackedStack,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    adapters: RowAdapters | None = None,
) -> torch.Tensor:
    out = _adapted(x, _product(x, weight), adapters)
    if bias is not None:
        out += _array(bias)
    return torch.from_numpy(out).to(x.dtype if out_dtype is None else out_dtype)


def linear_of_heads(x: torch.Tensor, weights: Sequence[PackedWeight], out: torch.Tensor) -> None:
    for head, weight in enumerate(weights):
        out[:, head] = linear(x[:, head], weight)


def gated_linear(
    x: torch.Tensor,
    weight: PackedWeight | PackedStack,
    *,
    activation: Activation,
    adapters: RowAdapters | None = None,
) -> torch.Tensor:
    gate, up = np.split(_adapted(x, _product(x, weight), adapters), 2, axis=1)
    return torch.from_numpy(_activate(gate, activation) * up).to(x.dtype)


def pack_mixture(*_: Any) -> None:
    return None


def pack_choice(*_: Any) -> None:
    return None


def clamped_gate(rows: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
    return torch.cat([gate.of(row) for row in torch.split(rows, 1)])


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [choose(row, routing) for row in torch.split(logits, 1)]
    return torch.cat([chosen for chosen, _ in rows]), torch.cat([weights for _, weights in rows])


def mix_experts(*_arguments: Any, **_named: Any) -> torch.Tensor:
    raise NotImplementedError("experts are multiplied one by one")


def multiply_chosen(*_arguments: Any, **_named: Any) -> torch.Tensor:
    raise NotImplementedError("experts are multiplied one by one")


def sum_experts(
    outs: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    factor: float = 1.0,
    shared: SharedRows | None = None,
) -> torch.Tensor:
    rows = []
    for row, (own, of_row) in enumerate(zip(places.tolist(), weights, strict=True)):
        total = torch.zeros(outs.shape[1], dtype=torch.float32)
        for place, weight in zip(own, of_row, strict=True):
            if place >= 0:
                total = total + outs[place].float() * weight
        out = total.to(outs.dtype) if factor == 1.0 else total.to(outs.dtype) * factor
        if shared is not None:
            gate = 1.0 if shared.gate is None else torch.sigmoid(shared.gate[row])
            out = out + shared.rows.expand(len(places), -1)[row] * gate
        rows.append(out)
    return torch.stack(rows) if rows else outs.new_empty(0, outs.shape[1])


def _adapted(x: torch.Tensor, out: Array, adapters: RowAdapters | None) -> Array:
    """Add to the rows of a product what their adapters add."""
    if adapters is None:
        return out
    for row, slot in enumerate(adapters.slots.tolist()):
        terms: Sequence[LowRank] | None = adapters.weights[slot] if slot >= 0 else None
        for term in terms or ():
            t = np.dot(_array(term.a), _array(x[row])) * np.float32(term.factor)
            for outputs in term.outputs:
                out[row, outputs.first : outputs.stop] += np.dot(_array(outputs.b), t)
                if outputs.bias is not None:
                    out[row, outputs.first : outputs.stop] += _array(outputs.bias) * np.float32(term.factor)
    return out


def _product(x: torch.Tensor, weight: PackedWeight | NarrowWeight | PackedStack) -> Array:
    if isinstance(weight, PackedStack):
        return np.concatenate([_product(x, part) for part in weight.parts], axis=1)
    if not isinstance(weight, PackedWeight):
        return narrow_product(x, weight).numpy()
    rows = _array(x)
    out = np.empty((rows.shape[0], weight.rows.shape[0]), dtype=np.float32)
    for index, row in enumerate(rows):
        np.dot(weight.rows, row, out=out[index])
    return out


def _activate(x: Array, activation: Activation) -> Array:
    if activation in ("relu", "relu_squared"):
        return np.maximum(x, np.float32(0)) ** (1 if activation == "relu" else 2)
    if activation == "silu":
        return np.asarray(x / (np.float32(1) + np.exp(-x)), dtype=np.float32)
    if activation == "gelu":
        return np.asarray(np.float32(0.5) * x * (np.float32(1) + _erf(x / np.float32(math.sqrt(2)))), dtype=np.float32)
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.asarray(np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)), dtype=np.float32)


def mix_streams(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return _by_row(torch_states.mix_streams, x, factors)


def correct_streams(x: torch.Tensor, result: torch.Tensor, factors: torch.Tensor, active: int) -> torch.Tensor:
    return _by_row(partial(torch_states.correct_streams, active=active), x, result, factors)


def mean_of_streams(x: torch.Tensor, num_streams: int) -> torch.Tensor:
    return _by_row(partial(torch_states.mean_of_streams, num_streams=num_streams), x)


def row_means(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array([[row.mean()] for row in _array(x)], dtype=np.float32).reshape(-1, 1)).to(x.dtype)


def resize(x: torch.Tensor, like: torch.Tensor, least: float) -> torch.Tensor:
    size, own = row_means(like**2), row_means(x**2).clamp(min=least)
    return x * torch_states.nearest_root(size) / torch_states.nearest_root(own)


def sparse_gate(x: torch.Tensor, deviations: float, activation: Activation) -> torch.Tensor:
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    for row, own in enumerate(_array(x)):
        gate, up = np.split(own, 2)
        cut = np.maximum(gate - (gate.mean() + np.float32(deviations) * gate.std()), np.float32(0))
        out[row] = torch.from_numpy(_activate(cut, activation) * up).to(x.dtype)
    return out


def _by_row(compute: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    """The rows that a function computes of one row after the other."""
    return torch.cat([compute(*rows) for rows in zip(*(torch.split(rows, 1) for rows in arguments), strict=True)])


def _xielu(x: Array, numbers: Xielu) -> Array:
    bent = np.float32(numbers.negative) * (np.expm1(np.minimum(x, np.float32(numbers.near))) - x)
    active = np.where(x > 0, np.float32(numbers.positive) * x * x, bent) + np.float32(numbers.linear) * x
    return np.asarray(active, dtype=np.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
    rows = _array(x)
    normal = rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + np.float32(eps))
    if plus_one:
        return torch.from_numpy(normal * (np.float32(1) + _array(weight))).to(x.dtype)
    rounded = _array(torch.from_numpy(normal).to(x.dtype))
    return torch.from_numpy(rounded * _array(weight)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, rms_norm(total, weight, eps, plus_one=plus_one)


def prepare_heads(*_: Any) -> bool:
    return False


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool = False) -> None:
    half = cos.shape[-1] // 2
    firsts, seconds = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if in_pairs else (slice(half), slice(half, 2 * half))
    )
    first, second = _array(x[..., firsts]), _array(x[..., seconds])
    c, s = _array(cos[:, None, :half]), _array(sin[:, None, :half])
    x[..., firsts] = torch.from_numpy(first * c - second * s).to(x.dtype)
    x[..., seconds] = torch.from_numpy(second * c + first * s).to(x.dtype)


def store_kv(key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = (torch.tensor([part]) for part in divmod(slot, cache.block_size))
            of_row = None if value is None else value[row : row + 1]
            write_rows(cache, key[row : row + 1], of_row, block, offset)


def paged_attention(call: AttentionCall) -> torch.Tensor:
    query, cache, how = call.query, call.cache, call.how
    require_distance_bias(how, query.shape[1], query.device)
    out = torch.zeros(*query.shape[:2], cache.value_dim, dtype=query.dtype)
    starts: list[Any] = call.query_start.tolist()
    for sequence, length in enumerate(call.seq_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        blocks = call.block_tables[sequence, : -(-length // cache.block_size)].long()
        keys, values = (_array(rows) for rows in read_blocks(cache, blocks, query.dtype))
        for row in range(first, last):
            stop = length - (last - 1 - row)
            seen: Any = slice(max(0, stop - how.window) if how.window else 0, min(stop + how.ahead, length))
            if call.selected is not None:
                seen = [place for place in positions_in(call.selected[row]).tolist() if place in range(length)[seen]]
            biases = None
            if how.distance_bias is not None:
                distances = stop - 1 - np.arange(seen.start, seen.stop)
                biases = _array(how.distance_bias)[:, np.minimum(distances, how.distance_bias.shape[1] - 1)]
            own = keys[:, seen, : query.shape[2]]
            attended = _attend(_array(query[row]), own, values[:, seen], how, biases)
            out[row] = torch.from_numpy(attended).to(query.dtype)
    return out


def select_keys(call: SelectionCall) -> torch.Tensor:
    return select_by_torch(call)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = _array(x)
    around = wide - wide.mean(-1, keepdims=True, dtype=np.float32)
    normal = around / np.sqrt((around * around).mean(-1, keepdims=True) + np.float32(eps)) * _array(weight)
    return torch.from_numpy(normal if bias is None else normal + _array(bias)).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: GateActivation,
    *,
    gate_first: bool = False,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    for row, (own, by) in enumerate(zip(_array(x), _array(gate), strict=True)):
        activated = (by if activation == "silu" else np.float32(1)) / (np.float32(1) + np.exp(-by))
        own = own * activated if gate_first else own
        normal = own / np.sqrt((own * own).mean(-1, keepdims=True) + np.float32(eps)) * _array(weight)
        out[row] = torch.from_numpy(normal if gate_first else normal * activated).to(x.dtype)
    return out


def gate(
    x: torch.Tensor,
    function: GateFunction,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
    limits: Limits = NO_LIMITS,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty(x.shape)
    for row, own in enumerate(_array(x)):
        total = own if bias is None else own + _array(bias)
        total = total if scale is None else total * _array(scale)
        gates = np.logaddexp(total, np.float32(0)) if function == "softplus" else 1 / (np.float32(1) + np.exp(-total))
        gates = gates.clip(*map(np.float32, limits))
        out[row] = torch.from_numpy(gates if factor is None else gates * _array(factor))
    return out


def multiply(x: torch.Tensor, by: torch.Tensor, activation: GateFunction | None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    for row, (own, multiplier) in enumerate(zip(_array(x), _array(by), strict=True)):
        multiplier = np.repeat(multiplier, len(own) // len(multiplier))
        if activation == "softplus":
            multiplier = np.logaddexp(multiplier, np.float32(0))
        elif activation == "sigmoid":
            multiplier = 1 / (np.float32(1) + np.exp(-multiplier))
        out[row] = torch.from_numpy(own * multiplier).to(x.dtype)
    return out


def activate(x: torch.Tensor, activation: RowActivation) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    for row, own in enumerate(_array(x)):
        if activation == "tanh":
            active = np.tanh(own)
        else:
            active = _xielu(own, activation) if isinstance(activation, Xielu) else _activate(own, activation)
        out[row] = torch.from_numpy(active).to(x.dtype)
    return out


def convolve(call: ConvolutionCall) -> torch.Tensor:
    require_convolution(call)
    x, weight, out = _array(call.rows), _array(call.weight), torch.zeros(call.rows.shape, dtype=call.rows.dtype)
    bias = np.zeros(weight.shape[0], np.float32) if call.bias is None else _array(call.bias)
    history, states = weight.shape[1] - 1, states_in(call.state)
    for own in list(sequences_of(call.step, call.state, x.shape[0])):
        before = np.zeros((history, x.shape[1]), np.float32) if own.before is None else _array(states[own.before])
        seen = np.concatenate([before, x[own.first_row : own.stop_row]])
        for token in range(own.count):
            total = (weight.T * seen[token : token + history + 1]).sum(axis=0) + bias
            if call.activation == "silu":
                total = total / (np.float32(1) + np.exp(-total))
            out[own.first_row + token] = torch.from_numpy(total).to(out.dtype)
            if token in own.after:
                states[own.after[token]] = torch.from_numpy(seen[token + 1 : token + 1 + history])
    return out


def recur(call: RecurrenceCall) -> torch.Tensor:
    require_recurrence(call)
    query, key, value, decay = map(_array, (call.query, call.key, call.value, call.decay))
    heads, states = call.state.shape[0], states_in(call.state)
    out = torch.zeros(call.value.shape, dtype=call.value.dtype)
    group = np.arange(heads) // (heads // query.shape[1])
    for own in list(sequences_of(call.step, call.state, out.shape[0])):
        state = np.zeros(call.state.shape, np.float32) if own.before is None else _array(states[own.before])
        for token in range(own.count):
            row = own.first_row + token
            q, k = query[row], key[row]
            if call.norm_eps is not None:
                q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(call.norm_eps)) for x in (q, k))
            q, k, v = q[group] * np.float32(call.scale), k[group], value[row]
            state = state * np.exp(decay[row]).reshape(heads, -1, 1)
            if call.beta is not None:
                known = np.einsum("hk,hkv->hv", k, state, optimize=False) if call.has_delta_rule else np.float32(0)
                v = _array(call.beta[row])[:, None] * (v - known)
            state = state + k[:, :, None] * v[:, None]
            read = np.einsum("hk,hkv->hv", q, state, optimize=False)
            if call.skip is not None:
                read += _array(call.skip)[:, None] * value[row]
            out[row] = torch.from_numpy(read).to(out.dtype)
            if token in own.after:
                states[own.after[token]] = torch.from_numpy(state)
    return out


def _attend(query: Array, keys: Array, values: Array, how: AttentionFeatures, biases: Array | None) -> Array:
    """Attention of one row: query [H, KD], keys [KH, L, KD], values [KH, L, VD], biases [H, L] to [H, VD]."""
    grouped = query.reshape(keys.shape[0], -1, query.shape[-1])
    scores = np.einsum("hgd,hld->hgl", grouped, keys, optimize=False) * np.float32(how.scale)
    if how.softcap:
        scores = np.tanh(scores / np.float32(how.softcap)) * np.float32(how.softcap)
    if biases is not None:
        scores += biases.reshape(scores.shape)
    if how.sinks is not None:
        scores = np.concatenate([scores, _array(how.sinks).reshape(*scores.shape[:2], 1)], axis=-1)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, dtype=np.float32)
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("hgl,hld->hgd", weights[..., : values.shape[1]], values, optimize=False)
    return np.asarray(out.reshape(query.shape[0], -1), dtype=np.float32)
