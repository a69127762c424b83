"""The operations of one rank: it computes its own columns of every product, and its own heads of attention.

An output of a product is a sum over k in one fixed order, which no rank divides. So results have the bits that one
process computes, with any number of ranks. Norms, rotations and everything between products are computed on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels import KernelArgumentError, Packed
from baton.runner.backends.cpu.kernels.adapters import StepAdapters
from baton.runner.backends.cpu.kernels.barrier import BarrierTag
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.call_structs import BarrierCall, Call, OperationKind
from baton.runner.backends.cpu.kernels.mixture import PackedMixture, multiply_chosen
from baton.runner.backends.cpu.kernels.product import Activation, Ungated
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.low_rank import LowRank, RowAdapters, parts_of
from baton.runner.backends.ranks.host_ranks import HostRanks
from baton.runner.backends.routing import PLAIN_EXPERTS, ClampedGate, ExpertBiases, ExpertKind, SharedRows
from baton.runner.backends.sharded_mixture import Columns, OwnWeight, ShardedMixture
from baton.runner.backends.weight_rows import Weight, rows_in, rows_of
from baton.runner.parts import columns_of_ranks


@dataclass(frozen=True, slots=True)
class ShardedWeight:
    """A rank's columns of a weight [N, K]; a weight of few columns may leave a rank none."""

    own: Packed | None
    k: int
    columns: range
    """This rank's columns."""
    widths: tuple[int, ...]
    """How many columns each rank has."""

    def own_part(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What a bias [N] adds to this rank's columns."""
        return None if bias is None else bias[self.columns.start : self.columns.stop]

    @property
    def own_outputs(self) -> list[tuple[int, int]]:
        """This rank's columns, as ranges (first, stop) of stacked outputs: of a gated weight those of gate and up."""
        first, stop = self.columns.start, self.columns.stop
        is_gated = self.own is not None and self.own.gated
        return [(first, stop), (self.n + first, self.n + stop)] if is_gated else [(first, stop)]

    def as_columns(self) -> OwnWeight:
        """The weight as one of several alike."""
        return OwnWeight(self.own, Columns(self.columns, self.widths))

    @property
    def n(self) -> int:
        """N: the columns of all ranks."""
        return sum(self.widths)


class ShardedProgram(Program):
    """A program of one rank: products and attention write this rank's columns of rows that all ranks share.

    Behind each of them there is a barrier, and then all ranks read all columns. Between two writes of the same shared
    rows there is at least one barrier for other rows, behind every read: each step of a layer waits for the one before,
    so no rank can be ahead by more than one product. All other rows are the rank's own. All ranks record the same
    operations and run the same steps.

    The argument that takes the result of a product is filled on the first rank alone, for which the others compute.
    """

    def __init__(self, dtype: torch.dtype, threads: int, ranks: HostRanks) -> None:
        super().__init__(dtype, threads, ranks.program_memory)
        self._ranks = ranks
        self._num_barriers = 0
        self._results: list[tuple[Rows, Rows]] = []
        """Arguments, and the shared rows from which they are filled."""

    def linear(
        self,
        x: Rows,
        w: Packed | ShardedWeight,
        bias: torch.Tensor | None,
        *,
        into: str | Rows,
        product: int | None = None,
    ) -> Rows:
        """Record a product: all columns for a weight of `pack`, this rank's alone for one of `pack_own`."""
        if not isinstance(w, ShardedWeight):
            return super().linear(x, w, bias, into=into, product=product)
        self._require_bias(bias, w.n, x.dtype)
        if isinstance(into, str):
            out = self._buffers.shared(into, w.n, x.sampled, x.dtype)
        else:
            out = self._buffers.shared(f"argument {into.buffer}", w.n, x.sampled, into.dtype)
            self._results.append((into, out))
        if w.own is not None:
            self._multiply_all(x, w.own, w.own_part(bias), out.columns(w.columns.start, w.columns.stop), product)
        self._wait_for_ranks()
        return out

    def gated_linear(
        self,
        x: Rows,
        w: Packed | ShardedWeight,
        activation: Activation,
        *,
        into: str | Rows,
        product: int | None = None,
    ) -> Rows:
        """Record all columns of the gated product activation(x gateᵀ) * (x upᵀ)."""
        if not isinstance(w, ShardedWeight) or not isinstance(into, str):
            raise KernelArgumentError("w", "must be a weight of all ranks, and its product go into shared rows")
        out = self._buffers.shared(into, w.n, x.sampled, self._dtype)
        if w.own is not None:
            self._multiply_gated(x, w.own, activation, out.columns(w.columns.start, w.columns.stop), product)
        self._wait_for_ranks()
        return out

    def run(
        self,
        arguments: Sequence[torch.Tensor],
        layout: StepLayout,
        sampled: torch.Tensor,
        adapters: StepAdapters | None = None,
    ) -> None:
        super().run(arguments, layout, sampled, adapters)
        if self._ranks.shard.rank == 0:
            for argument, shared in self._results:
                tensor = arguments[argument.buffer]
                tensor.copy_(self._buffers.shared_rows(shared, tensor.shape[0]))

    def mix_experts(
        self,
        x: Rows,
        chosen: Rows,
        weights: Rows,
        mixture: PackedMixture | ShardedMixture,
        factor: float,
        shared: Rows | torch.Tensor | None,
        gate: Rows | None,
        *,
        into: str | Rows,
    ) -> Rows:
        """Record the sums of experts, of which each rank computes its own columns of each product."""
        if not isinstance(mixture, ShardedMixture) or not isinstance(into, str):
            raise KernelArgumentError("mixture", "must be one of all ranks, and its sums go into shared rows")
        most, inner, out = chosen.width, mixture.inner, mixture.out
        weighing = weights if mixture.kind.weighs_inputs else None
        own = self.multiply_chosen(x, chosen, mixture.up, weighing, are_apart=True, into="own inner rows")
        every = self._buffers.shared("inner rows", most * inner.total, x.sampled, self._dtype)
        self.copy_columns(own, every, most, width=len(inner.own), to=inner.own.start)
        self._wait_for_ranks()
        rest = x.columns(out.own.start, out.own.stop) if mixture.kind.passes_rest else None
        if isinstance(shared, Rows):
            shared = shared.columns(out.own.start, out.own.stop)
        elif shared is not None:
            shared = out.of(shared)
        own = self.multiply_chosen(
            *(every, chosen, mixture.down, weights, shared, gate), factor=factor, rest=rest, into="own sums"
        )
        sums = self._buffers.shared(into, out.total, x.sampled, self._dtype)
        self.copy_columns(own, sums, width=own.width, to=out.own.start)
        self._wait_for_ranks()
        return sums

    def _attention_rows(self, into: str, width: int, sampled: bool) -> tuple[Rows, Rows]:
        shard = self._ranks.shard
        out = self._buffers.shared(into, width * shard.size, sampled, self._dtype)
        return out.columns(width * shard.rank, width * (shard.rank + 1)), out

    def _attended(self) -> None:
        self._wait_for_ranks()

    def gathered(self, own: Rows, *, into: str, parts: Sequence[range] | None = None) -> Rows:
        shard = self._ranks.shard
        width, first = own.width * shard.size, own.width * shard.rank
        if parts is not None:
            width, first = parts[-1].stop, parts[shard.rank].start
        every = self._buffers.shared(into, width, own.sampled, self._dtype)
        if own.width:
            self.copy_columns(own, every, width=own.width, to=first)
        self._wait_for_ranks()
        return every

    def changeable(self, x: Rows, *, into: str) -> Rows:
        out = self._buffers.scratch(into, x.width, x.sampled, x.dtype)
        self.copy_columns(x, out, width=x.width)
        return out

    def _wait_for_ranks(self) -> None:
        barrier = self._ranks.barrier
        # Not the number of the operation: a rank without columns of a product records none for it.
        tag = BarrierTag.OPERATION + self._num_barriers
        self._num_barriers += 1
        self._record(OperationKind.BARRIER, None, Call(barrier=BarrierCall(barrier.address, barrier.num_ranks, tag)))


class ShardedOperations:
    """One rank's operations on the C kernels; all ranks call the same ones in the same order."""

    packs_quantized = True
    heads_are_independent = True

    def __init__(self, inner: CompiledOperations, ranks: HostRanks) -> None:
        self._inner = inner
        self.ranks = ranks
        self.pack_own = inner.pack
        self.pack_heads = inner.pack_heads
        self.linear_of_heads = inner.linear_of_heads
        self.rms_norm = inner.rms_norm
        self.add_rms_norm = inner.add_rms_norm
        self.layer_norm = inner.layer_norm
        self.gated_rms_norm = inner.gated_rms_norm
        self.gate = inner.gate
        self.multiply = inner.multiply
        self.route = inner.route
        self.sum_experts = inner.sum_experts
        self.clamped_gate = inner.clamped_gate
        self.activate = inner.activate
        self.mix_streams = inner.mix_streams
        self.correct_streams = inner.correct_streams
        self.mean_of_streams = inner.mean_of_streams
        self.row_means = inner.row_means
        self.resize = inner.resize
        self.sparse_gate = inner.sparse_gate
        self.prepare_heads = inner.prepare_heads
        self.rotate = inner.rotate
        self.store_kv = inner.store_kv
        self.paged_attention = inner.paged_attention
        self.select_keys = inner.select_keys
        self.convolve = inner.convolve
        self.recur = inner.recur

    def numerics(self) -> str:
        return self._inner.numerics()

    def program(self, dtype: torch.dtype) -> ShardedProgram:
        return ShardedProgram(dtype, self._inner.num_threads, self.ranks)

    def pack(self, *weights: Weight) -> ShardedWeight:
        """Pack this rank's columns of the stacked weights."""
        num_columns = sum(weight.shape[0] for weight in weights)
        own = rows_in(weights, [self.ranks.shard.columns(num_columns)])
        return self._sharded(num_columns, weights[0].shape[1], own, self._inner.pack)

    def pack_gated(self, gate: Weight, up: Weight) -> ShardedWeight:
        num_columns = gate.shape[0]
        columns = self.ranks.shard.columns(num_columns)
        own = [rows_of(weight, columns.start, columns.stop) for weight in (gate, up)] if columns else []
        return self._sharded(num_columns, gate.shape[1], own, self._inner.pack_gated)

    def pack_mixture(
        self,
        ups: Sequence[ShardedWeight],
        downs: Sequence[ShardedWeight],
        gate: Activation | ClampedGate | Ungated,
        biases: ExpertBiases | None = None,
        kind: ExpertKind = PLAIN_EXPERTS,
    ) -> ShardedMixture | None:
        of_up, of_down = ([weight.as_columns() for weight in weights] for weights in (ups, downs))
        try:
            return ShardedMixture.of(of_up, of_down, gate, biases, kind)
        except KernelArgumentError:
            return None

    def mix_experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        mixture: ShardedMixture,
        factor: float = 1.0,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        threads, most, inner, out = self._inner.num_threads, chosen.shape[1], mixture.inner, mixture.out
        weighing = weights if mixture.kind.weighs_inputs else None
        own = multiply_chosen(x, chosen, mixture.up, weighing, are_apart=True, threads=threads)
        every = mixture.joined(self.ranks.gather(own, [most * width for width in inner.widths]), most)
        shared = None if shared is None else SharedRows(out.of(shared.rows), shared.gate)
        rest = out.of(x) if mixture.kind.passes_rest else None
        own = multiply_chosen(every, chosen, mixture.down, weights, shared, factor, rest, threads=threads)
        return self.ranks.gather(own, out.widths)

    def pack_choice(self, *_: Any) -> None:
        """None: ranks exchange columns behind each product."""
        return

    def multiply_chosen(self, *_arguments: Any, **_named: Any) -> torch.Tensor:
        """Never called, since `pack_choice` gives nothing."""
        raise NotImplementedError("ranks compute experts one by one")

    def adapt(self, weight: Any, terms: Sequence[LowRank], dtype: torch.dtype) -> Any:
        """What an adapter adds to this rank's columns: of B these alone, and all of A, since all of x is multiplied.

        It is something on all ranks, also on one without columns: they must compute alike.
        """
        if not isinstance(weight, ShardedWeight):
            return self._inner.adapt(weight, terms, dtype)
        if weight.own is None:
            return ()
        return self._inner.adapt(weight.own, parts_of(terms, weight.own_outputs), dtype)

    def take_rows(self, weight: ShardedWeight, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The rows of all ranks. The dtype must be given, since a rank that has none of the rows can't know it."""
        places, own = self.held_rows(weight, index, dtype)
        return self.ranks.merge_rows(own, places, index.shape[0])

    def held_rows(
        self, weight: ShardedWeight, index: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype is None:
            raise TypeError("ranks can exchange rows only of a known dtype")
        first = weight.columns.start
        places = ((index >= first) & (index < weight.columns.stop)).nonzero().flatten()
        if weight.own is None:
            return places, torch.empty(0, weight.k, dtype=dtype)
        return places, self._inner.take_rows(weight.own, index[places] - first, dtype)

    def linear(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        """All columns of the product with a weight from `pack`; with one from `pack_own` those of this rank alone."""
        if not isinstance(weight, ShardedWeight):
            return self._inner.linear(x, weight, bias, out_dtype=out_dtype, adapters=adapters)
        if weight.own is None:
            own = x.new_empty(x.shape[0], 0, dtype=out_dtype)
        else:
            bias = weight.own_part(bias)
            own = self._inner.linear(x, weight.own, bias, out_dtype=out_dtype, adapters=adapters)
        return self.ranks.gather(own, weight.widths)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: ShardedWeight,
        *,
        activation: Activation,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        if weight.own is None:
            own = x.new_empty(x.shape[0], 0)
        else:
            own = self._inner.gated_linear(x, weight.own, activation=activation, adapters=adapters)
        return self.ranks.gather(own, weight.widths)

    def _sharded(self, num_columns: int, k: int, own: Sequence[Weight], pack: Callable[..., Packed]) -> ShardedWeight:
        columns = columns_of_ranks(num_columns, self.ranks.shard.size)
        return ShardedWeight(
            own=pack(*own) if own else None,
            k=k,
            columns=columns[self.ranks.shard.rank],
            widths=tuple(map(len, columns)),
        )
