"""The operations on torch alone, for installations without a C compiler.

torch's products give a row different bits in calls with different numbers of rows. So every call here has exactly
`rows_per_call` rows, and the last one is padded: one shape, one kernel, one order of summation. Attention is computed
row by row. The check at start finds the number that suffices (self_check.py). Works on any device that torch has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from baton.runner.backends import torch_states
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu.kernels.attention import require_distance_bias
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.rows import NO_LIMITS, GateActivation, GateFunction, Limits, RowActivation, Xielu
from baton.runner.backends.device import CPU
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.key_selection import SelectionCall, positions_in, select_by_torch
from baton.runner.backends.low_rank import LowRank, RowAdapters
from baton.runner.backends.paged_cache import CacheView, read_blocks, write_rows
from baton.runner.backends.quantized_product import block_of, narrow_product, require_float8_groups
from baton.runner.backends.quantized_weight import Float8Weight, NarrowWeight, QuantizedWeight
from baton.runner.backends.ranks.ranks import ONE_RANK
from baton.runner.backends.routing import ClampedGate, Routing, SharedRows, choose, sum_of_experts
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall
from baton.runner.backends.weight_rows import Weight, read_weight

ROWS_PER_CALL = (8, 16, 32, 64, 128)
"""The numbers of rows that the check at start tries, in this order."""

_LOOP_COLUMNS = 32
"""How many numbers torch's elementwise loops take at a time, at most."""
_FEWEST_OUTPUTS = 8
"""A factor of an adapter's term is padded to so many outputs: with two or three, MKL's float32 product of 8 rows gives
a row other bits at other places of the call (seen on a Xeon with AMX)."""
_TRIED_RANKS = (1, 2, 3, 4, 6, 8, 9, 16, 24, 32, 64)
"""The ranks of adapters that the check at start tries."""
_TRIED_WIDTH = 4096
"""Wider factors are tried with this width, since those of a vocabulary would take seconds."""
_WIDENED_ROWS = 4096
"""How many rows of a weight are widened to float32 at a time, so that a head of many rows needs little memory."""
_QUERY_ROWS = 256
"""How many rows of a text attend to all of its keys at a time: the scores of 8,192 rows with 12 heads take 3 GB."""


def activate(x: torch.Tensor, activation: RowActivation) -> torch.Tensor:
    """Apply an activation, in x's dtype."""
    if isinstance(activation, Xielu):
        return activation.of(x)
    if activation == "tanh":
        return torch.tanh(x)
    if activation == "silu":
        return functional.silu(x)
    if activation in ("relu", "relu_squared"):
        positive = functional.relu(x)
        return positive if activation == "relu" else positive * positive
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    """Root mean square norm of x [..., N] in float32: rounded, then times weight; or times 1 + weight, then rounded."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normal * (1.0 + weight.float())).to(x.dtype)
    return weight * normal.to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Norm of x [..., N] around its mean, as `Operations.layer_norm`; torch computes each row alone."""
    if weight.ndim == 1:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    normal = functional.layer_norm(x.float(), x.shape[-1:], None, None, eps) * weight.float()
    return (normal if bias is None else normal + bias.float()).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool) -> None:
    """Rotate the first R columns of x [T, H, D] in place, as `Operations.rotate` does."""
    half = cos.shape[1] // 2
    if in_pairs:
        one, other = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        one, other = x[..., :half], x[..., half : 2 * half]
    first, second = one.float(), other.float()
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
    rotated = first * cos - second * sin, second * cos + first * sin
    one.copy_(rotated[0])
    other.copy_(rotated[1])


@dataclass(slots=True)
class TorchWeight:
    """A weight [N, K] as torch takes it; for gated products the stacked gate and up weights [2 N, K]."""

    matrix: torch.Tensor
    """Operations may move it, but not change it."""


@dataclass(frozen=True, slots=True)
class TorchStack:
    """Weights of which some are quantised, stacked over their outputs."""

    parts: tuple[torch.Tensor | NarrowWeight, ...]

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """The stacked weights with the quantised ones in a dtype: [n, k]."""
        return torch.cat([part if isinstance(part, torch.Tensor) else part.dequantized(dtype) for part in self.parts])

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """The products of x [m, k]: float32 [m, n]."""
        products = [
            functional.linear(x, part).float() if isinstance(part, torch.Tensor) else narrow_product(x, part)
            for part in self.parts
        ]
        return torch.cat(products, dim=1)


