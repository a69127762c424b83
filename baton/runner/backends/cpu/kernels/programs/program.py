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
    require_key_dim,
    require_requests,
    require_selecting,
    row_dtypes,
    selection_structure,
    store_call,
)
from baton.runner.backends.cpu.kernels.barrier import GrowingMemory
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.call_structs import (
    OPERATION_NAMES,
    Call,
    MixtureCall,
    Operation,
    OperationKind,
    Step,
    StepGroup,
    TakeRowsCall,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.library import check_status, library
from baton.runner.backends.cpu.kernels.mixture import PackedChoice, PackedMixture, route_structure
from baton.runner.backends.cpu.kernels.programs.row_recording import RowRecording
from baton.runner.backends.cpu.kernels.states import (
    convolution_structure,
    recurrence_structure,
    require_filter,
    require_kept_lens,
    require_numbers,
    require_rates,
    require_recurred_rows,
    require_skip,
)
from baton.runner.backends.device import CPU
from baton.runner.backends.key_selection import num_words_of
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.routing import Routing
from baton.runner.backends.state_calls import StateView


class Program(RowRecording):
    """Recorded operations, those with a cache, states or experts among them. Run by one thread at a time.

    `run` raises KernelArgumentError for tensors of a step that don't fit, before anything is computed.
    """

    def __init__(self, dtype: torch.dtype, threads: int, shared_memory: GrowingMemory | None = None) -> None:
        """`shared_memory`: for rows that this process shares with others."""
        super().__init__(dtype, shared_memory)
        self.timing = False
        """Whether `run` measures how long the operations take, for `seconds`."""
        self.timed_until = 0.0
        """When the last timed run ended (perf_counter)."""
        self._threads = threads
        self._operations = (Operation * 0)()
        self._times: list[ctypes.Array[ctypes.c_int64]] = []
        self._selected: Rows | None = None
        """The latest selection of all rows."""
        self._adapters: ProgramAdapters | None = None
        """The adapters of the program, for the table in the latest step that had any."""

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

    def paged_attention(
        self,
        query: Rows,
        cache: CacheView,
        group: int,
        how: AttentionFeatures,
        *,
        into: str,
        key_dim: int | None = None,
        selected: Rows | None = None,
        gathers: bool = True,
    ) -> Rows:
        """Record attention over the cache, with the block tables of a group of layers.

        `key_dim`: how many numbers of a key give its scores; None: all. `selected`: what `select_keys` gave for these
        rows; None: they attend to all keys that they see. Without `gathers` the result is of a rank's own heads.
        """
        require_cache(cache)
        key_dim = cache.key_dim if key_dim is None else key_dim
        require_key_dim(cache, key_dim)
        heads = query.width // key_dim
        sinks = require_features(how, heads, cache)
        require_distance_bias(how, heads, CPU)
        if query.width != heads * key_dim:
            raise KernelArgumentError("query", f"of {query.width} columns has no heads of {key_dim}")
        if selected is not None:
            self._require_as_many(query, selected, "selected")
            require_selecting(how)
        width = heads * cache.value_dim
        if gathers:
            out, attended = self._attention_rows(into, width, query.sampled)
        else:
            out = attended = self._buffers.scratch(into, width, query.sampled)
        call = attention_structure(how, heads, cache, sinks, key_dim)
        call.query_stride, call.out_stride = query.stride, out.stride
        self._kept += [cache.memory, sinks, how.distance_bias]
        self._record(OperationKind.ATTENTION, query, Call(attention=call), out=out, operands=(selected,), group=group)
        if gathers:
            self._attended()
        return attended

    def select_keys(
        self, query: Rows, weights: Rows, cache: CacheView, group: int, *, first: int, scale: float, most: int
    ) -> Rows:
        """Record the selection of the keys to which each row attends (key_selection.py).

        `weights`: float32 rows, one number for each head of the query. `first`, `scale`, `most`: as in SelectionCall.
        A later selection takes the place of this one.
        """
        require_cache(cache)
        heads = weights.width
        if query.width % heads or query.stride != query.width or query.dtype != self._dtype:
            raise KernelArgumentError("query", f"must be whole rows of {heads} heads in {self._dtype}")
        if weights.dtype != torch.float32 or weights.stride != heads:
            raise KernelArgumentError("weights", "must be whole rows of float32")
        self._require_as_many(query, weights, "weights")
        call = selection_structure(cache, heads, query.width // heads, first, scale, most)
        out = self._buffers.selection(query.sampled)
        self._kept.append(cache.memory)
        self._record(OperationKind.SELECT, query, Call(selection=call), out=out, operands=(weights,), group=group)
        if not query.sampled:
            self._selected = out
        return out

    def latest_selection(self, *, sampling: bool) -> Rows:
        """What was selected for all rows at last, or with `sampling` the copy for those that sample.

        Raises KernelArgumentError if nothing was.
        """
        if self._selected is None:
            raise KernelArgumentError("selected", "takes the selection of a layer that is not here")
        if not sampling:
            return self._selected
        out = self._buffers.selection(sampled=True)
        # The step says how long the rows are.
        self._record(OperationKind.TAKE_ROWS, self._selected, Call(take=TakeRowsCall()), out=out)
        return out

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
        rates: torch.Tensor | None = None,
        into: str | Rows,
    ) -> Rows:
        """Record a recurrence, with the block tables of a group of layers; decay and beta are float32 rows.

        `rates`: see `RecurrenceCall`.
        """
        require_recurred_rows(query, key, value, decay, beta, state)
        require_numbers(scale, norm_eps)
        heads, key_dim, value_dim = state.shape
        require_skip(skip, heads)
        groups, has_delta_rule = query.width // key_dim, has_delta_rule and beta is not None
        require_rates(
            *(rates, state),
            groups=groups,
            has_norm=norm_eps is not None,
            has_delta_rule=has_delta_rule,
            decays=decay.width // heads,
        )
        out = self._out(into, heads * value_dim, sampled=False)
        call = recurrence_structure(state, groups, decay.width > heads, scale, norm_eps, skip, rates)
        call.has_delta_rule = has_delta_rule
        call.query_stride, call.key_stride, call.value_stride = query.stride, key.stride, value.stride
        call.out_stride, call.decay_stride = out.stride, decay.stride
        call.beta_stride = 0 if beta is None else beta.stride
        self._kept += [state.memory, skip, rates]
        operands = (key, value, decay, beta)
        self._record(OperationKind.RECUR, query, Call(recurrence=call), out=out, operands=operands, group=group)
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
        shared: Rows | torch.Tensor | None,
        gate: Rows | None,
        *,
        into: str | Rows,
    ) -> Rows:
        """Record the weighted sum of each row's experts, times the factor, plus shared rows times sigmoid(gate).

        `shared`: rows, or one row [1, K] for all.
        """
        row, rows = (shared, None) if isinstance(shared, torch.Tensor) else (None, shared)
        whole = [rows for rows in (x, rows, gate) if rows is not None]
        if x.width != mixture.k or any(rows.stride != rows.width for rows in whole):
            raise KernelArgumentError("x", f"must be whole rows of {mixture.k}")
        most, size = chosen.width, self._dtype.itemsize
        call = mixture.structure(self._dtype, factor, most)
        self._share(row, call)
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
        operands = (chosen, weights, rows, gate)
        self._record(OperationKind.MIXTURE, x, Call(mixture=call), out=out, operands=operands, room=room)
        return out

    def multiply_chosen(
        self,
        x: Rows,
        chosen: Rows,
        choice: PackedChoice,
        weights: Rows | None = None,
        shared: Rows | torch.Tensor | None = None,
        gate: Rows | None = None,
        *,
        factor: float = 1.0,
        rest: Rows | None = None,
        are_apart: bool | None = None,
        into: str | Rows,
    ) -> Rows:
        """Record the products of each row with the weights that it has chosen, side by side.

        With `weights` and without `are_apart` it is their sum, times the factor, plus shared rows times sigmoid(gate).
        x, `rest`: see `multiply_chosen` in mixture.py; shared rows and these may be columns of others.
        """
        if x.stride != x.width:
            raise KernelArgumentError("x", "must be whole rows")
        row, rows = (shared, None) if isinstance(shared, torch.Tensor) else (None, shared)
        most, size = chosen.width, self._dtype.itemsize
        are_apart = weights is None if are_apart is None else are_apart
        call = choice.structure(self._dtype, x.width, most, are_apart=are_apart, factor=factor)
        self._share(row, call)
        call.sum.shared_stride = call.sum.shared_stride if rows is None else rows.stride
        call.sum.rest_stride = 0 if rest is None else rest.stride
        gathered = -(-most * (choice.gathered_bytes or choice.k * size) // size)
        of_x = self._buffers.scratch("gathered rows", gathered, x.sampled)
        outs = self._buffers.scratch("rows of experts", most * choice.n, x.sampled)
        clamped = self._buffers.scratch("clamped rows", most * choice.clamped_width, x.sampled)
        out = self._out(into, choice.n * (most if are_apart else 1), x.sampled)
        self._kept.append(choice)
        operands, room = (chosen, weights, rows, gate), (of_x, rest, None, outs, clamped)
        self._record(OperationKind.MIXTURE, x, Call(mixture=call), out=out, operands=operands, room=room)
        return out

    def _share(self, row: torch.Tensor | None, call: MixtureCall) -> None:
        """Let a row [1, N] be added to the sum of each row's experts."""
        if row is None:
            return
        if row.shape != (1, call.sum.n) or row.dtype != self._dtype or not row.is_contiguous():
            raise KernelArgumentError("shared", f"must be [1, {call.sum.n}] {self._dtype}, contiguous")
        call.sum.shared, call.sum.shared_stride = row.data_ptr(), 0
        self._kept.append(row)

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
        words = num_words_of(layout.seq_lens) if self._buffers.has_selections else 0
        buffers = self._buffers.addresses(arguments, max(num_rows, num_sampled), words)
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
            selection_words=words,
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

    def gathered(self, own: Rows, *, into: str, parts: Sequence[range] | None = None) -> Rows:
        """Rows side by side of which each rank has these columns (None: as many as any other): here `own` alone."""
        return own

    def changeable(self, x: Rows, *, into: str) -> Rows:
        """Rows with the numbers of x that may be changed in place: x itself unless other ranks read it, too."""
        return x

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
