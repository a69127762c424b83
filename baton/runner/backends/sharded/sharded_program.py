"""A program of one rank: products and attention write this rank's columns of rows that all ranks share.

Behind each of them there is a barrier, and then all ranks read all columns. Between two writes of the same shared rows
there is at least one barrier for other rows, behind every read: each step of a layer waits for the one before, so no
rank can be ahead by more than one product. All other rows are the rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels import KernelArgumentError, Packed
from baton.runner.backends.cpu.kernels.adapters import StepAdapters
from baton.runner.backends.cpu.kernels.barrier import BarrierTag
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.call_structs import BarrierCall, Call, OperationKind
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.program import Program
from baton.runner.backends.ranks.host_ranks import HostRanks
from baton.runner.backends.sharded.sharded_weight import ShardedWeight


class ShardedProgram(Program):
    """Operations in the order in which every rank has recorded them; all ranks run the same steps.

    The argument that takes the result of a product is filled on the first rank alone, for which the others compute.
    """

    def __init__(self, dtype: torch.dtype, threads: int, ranks: HostRanks) -> None:
        super().__init__(dtype, threads, ranks.program_memory)
        self._ranks = ranks
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
        self._require_bias(bias, w.n)
        if isinstance(into, str):
            out = self._buffers.shared(into, w.n, x.sampled, self._dtype)
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

    def _attention_rows(self, into: str, width: int, sampled: bool) -> tuple[Rows, Rows]:
        shard = self._ranks.shard
        out = self._buffers.shared(into, width * shard.size, sampled, self._dtype)
        return out.columns(width * shard.rank, width * (shard.rank + 1)), out

    def _attended(self) -> None:
        self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        barrier = self._ranks.barrier
        tag = BarrierTag.OPERATION + len(self._recorded)
        self._record(OperationKind.BARRIER, None, Call(barrier=BarrierCall(barrier.address, barrier.num_ranks, tag)))