class TorchOperations:
    """torch's products in calls of `rows_per_call` rows. It may be set only before anything is computed."""

    packs_quantized = True
    heads_are_independent = False
    ranks = ONE_RANK

    def __init__(self, num_threads: int) -> None:
        self.rows_per_call = ROWS_PER_CALL[0]
        self.rows_to_try: tuple[int, ...] = ROWS_PER_CALL
        self._num_threads = num_threads

    def numerics(self) -> str:
        return f"torch-4-rows-{self.rows_per_call}-threads-{self._num_threads}"

    def product_numerics(self) -> str:
        """A name for what decides the bits of products."""
        return self.numerics()

    def program(self, dtype: torch.dtype) -> None:
        """Returns None: these operations have no programs."""

    def pack(self, *weights: Weight) -> TorchWeight | TorchStack:
        parts = tuple(map(read_weight, weights))
        tensors = [weight.detach() for weight in parts if isinstance(weight, torch.Tensor)]
        if len(tensors) == len(parts):
            return TorchWeight(torch.cat(tensors))
        for weight in parts:
            if isinstance(weight, QuantizedWeight):
                block_of(weight.group)
            elif isinstance(weight, Float8Weight):
                require_float8_groups(weight)
        return TorchStack(parts)

    def pack_own(self, *weights: Weight) -> TorchWeight | TorchStack:
        return self.pack(*weights)

    def pack_gated(self, gate: Weight, up: Weight) -> TorchWeight | TorchStack:
        return self.pack(gate, up)

    def adapt(
        self, weight: TorchWeight | TorchStack, terms: Sequence[LowRank], dtype: torch.dtype
    ) -> tuple[LowRank, ...]:
        device = weight.matrix.device if isinstance(weight, TorchWeight) else CPU
        return tuple(term.to(device) for term in terms)

    def take_rows(
        self, weight: TorchWeight | TorchStack, index: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if isinstance(weight, TorchWeight):
            return weight.matrix[index]
        return weight.matrix(dtype or torch.float32)[index]

    def held_rows(
        self, weight: TorchWeight | TorchStack, index: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(len(index)), self.take_rows(weight, index, dtype)

    def linear(
        self,
        x: torch.Tensor,
        weight: TorchWeight | TorchStack,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        dtype = x.dtype if out_dtype is None else out_dtype
        if isinstance(weight, TorchWeight) and dtype == x.dtype:
            out = self._in_calls(x, lambda rows: functional.linear(rows, weight.matrix, bias))
            return self._adapted(x, out, adapters)

        def compute(rows: torch.Tensor) -> torch.Tensor:
            if isinstance(weight, TorchWeight):
                return self._float32_product(rows, weight.matrix)
            return weight.sums(rows)

        added = 0.0 if bias is None else bias.float()
        out = self._in_calls(x, lambda rows: (compute(rows) + added).to(dtype))
        return self._adapted(x, out, adapters)

    def pack_heads(self, weights: Sequence[torch.Tensor]) -> Sequence[TorchWeight]:
        return [TorchWeight(weight.detach().clone()) for weight in weights]

    def linear_of_heads(self, x: torch.Tensor, weights: Sequence[TorchWeight], out: torch.Tensor) -> None:
        for head, weight in enumerate(weights):
            out[:, head] = self.linear(x[:, head].contiguous(), weight)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: TorchWeight | TorchStack,
        *,
        activation: Activation,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        def sums(rows: torch.Tensor) -> torch.Tensor:
            if isinstance(weight, TorchWeight):
                return functional.linear(rows, weight.matrix).float()
            return weight.sums(rows)

        def gated(rows: torch.Tensor) -> torch.Tensor:
            gate, up = rows.chunk(2, dim=-1)
            return (activate(gate.contiguous(), activation) * up).to(x.dtype)

        if adapters is None:
            return self._in_calls(x, lambda rows: gated(sums(rows)))
        return self._in_calls(self._adapted(x, self._in_calls(x, sums), adapters), gated)

    def pack_mixture(self, *_: Any) -> None:
        """None: experts are multiplied one by one."""

    def pack_choice(self, *_: Any) -> None:
        """None: experts are multiplied one by one."""

    def clamped_gate(self, rows: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
        return gate.of(rows)

    def route(self, logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        # torch rounds differently in the tail of a tensor, so only padding may be in the tail of a call.
        rows = functional.pad(logits, (0, 0, 0, -logits.shape[0] % self.rows_per_call))
        chosen, weights = choose(rows, routing)
        return chosen[: logits.shape[0]], weights[: logits.shape[0]]

    def mix_experts(self, *_arguments: Any, **_named: Any) -> torch.Tensor:
        """Never called, since `pack_mixture` gives nothing."""
        raise NotImplementedError("torch multiplies experts one by one")

    def multiply_chosen(self, *_arguments: Any, **_named: Any) -> torch.Tensor:
        """Never called, since `pack_choice` gives nothing."""
        raise NotImplementedError("torch multiplies experts one by one")

    def sum_experts(
        self,
        outs: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        return sum_of_experts(outs, places, weights, factor, shared)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        return rms_norm(x, weight, eps, plus_one)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return total, rms_norm(total, weight, eps, plus_one)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return layer_norm(x, weight, bias, eps)

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        activation: GateActivation,
        *,
        gate_first: bool = False,
    ) -> torch.Tensor:
        return torch_states.gated_rms_norm(x, gate, weight, eps, activation, gate_first=gate_first)

    def gate(
        self,
        x: torch.Tensor,
        function: GateFunction,
        bias: torch.Tensor | None,
        factor: torch.Tensor | None,
        limits: Limits = NO_LIMITS,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch_states.gate(x, function, bias, factor, limits, scale)

    def multiply(self, x: torch.Tensor, by: torch.Tensor, activation: GateFunction | None) -> torch.Tensor:
        if by.shape != x.shape:
            by = by.repeat_interleave(x.shape[1] // by.shape[1], dim=1)
        if activation is None:
            return x * by
        compute = functional.softplus if activation == "softplus" else torch.sigmoid

        def multiplied(rows: torch.Tensor) -> torch.Tensor:
            own, multiplier = rows.float().chunk(2, dim=-1)
            return (own * compute(multiplier.contiguous())).to(x.dtype)

        # torch rounds differently in the tail of a tensor, so only padding may be in the tail of a call.
        padded = [functional.pad(rows, (0, -x.shape[1] % _LOOP_COLUMNS)) for rows in (x, by)]
        return self._elementwise(torch.cat(padded, dim=-1), multiplied)[:, : x.shape[1]].contiguous()

    def activate(self, x: torch.Tensor, activation: RowActivation) -> torch.Tensor:
        padded = functional.pad(x, (0, -x.shape[1] % _LOOP_COLUMNS))
        out = self._elementwise(padded, lambda rows: activate(rows.float(), activation).to(x.dtype))
        return out[:, : x.shape[1]].contiguous()

    def mix_streams(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return torch_states.mix_streams(x, factors)

    def correct_streams(
        self, x: torch.Tensor, result: torch.Tensor, factors: torch.Tensor, active: int
    ) -> torch.Tensor:
        return torch_states.correct_streams(x, result, factors, active)

    def mean_of_streams(self, x: torch.Tensor, num_streams: int) -> torch.Tensor:
        return torch_states.mean_of_streams(x, num_streams)

    def row_means(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_calls(x, lambda rows: rows.float().mean(-1, keepdim=True).to(x.dtype))

    def resize(self, x: torch.Tensor, like: torch.Tensor, least: float) -> torch.Tensor:
        size, own = (self.row_means(rows**2) for rows in (like, x))
        return x * torch_states.nearest_root(size) / torch_states.nearest_root(own.clamp(min=least))

    def sparse_gate(self, x: torch.Tensor, deviations: float, activation: Activation) -> torch.Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        cut = self._in_calls(gate, lambda rows: torch_states.above_cutoff(rows, deviations))
        return (self.activate(cut, activation) * up).to(x.dtype)

    def prepare_heads(
        self, rows: HeadRows, cos: torch.Tensor, sin: torch.Tensor, cache: CacheView, slots: torch.Tensor
    ) -> bool:
        return False

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool = False) -> None:
        rotate(x, cos, sin, in_pairs=in_pairs)

    def store_kv(self, key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
        kept = slots >= 0
        slots = slots[kept]
        value = None if value is None else value[kept]
        write_rows(cache, key[kept], value, slots // cache.block_size, slots % cache.block_size)

    def paged_attention(self, call: AttentionCall) -> torch.Tensor:
        query, cache, how = call.query, call.cache, call.how
        require_distance_bias(how, query.shape[1], query.device)
        out = query.new_zeros(*query.shape[:2], cache.value_dim)
        extra = None if how.sinks is None else how.sinks.float().view(cache.num_kv_heads, -1, 1)
        starts: list[Any] = call.query_start.tolist()
        for sequence, length in enumerate(call.seq_lens.tolist()):
            first, last = starts[sequence], starts[sequence + 1]
            if first == last:
                continue
            blocks = call.block_tables[sequence, : -(-length // cache.block_size)].long()
            keys, values = (rows.float() for rows in read_blocks(cache, blocks, query.dtype))
            if how.ahead:
                if how.softcap or extra is not None:
                    raise ValueError("attention to keys behind has neither a soft cap nor sinks")
                rows = slice(first, last)
                out[rows] = _attend_both_ways(query[rows], keys[:, :length], values[:, :length], how)
                continue
            biases = None
            if how.distance_bias is not None:
                biases = _biases_of_keys(how.distance_bias, length, cache.num_kv_heads)
            for row in range(first, last):
                stop = length - (last - 1 - row)
                start = how.first_key(stop - 1)
                seen: slice | torch.Tensor = slice(start, stop)
                if call.selected is not None:
                    chosen = positions_in(call.selected[row])
                    seen = chosen[(chosen >= start) & (chosen < stop)]
                grouped = query[row].view(cache.num_kv_heads, -1, query.shape[2]).float()
                # A copy, so that the product sees the same memory layout for a prompt and for a lone token.
                own = keys[:, seen, : query.shape[2]].contiguous()
                scores = torch.bmm(grouped, own.transpose(1, 2)) * how.scale
                if how.softcap:
                    scores = torch.tanh(scores / how.softcap) * how.softcap
                if biases is not None:
                    scores = scores + biases[..., length - (stop - start) :]
                if extra is not None:
                    scores = torch.cat((scores, extra), dim=-1)
                weights = torch.softmax(scores, dim=-1)[..., : own.shape[1]]
                out[row] = torch.bmm(weights, values[:, seen].contiguous()).view_as(out[row]).to(query.dtype)
        return out

    def select_keys(self, call: SelectionCall) -> torch.Tensor:
        return select_by_torch(call)

    def convolve(self, call: ConvolutionCall) -> torch.Tensor:
        return torch_states.convolve(call)

    def recur(self, call: RecurrenceCall) -> torch.Tensor:
        return torch_states.recur(call)

    def _adapted(self, x: torch.Tensor, out: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        """What a product of x, rounded to its dtype, is with what the rows' adapters add, rounded once more."""
        if adapters is None:
            return out
        for slot in torch.unique(adapters.slots).tolist():
            terms: Sequence[LowRank] | None = adapters.weights[slot] if slot >= 0 else None
            if terms is None:
                continue
            own = (adapters.slots == slot).nonzero().flatten().to(x.device)
            rows, wide = x[own].float(), out[own].float()
            for term in terms:
                t = self.factor_product(rows, term.a) * term.factor
                for outputs in term.outputs:
                    more = self.factor_product(t, outputs.b)
                    if outputs.bias is not None:
                        more = more + outputs.bias * term.factor
                    wide[:, outputs.first : outputs.stop] += more
            out[own] = wide.to(out.dtype)
        return out

    def factor_product(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product of rows [T, K] and a factor [N, K] of an adapter's term, A or B, both in float32: [T, N]."""
        num_outputs = factor.shape[0]
        padded = functional.pad(factor, (0, 0, 0, max(0, _FEWEST_OUTPUTS - num_outputs)))
        return self._in_calls(x, partial(functional.linear, weight=padded))[:, :num_outputs]

    def why_adapters_not_bit_exact(self, shapes: Iterable[tuple[int, int]], device: torch.device) -> str | None:
        """None when what an adapter adds to a row depends on this row alone; otherwise where it does not.

        `shapes`: outputs and inputs of the products that adapters may change.
        """
        widths = {min(width, _TRIED_WIDTH) for shape in shapes for width in shape}
        factors = {(rank, width) for rank in _TRIED_RANKS for width in widths}
        for shape in sorted(factors | {(width, rank) for rank, width in factors}):
            generator = torch.Generator().manual_seed(0)
            factor = torch.randn(shape, generator=generator).to(device)
            x = torch.randn(self.rows_per_call, shape[1], generator=generator).to(device)
            # Each row at another place, and, of the last one, without mates.
            moved = self.factor_product(x.roll(1, 0), factor).roll(-1, 0)
            expected, alone = self.factor_product(x, factor), self.factor_product(x[-1:], factor)
            if not torch.equal(expected, moved) or not torch.equal(expected[-1:], alone):
                return (
                    f"the check at start found different bits of a row in adapters' products with a factor of {shape}"
                )
        return None

    def _float32_product(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """The product of operands of a narrower dtype, in float32: widened, since a CPU's products have one dtype."""
        wide = rows.float()
        parts = (matrix[row : row + _WIDENED_ROWS] for row in range(0, matrix.shape[0], _WIDENED_ROWS))
        return torch.cat([functional.linear(wide, part.float()) for part in parts], dim=1)

    def _elementwise(self, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """compute(x) of a function that computes each number alone, or each row's halves."""
        return self._in_calls(x, compute)

    def _in_calls(self, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        rows, size = x.shape[0], self.rows_per_call
        padded = functional.pad(x, (0, 0, 0, -rows % size)).contiguous()
        # ProductWatch (layers.py) must not see these products: it looks for those that were not replaced.
        with _disable_current_modes():
            parts = [compute(padded[row : row + size]) for row in range(0, max(rows, 1), size)]
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[:rows]


def _biases_of_keys(distance_bias: torch.Tensor, length: int, num_kv_heads: int) -> torch.Tensor:
    """The biases [KH, H / KH, length] that the last of `length` positions adds to the scores of all keys.

    An earlier position adds the last columns of it to the scores of the keys that it sees.
    """
    distances = torch.arange(length - 1, -1, -1, device=distance_bias.device).clamp(max=distance_bias.shape[1] - 1)
    return distance_bias[:, distances].view(num_kv_heads, -1, length)


def _attend_both_ways(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: AttentionFeatures
) -> torch.Tensor:
    """Attention of all rows [n, H, KD] of a sequence to float32 keys [KH, n, KD] and values [KH, n, VD]: [n, H, VD].

    The bits depend on the sequence alone, which is computed by products of its own: one for each block of its rows, so
    that the scores of a long text need not be in memory all at once.
    """
    before = keys.shape[1] - query.shape[0]
    blocks = [
        _attend_block(query[row : row + _QUERY_ROWS], before + row, keys.contiguous(), values, how)
        for row in range(0, query.shape[0], _QUERY_ROWS)
    ]
    return torch.cat(blocks)


def _attend_block(
    query: torch.Tensor, start: int, keys: torch.Tensor, values: torch.Tensor, how: AttentionFeatures
) -> torch.Tensor:
    """Attention of rows [n, H, KD] at the positions from `start` on, as `_attend_both_ways`."""
    num_rows, heads, length = query.shape[0], keys.shape[0], keys.shape[1]
    grouped = query.float().view(num_rows, heads, -1, keys.shape[2]).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(heads, -1, keys.shape[2]), keys.transpose(1, 2)) * how.scale
    at = torch.arange(length, device=query.device)
    own = at[start : start + num_rows, None]
    seen = at <= own + how.ahead
    if how.window:
        seen &= at >= (own - own % how.window if how.in_chunks else own + 1 - how.window)
    scores = scores.view(heads, -1, num_rows, length).masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, dim=-1).view(heads, -1, length)
    attended = torch.bmm(weights, values.contiguous()).view(heads, -1, num_rows, values.shape[2])
    return attended.permute(2, 0, 1, 3).reshape(num_rows, -1, values.shape[2]).to(query.dtype)
