"""A program: the operations of a step, recorded once and run in one call with the tensors of each step.

Between two operations of a program no Python runs, nothing is allocated, and the team of threads stays the same. Each
operation calls the same kernel on the same rows as the function of that name, so the bits are the same.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch

from baton.runner.backends.attention_call import AttentionFeatures, StepLayout
from baton.runner.backends.cpu.kernels.adapters import ProgramAdapters, StepAdapters
from baton.runner.backends.cpu.kernels.attention import (
    attention_structure,
    require_cache,
    require_distance_bias,
    require_features,
    require_requests,
    row_dtypes,
    store_call,
)
from baton.runner.backends.cpu.kernels.barrier import GrowingMemory
from baton.runner.backends.cpu.kernels.buffers import Buffers, Rows
from baton.runner.backends.cpu.kernels.call_structs import (
    OPERATION_NAMES,
    ActivateCall,
    AddCall,
    Call,
    CopyCall,
    GateCall,
    GateKind,
    HeadsCall,
    LinearCall,
    NormCall,
    Operation,
    OperationKind,
    Place,
    QuantizeCall,
    RotateCall,
    Step,
    StepGroup,
    TakeRowsCall,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.float8 import PackedFloat8Weight
from baton.runner.backends.cpu.kernels.library import DTYPES, check_status, library
from baton.runner.backends.cpu.kernels.mixture import PackedMixture, route_structure
from baton.runner.backends.cpu.kernels.product import (
    ACTIVATIONS,
    CLAMP,
    NOT_GATED,
    Activation,
    PackedHeads,
    PackedWeight,
)
from baton.runner.backends.cpu.kernels.quantized import PackedQuantizedWeight
from baton.runner.backends.cpu.kernels.rows import (
    NO_LIMITS,
    GateActivation,
    GateFunction,
    Limits,
    activate_structure,
    gate_structure,
    multiply_structure,
    norm_structure,
)
from baton.runner.backends.cpu.kernels.states import (
    convolution_structure,
    recurrence_structure,
    require_filter,
    require_kept_lens,
    require_numbers,
    require_recurred_rows,
    require_skip,
)
from baton.runner.backends.cpu.kernels.weights import Packed, PackedPart, StackedWeight, columns_of
from baton.runner.backends.device import CPU
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.routing import Routing
from baton.runner.backends.state_calls import StateView


class Program:
    """Operations in the order in which they were recorded. Run by one thread at a time.

    Recording methods take the name of a scratch buffer, or an argument's rows, `into` which the result is written, and
    return the rows of the result. They raise KernelArgumentError for arguments that the kernels can't take; `run` does
    so for the tensors of a step, before anything is computed.
    """

    def __init__(self, dtype: torch.dtype, threads: int, shared_memory: GrowingMemory | None = None) -> None:
        """`shared_memory`: for rows that this process shares with others."""
        if dtype not in DTYPES:
            raise KernelArgumentError("dtype", f"must be float32 or bfloat16, is {dtype}")
        self.timing = False
        """Whether `run` measures how long the operations take, for `seconds`."""
        self.timed_until = 0.0
        """When the last timed run ended (perf_counter)."""
        self._dtype = dtype
        self._threads = threads
        self._isa = library().isa
        self._recorded: list[Operation] = []
        self._operations = (Operation * 0)()
        self._kept: list[object] = []
        self._buffers = Buffers(dtype, shared_memory)
        self._num_groups = 0
        self._times: list[ctypes.Array[ctypes.c_int64]] = []
        self._products: list[tuple[int, int]] = []
        """The products that adapters may change: the number of each in the model, and the part of its weight."""
        self._adapters: ProgramAdapters | None = None
        """The adapters of the program, for the table in the latest step that had any."""

    def argument(self, width: int, *, sampled: bool = False, dtype: torch.dtype | None = None) -> Rows:
        """Declare a matrix that callers of `run` pass: [T, width], or [S, width] with `sampled`, contiguous.

        `dtype`: the program's (None), or float32 for the result of `linear`.
        """
        if dtype not in (None, self._dtype, torch.float32):
            raise KernelArgumentError("dtype", f"must be {self._dtype} or float32, is {dtype}")
        return self._buffers.argument(width, sampled, self._dtype if dtype is None else dtype)

    def linear(
        self, x: Rows, w: Packed, bias: torch.Tensor | None, *, into: str | Rows, product: int | None = None
    ) -> Rows:
        """Record the product of x and the weight transposed, plus bias; float32 rows `into` keep the sums unrounded.

        Of float32 rows x the result is float32, too, and adapters don't change it.
        `product`: its number in the tables of adapters that steps have; None: adapters don't change it.
        """
        self._require_bias(bias, w.n, x.dtype)
        out = self._out(into, w.n, x.sampled, x.dtype)
        self._multiply_all(x, w, bias, out, product)
        return out

    def gated_linear(
        self, x: Rows, w: Packed, activation: Activation, *, into: str | Rows, product: int | None = None
    ) -> Rows:
        """Record the gated product activation(x gateᵀ) * (x upᵀ)."""
        out = self._out(into, w.n, x.sampled)
        self._multiply_gated(x, w, activation, out, product)
        return out

    def rms_norm(self, x: Rows, weight: torch.Tensor, eps: float, *, plus_one: bool, into: str | Rows) -> Rows:
        """Record the norm of each piece of x that is as wide as the weight (a row, or each of its heads)."""
        return self._norm(x, None, self._norm_call(x, weight, None, eps, plus_one=plus_one), into)

    def add_rms_norm(
        self, x: Rows, residual: Rows, weight: torch.Tensor, eps: float, *, plus_one: bool, into: str | Rows
    ) -> Rows:
        """Record the sum of x and the residual, which replaces the residual, and the norm of the sum."""
        return self._norm(x, residual, self._norm_call(x, weight, None, eps, plus_one=plus_one), into)

    def layer_norm(
        self, x: Rows, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, into: str | Rows
    ) -> Rows:
        """Record the norm around its mean of each piece of x that is as wide as the weight [n], or [heads, n]."""
        return self._norm(x, None, self._norm_call(x, weight, bias, eps, around_mean=True), into)

    def add_layer_norm(
        self, x: Rows, residual: Rows, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, into: str | Rows
    ) -> Rows:
        """Record the sum of x and the residual, which replaces the residual, and the `layer_norm` of the sum."""
        return self._norm(x, residual, self._norm_call(x, weight, bias, eps, around_mean=True), into)

    def gated_rms_norm(
        self,
        x: Rows,
        gate: Rows,
        weight: torch.Tensor,
        eps: float,
        activation: GateActivation,
        *,
        gate_first: bool = False,
        into: str | Rows,
    ) -> Rows:
        """Record the norm of each piece of x that is as wide as the weight [n], times activation(gate), rounded once.

        A weight [pieces, n] has one for each piece. `gate_first`: x times activation(gate) is normed instead.
        """
        if (gate.width, gate.sampled) != (x.width, x.sampled):
            raise KernelArgumentError("gate", f"must be rows of {x.width}, as many as x has")
        call = self._norm_call(x, weight, None, eps)
        call.has_sigmoid_gate, call.gate_first = activation == "sigmoid", gate_first
        return self._norm(x, None, call, into, gate)

    def gate(
        self,
        x: Rows,
        function: GateFunction,
        bias: torch.Tensor | None,
        factor: torch.Tensor | None,
        limits: Limits = NO_LIMITS,
        scale: torch.Tensor | None = None,
        *,
        into: str,
    ) -> Rows:
        """Record the gates factor * function((x + bias) * scale), in float32; the others are float32 [n] or None.

        `limits`: between which the function's values are kept.
        """
        call = gate_structure(x.width, function, bias, factor, limits, scale)
        out = self._buffers.scratch(into, x.width, x.sampled, torch.float32)
        call.x_stride, call.out_stride = x.stride, out.stride
        self._kept += [bias, factor, scale]
        self._record(OperationKind.GATE, x, Call(gate=call), out=out)
        return out

    def widened(self, x: Rows, *, into: str) -> Rows:
        """Record x in float32."""
        call = GateCall(columns=x.width, x_stride=x.stride, out_stride=x.width, function=GateKind.PLAIN)
        out = self._buffers.scratch(into, x.width, x.sampled, torch.float32)
        self._record(OperationKind.GATE, x, Call(gate=call), out=out)
        return out

    def route(self, logits: Rows, routing: Routing, *, into: str) -> tuple[Rows, Rows]:
        """Record the choice of each row's experts: int32 rows of them, and float32 rows of their weights."""
        call = route_structure(logits.width, routing)
        if logits.stride != logits.width:
            raise KernelArgumentError("logits", "must be whole rows")
        chosen = self._buffers.scratch(f"{into} chosen", routing.most, logits.sampled, torch.int32)
        weights = self._buffers.scratch(f"{into} weights", routing.most, logits.sampled, torch.float32)
        self._kept.append(routing)
        self._record(OperationKind.ROUTE, logits, Call(route=call), out=weights, operands=(chosen,))
        return chosen, weights

    def mix_experts(
        self,
        x: Rows,
        chosen: Rows,
        weights: Rows,
        mixture: PackedMixture,
        factor: float,
        shared: Rows | None,
        gate: Rows | None,
        *,
        into: str | Rows,
    ) -> Rows:
        """Record the weighted sum of each row's experts, times the factor, plus shared rows times sigmoid(gate)."""
        whole = [rows for rows in (x, shared, gate) if rows is not None]
        if x.width != mixture.k or any(rows.stride != rows.width for rows in whole):
            raise KernelArgumentError("x", f"must be whole rows of {mixture.k}")
        most, size = chosen.width, self._dtype.itemsize
        call = mixture.structure(self._dtype, factor, most)
        room = [
            self._buffers.scratch(name, -(-most * row_bytes // size), x.sampled)
            for name, row_bytes in (
                ("gathered rows", mixture.gathered_bytes or mixture.k * size),
                ("inner rows", mixture.inner * size),
                ("quantized rows", mixture.quantized_bytes or 0),
                ("rows of experts", mixture.k * size),
                ("clamped rows", mixture.clamped_width * size),
            )
        ]
        out = self._out(into, mixture.k, x.sampled)
        self._kept.append(mixture)
        operands = (chosen, weights, shared, gate)
        self._record(OperationKind.MIXTURE, x, Call(mixture=call), out=out, operands=operands, room=room)
        return out

    def multiply(self, x: Rows, by: Rows, activation: GateFunction | None, *, into: str | Rows) -> Rows:
        """Record x * activation(by), or without one x * by, rounded once; by may have one number for each head of x."""
        call = multiply_structure(x.width, by.width, x.stride, by.stride, activation)
        self._require_as_many(x, by, "by")
        out = self._out(into, x.width, x.sampled)
        self._record(OperationKind.MULTIPLY, x, Call(multiply=call), out=out, operands=(by,))
        return out

    def activate(self, x: Rows, activation: Activation, *, into: str | Rows) -> Rows:
        """Record activation(x), rounded once."""
        out = self._out(into, x.width, x.sampled)
        call = activate_structure(x.width, x.stride, activation)
        self._record(OperationKind.ACTIVATE, x, Call(activate=call), out=out)
        return out

    def clamp(self, x: Rows, bound: float, *, into: str | Rows) -> Rows:
        """Record x with the numbers beyond -bound and bound replaced by these."""
        out = self._out(into, x.width, x.sampled)
        call = ActivateCall(columns=x.width, x_stride=x.stride, activation=CLAMP, bound=bound)
        self._record(OperationKind.ACTIVATE, x, Call(activate=call), out=out)
        return out

    def add(self, one: Rows, other: Rows, factor: float, *, into: str | Rows) -> Rows:
        """Record one + other * factor, the product rounded and then the sum; `into` may be one of both."""
        self._require_as_many(one, other, "other")
        if (other.width, one.stride, other.stride) != (one.width, one.width, one.width):
            raise KernelArgumentError("other", "and the rows to which it is added must be whole rows of one width")
        out = self._out(into, one.width, one.sampled)
        self._record(
            OperationKind.ADD, one, Call(add=AddCall(columns=one.width, factor=factor)), out=out, operands=(other,)
        )
        return out

    def scratch(self, name: str, width: int, *, sampled: bool = False) -> Rows:
        """Rows of the scratch buffer with this name, which operations write in parts."""
        return self._buffers.scratch(name, width, sampled)

    def copy_columns(self, x: Rows, out: Rows, heads: int = 1, *, first: int = 0, width: int, to: int = 0) -> None:
        """Record the copy of `width` columns, from `first` on in each head of x, to those from `to` on of out's."""
        of_x, of_out = x.width // heads, out.width // heads
        if x.width % heads or out.width % heads or first + width > of_x or to + width > of_out:
            raise KernelArgumentError("width", f"of {width} columns is not in heads of {of_x} and {of_out}")
        size = self._dtype.itemsize
        call = CopyCall(
            pieces=heads,
            piece_bytes=width * size,
            x_stride=x.stride * size,
            x_apart=of_x * size,
            out_stride=out.stride * size,
            out_apart=of_out * size,
        )
        out = out.columns(to, out.width)
        self._record(OperationKind.COPY, x.columns(first, x.width), Call(copy=call), out=out)

    def linear_of_heads(self, x: Rows, weights: PackedHeads, out: Rows) -> None:
        """Record the product of the first columns of each head of x with its weight, for the first columns of out's."""
        w, heads = weights.first, len(weights)
        of_x, of_out = x.width // heads, out.width // heads
        if x.width % heads or out.width % heads or w.k > of_x or w.n > of_out or w.padded_k != w.k:
            raise KernelArgumentError("x", f"and out have heads of {of_x} and {of_out}, the weight [{w.n}, {w.k}]")
        if w.isa != self._isa or w.dtype != self._dtype:
            raise KernelArgumentError("w", f"must be packed for this instruction set from {self._dtype}")
        size, dtype = self._dtype.itemsize, DTYPES[self._dtype]
        product = LinearCall(packed=w.address, n=w.n, k=w.k, x_stride=x.stride, out_stride=out.stride, out_dtype=dtype)
        call = HeadsCall(
            linear=product,
            heads=heads,
            x_apart=of_x * size,
            packed_apart=weights.apart * size,
            out_apart=of_out * size,
        )
        self._kept.append(weights)
        self._record(OperationKind.HEADS, x, Call(heads=call), out=out)

    def rotate(self, x: Rows, head_dim: int, cos: Rows, sin: Rows, *, first: int = 0, in_pairs: bool = False) -> None:
        """Record a rotation, in place, of as many columns of each head of x as `cos` and `sin` have, from `first` on.

        These may be float32. `in_pairs`: each two neighbours belong together, and not the two halves.
        """
        if x.width % head_dim != 0 or cos.width % 2 != 0 or first + cos.width > head_dim or sin.width != cos.width:
            raise KernelArgumentError("cos", f"of {cos.width} columns can't rotate heads of {head_dim}")
        if cos.dtype not in (x.dtype, torch.float32) or sin.dtype != cos.dtype:
            raise KernelArgumentError("cos", f"is {cos.dtype}, and the rows {x.dtype}")
        call = RotateCall(
            heads=x.width // head_dim,
            half=cos.width // 2,
            token_stride=x.stride,
            head_stride=head_dim,
            angle_stride=cos.stride,
            angle_dtype=DTYPES[cos.dtype],
            in_pairs=in_pairs,
        )
        self._record(OperationKind.ROTATE, x.columns(first, x.width), Call(rotate=call), operands=(cos, sin))

    def store_kv(self, key: Rows, value: Rows, cache: CacheView, group: int) -> None:
        """Record the storing of keys and values in the cache, at the slots of a group of layers."""
        require_cache(cache)
        if self._dtype not in row_dtypes(cache):
            raise KernelArgumentError("cache", f"is {cache.memory.dtype}, which has no rows of {self._dtype}")
        if (key.width, value.width) != (cache.num_kv_heads * cache.key_dim, cache.num_kv_heads * cache.value_dim):
            raise KernelArgumentError("key", f"and value of {key.width} and {value.width} columns don't fit the cache")
        call = store_call(cache, self._dtype, key.stride, value.stride)
        self._kept.append(cache.memory)
        self._record(OperationKind.STORE_KV, key, Call(store=call), operands=(value,), group=group)

    def paged_attention(self, query: Rows, cache: CacheView, group: int, how: AttentionFeatures, *, into: str) -> Rows:
        """Record attention over the cache, with the block tables of a group of layers."""
        require_cache(cache)
        heads = query.width // cache.key_dim
        sinks = require_features(how, heads, cache)
        require_distance_bias(how, heads, CPU)
        if query.width != heads * cache.key_dim:
            raise KernelArgumentError("query", f"of {query.width} columns has no heads of {cache.key_dim}")
        out, attended = self._attention_rows(into, heads * cache.value_dim, query.sampled)
        call = attention_structure(how, heads, cache, sinks)
        call.query_stride, call.out_stride = query.stride, out.stride
        self._kept += [cache.memory, sinks, how.distance_bias]
        self._record(OperationKind.ATTENTION, query, Call(attention=call), out=out, group=group)
        self._attended()
        return attended

    def convolve(
        self,
        x: Rows,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Literal["silu"] | None,
        state: StateView,
        group: int,
        *,
        into: str | Rows,
    ) -> Rows:
        """Record a convolution of x's columns, with the block tables of a group of layers."""
        require_filter(weight, bias, state)
        if x.width != weight.shape[0] or x.sampled:
            raise KernelArgumentError("x", f"must be all rows, of {weight.shape[0]} columns")
        out = self._out(into, x.width, sampled=False)
        call, kept = convolution_structure(weight, bias, activation, state)
        call.x_stride, call.out_stride = x.stride, out.stride
        self._kept.append(kept)
        self._record(OperationKind.CONVOLVE, x, Call(convolution=call), out=out, group=group)
        return out

    def recur(
        self,
        query: Rows,
        key: Rows,
        value: Rows,
        decay: Rows,
        beta: Rows | None,
        *,
        scale: float,
        norm_eps: float | None,
        state: StateView,
        group: int,
        has_delta_rule: bool = True,
        skip: torch.Tensor | None = None,
        into: str | Rows,
    ) -> Rows:
        """Record a recurrence, with the block tables of a group of layers; decay and beta are float32 rows."""
        require_recurred_rows(query, key, value, decay, beta, state)
        require_numbers(scale, norm_eps)
        heads, key_dim, value_dim = state.shape
        require_skip(skip, heads)
        out = self._out(into, heads * value_dim, sampled=False)
        call = recurrence_structure(state, query.width // key_dim, decay.width > heads, scale, norm_eps, skip)
        call.has_delta_rule = has_delta_rule and beta is not None
        call.query_stride, call.key_stride, call.value_stride = query.stride, key.stride, value.stride
        call.out_stride, call.decay_stride = out.stride, decay.stride
        call.beta_stride = 0 if beta is None else beta.stride
        self._kept += [state.memory, skip]
        operands = (key, value, decay, beta)
        self._record(OperationKind.RECUR, query, Call(recurrence=call), out=out, operands=operands, group=group)
        return out

    def take_sampled(self, x: Rows, *, into: str | Rows) -> Rows:
        """Record the copy of those rows of x that sample."""
        out = self._out(into, x.width, True, x.dtype)
        size = x.dtype.itemsize
        call = TakeRowsCall(row_bytes=x.width * size, x_stride=x.stride * size)
        self._record(OperationKind.TAKE_ROWS, x, Call(take=call), out=out)
        return out

    def run(
        self,
        arguments: Sequence[torch.Tensor],
        layout: StepLayout,
        sampled: torch.Tensor,
        adapters: StepAdapters | None = None,
    ) -> None:
        """Compute a step, and return when it is computed.

        `arguments`: in the order in which they were declared; `sampled`: int64 [S], the rows that sample; `adapters`:
        None if no row has one.
        """
        num_rows, num_sampled = layout.slots[0].shape[0], sampled.shape[0]
        self._require_step(arguments, layout, sampled)
        buffers = self._buffers.addresses(arguments, max(num_rows, num_sampled))
        groups = (StepGroup * len(layout.slots))()
        for group, slots, tables in zip(groups, layout.slots, layout.block_tables, strict=True):
            group.slots, group.block_tables = slots.data_ptr(), tables.data_ptr()
            group.table_width, group.table_stride = tables.shape[1], tables.stride(0)
        step = Step(
            ctypes.addressof(buffers),
            sampled.data_ptr(),
            layout.query_start.data_ptr(),
            layout.sample_start.data_ptr(),
            layout.seq_lens.data_ptr(),
            None if layout.kept_lens is None else layout.kept_lens.data_ptr(),
            ctypes.addressof(groups),
            num_rows,
            num_sampled,
            layout.seq_lens.shape[0],
        )
        if adapters is not None:
            kept = self._set_adapters(step, adapters, sampled)
        if len(self._operations) != len(self._recorded):
            self._operations = (Operation * len(self._recorded))(*self._recorded)
        count = len(self._operations)
        times = (ctypes.c_int64 * (count + 1))() if self.timing else None
        run = library().run_program
        check_status(run(self._isa, self._operations, count, ctypes.byref(step), self._threads, times))
        if adapters is not None:
            del kept  # the memory that the step pointed to
        if times is not None:
            self.timed_until = time.perf_counter()
            self._times.append(times)

    def forget_times(self) -> None:
        """Forget the timed runs so far."""
        self._times = []

    def seconds(self) -> dict[str, float]:
        """The seconds that all operations of each name took in the timed runs since `forget_times`."""
        taken: defaultdict[str, float] = defaultdict(float)
        for times in self._times:
            for operation, (before, after) in zip(self._operations, pairwise(times), strict=True):
                taken[OPERATION_NAMES[operation.kind]] += (after - before) / 1e9
        return taken

    def _set_adapters(self, step: Step, adapters: StepAdapters, sampled: torch.Tensor) -> object:
        """Fill in a step's adapters; returns what must be kept until the step is computed."""
        slots, table = adapters.slots, adapters.table
        if slots.shape != (step.rows,) or slots.dtype != torch.int32 or not slots.is_contiguous():
            raise KernelArgumentError("adapters", f"must have int32 slots [{step.rows}], contiguous")
        own = self._adapters
        if own is None or not own.is_of(table):
            own = self._adapters = ProgramAdapters(table, self._products)
        of_sampled = slots[sampled]
        t = torch.empty(max(step.rows, step.num_sampled) * own.stride, dtype=torch.float32)
        step.adapter_slots, step.sampled_slots = slots.data_ptr(), of_sampled.data_ptr()
        step.adapter_weights, step.t = ctypes.addressof(own.pointers), t.data_ptr()
        step.num_slots, step.t_stride = own.num_slots, own.stride
        return own, of_sampled, t

    def _attention_rows(self, into: str, width: int, sampled: bool) -> tuple[Rows, Rows]:
        """The rows that attention writes, and those that are its result: the same, if no other rank writes any."""
        out = self._buffers.scratch(into, width, sampled)
        return out, out

    def _attended(self) -> None:
        """Called when attention is recorded."""

    def _require_bias(self, bias: torch.Tensor | None, n: int, dtype: torch.dtype) -> None:
        if bias is not None and (bias.shape != (n,) or bias.dtype != dtype or not bias.is_contiguous()):
            raise KernelArgumentError("bias", f"must be [{n}] {dtype}, contiguous")

    def _multiply_all(
        self, x: Rows, w: Packed, bias: torch.Tensor | None, out: Rows, product: int | None = None
    ) -> None:
        """Record the product with each part of a weight, plus its columns of the bias."""
        if w.gated:
            raise KernelArgumentError("w", "is gated: use gated_linear")
        for index, (first, part) in enumerate(columns_of(w.parts if isinstance(w, StackedWeight) else (w,))):
            own_bias = None if bias is None else bias[first : first + part.n]
            adapted = None if product is None else (product, index)
            self._multiply(x, part, own_bias, NOT_GATED, out.columns(first, first + part.n), adapted)

    def _multiply_gated(
        self, x: Rows, w: Packed, activation: Activation, out: Rows, product: int | None = None
    ) -> None:
        if not w.gated or isinstance(w, StackedWeight):
            raise KernelArgumentError("w", "is not gated: use pack_gated")
        self._multiply(x, w, None, ACTIVATIONS[activation], out, None if product is None else (product, 0))

    def _multiply(
        self,
        x: Rows,
        w: PackedPart,
        bias: torch.Tensor | None,
        activation: int,
        out: Rows,
        adapted: tuple[int, int] | None,
    ) -> None:
        """`adapted`: if adapters may change it, the number of the product in the model and of the weight's part."""
        given = x
        if x.width != w.k:
            raise KernelArgumentError("x", f"has {x.width} columns, the weight {w.k}")
        call = LinearCall(
            packed=w.address,
            bias=None if bias is None else bias.data_ptr(),
            n=w.n,
            k=w.k,
            x_stride=x.stride,
            out_stride=out.stride,
            activation=activation,
            out_dtype=DTYPES[out.dtype],
        )
        if isinstance(w, PackedQuantizedWeight):
            x = self._quantize(x, w)
            call.format, call.x_stride = ctypes.addressof(w.format), w.row_bytes
        elif w.isa != self._isa or (isinstance(w, PackedWeight) and w.dtype != x.dtype):
            raise KernelArgumentError("w", f"must be packed for this instruction set from {x.dtype}")
        elif w.padded_k != w.k:
            raise KernelArgumentError("x", f"has {x.width} columns, the packed weight {w.padded_k}")
        elif isinstance(w, PackedFloat8Weight):
            call.scale_group = w.group
        self._kept += [w, bias]
        if adapted is None:
            self._record(OperationKind.LINEAR, x, Call(linear=call), out=out, dtype=given.dtype)
            return
        self._record(
            OperationKind.LINEAR, x, Call(linear=call), out=out, operands=(given,), product=len(self._products)
        )
        self._products.append(adapted)

    def _quantize(self, x: Rows, w: PackedQuantizedWeight) -> Rows:
        """Record that x is quantised for a weight, and return the rows of the scratch buffer with the result."""
        out = self._buffers.scratch("quantized x", -(-w.row_bytes // self._dtype.itemsize), x.sampled)
        call = QuantizeCall(format=ctypes.addressof(w.format), k=w.k, x_stride=x.stride)
        self._record(OperationKind.QUANTIZE, x, Call(quantize=call), out=out)
        return out

    def _norm_call(
        self,
        x: Rows,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        *,
        plus_one: bool = False,
        around_mean: bool = False,
    ) -> NormCall:
        if weight.ndim not in (1, 2) or x.width % weight.shape[-1] or (weight.ndim == 2 and weight.numel() != x.width):
            raise KernelArgumentError(
                "weight", f"must be [n] with n a divisor of {x.width}, or [heads, n] of all heads"
            )
        self._kept += [weight, bias]
        return norm_structure(weight.shape, self._dtype, weight, bias, eps, plus_one=plus_one, around_mean=around_mean)

    def _norm(self, x: Rows, residual: Rows | None, call: NormCall, into: str | Rows, gate: Rows | None = None) -> Rows:
        if residual is not None and (
            x.width != residual.width or x.sampled != residual.sampled or residual.stride != residual.width
        ):
            raise KernelArgumentError("residual", "must be whole rows of x's shape")
        n = call.n
        out = self._out(into, x.width, x.sampled)
        call.columns, call.row_stride, call.column_stride = x.width // n, x.stride, n
        call.gate_row_stride, call.gate_column_stride = 0 if gate is None else gate.stride, n
        self._record(OperationKind.NORM, x, Call(norm=call), out=out, operands=(residual, residual, gate))
        return out

    def _require_as_many(self, x: Rows, other: Rows, name: str) -> None:
        if other.sampled != x.sampled:
            raise KernelArgumentError(name, "must be as many rows as x has")

    def _record(
        self,
        kind: OperationKind,
        x: Rows | None,
        call: Call,
        *,
        out: Rows | None = None,
        operands: Sequence[Rows | None] = (),
        group: int = 0,
        product: int = -1,
        room: Sequence[Rows] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """`operands`: the second to the fifth, as far as there are any (csrc/program.c). `room`: of a mixture.

        `dtype`: that of x, which may be float32 for a product; None: the program's.
        """
        of = x if out is None else out
        dtype = (x.dtype if x is not None and kind is OperationKind.ROUTE else self._dtype) if dtype is None else dtype
        # Those that recurrences, rotations and routes have checked may be float32.
        alike = {OperationKind.RECUR: 2, OperationKind.ROTATE: 0, OperationKind.ROUTE: 0, OperationKind.MIXTURE: 0}
        same = [*operands[: alike.get(kind, len(operands))]]
        if kind not in (OperationKind.LINEAR, OperationKind.ROUTE, OperationKind.TAKE_ROWS):
            same.append(x)
        if kind not in (OperationKind.LINEAR, OperationKind.GATE, OperationKind.ROUTE, OperationKind.TAKE_ROWS):
            same.append(out)
        if any(rows is not None and rows.dtype != self._dtype for rows in same):
            raise KernelArgumentError(
                "into", f"and all operands must be {self._dtype}; only products and gates can be float32"
            )
        places = [self._place(rows) for rows in (x, out, *operands, *[None] * (4 - len(operands)))]
        second = operands[0] if operands else None
        stride = 0 if second is None else second.stride
        of_room = (Place * 5)(*(self._place(rows) for rows in (*room, *[None] * (5 - len(room)))))
        which = of is not None and of.sampled
        self._recorded.append(Operation(kind, which, group, DTYPES[dtype], product, stride, *places, of_room, call))
        self._num_groups = max(self._num_groups, group + 1)

    def _place(self, rows: Rows | None) -> Place:
        return Place(-1, 0) if rows is None else Place(rows.buffer, rows.first * rows.dtype.itemsize)

    def _out(self, into: str | Rows, width: int, sampled: bool, dtype: torch.dtype | None = None) -> Rows:
        """The rows for a result: of the scratch buffer with the name `into`, or of an argument.

        `dtype`: of a scratch buffer; None: the program's.
        """
        out = self._buffers.scratch(into, width, sampled, dtype) if isinstance(into, str) else into
        if (out.width, out.stride, out.sampled) != (width, width, sampled):
            raise KernelArgumentError("into", f"must be whole rows of {width}")
        return out

    def _require_step(self, arguments: Sequence[torch.Tensor], layout: StepLayout, sampled: torch.Tensor) -> None:
        """Raises KernelArgumentError for tensors whose shapes differ from what the operations expect."""
        for tables in layout.block_tables:
            require_requests(layout.query_start, layout.seq_lens, tables)
        require_requests(layout.sample_start, layout.seq_lens, layout.block_tables[0])
        if layout.kept_lens is not None:
            require_kept_lens(layout.kept_lens, layout.seq_lens)
        num_rows = layout.slots[0].shape[0]
        if min(len(layout.slots), len(layout.block_tables)) < self._num_groups:
            raise KernelArgumentError("slots", f"and block tables are needed for {self._num_groups} groups of layers")
        for name, tensor, size in (*(("slots", slots, num_rows) for slots in layout.slots), ("sampled", sampled, None)):
            if tensor.dtype != torch.int64 or tensor.ndim != 1 or not tensor.is_contiguous() or not tensor.is_cpu:
                raise KernelArgumentError(name, "must be int64 of one dimension, contiguous, on the CPU")
            if size is not None and tensor.shape[0] != size:
                raise KernelArgumentError(name, f"must be [{size}], is {tuple(tensor.shape)}")
        self._buffers.require_arguments(arguments, num_rows, sampled.shape[0])
