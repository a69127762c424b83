"""The operations of one rank: it computes its own columns of every product, and its own heads of attention.

An output of a product is a sum over k in one fixed order, which no rank divides. So results have the bits that one
process computes, with any number of ranks. Norms, rotations and everything between products are computed on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from baton.runner.backends.cpu.kernels import Packed
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.low_rank import LowRank, RowAdapters
from baton.runner.backends.operations import Activation
from baton.runner.backends.ranks.host_ranks import HostRanks
from baton.runner.backends.ranks.shard import columns_of_ranks
from baton.runner.backends.sharded.sharded_program import ShardedProgram
from baton.runner.backends.sharded.sharded_weight import ShardedWeight
from baton.runner.backends.weight_rows import Weight, rows_in, rows_of


class ShardedOperations:
    """One rank's operations on the C kernels; all ranks call the same ones in the same order."""

    packs_quantized = True

    def __init__(self, inner: CompiledOperations, ranks: HostRanks) -> None:
        self._inner = inner
        self.ranks = ranks
        self.pack_own = inner.pack
        self.rms_norm = inner.rms_norm
        self.add_rms_norm = inner.add_rms_norm
        self.rotate = inner.rotate
        self.store_kv = inner.store_kv
        self.paged_attention = inner.paged_attention

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

    def adapt(self, weight: Any, terms: Sequence[LowRank], dtype: torch.dtype) -> Any:
        """Never called: models in several ranks refuse adapters (`TorchModelRunner.load_adapter`)."""
        raise NotImplementedError("a model in several ranks computes no adapters")

    def take_rows(self, weight: ShardedWeight, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The rows of all ranks. The dtype must be given, since a rank that has none of the rows can't know it."""
        if dtype is None:
            raise TypeError("ranks can exchange rows only of a known dtype")
        first = weight.columns.start
        places = ((index >= first) & (index < weight.columns.stop)).nonzero().flatten()
        if weight.own is None:
            own = torch.empty(0, weight.k, dtype=dtype)
        else:
            own = self._inner.take_rows(weight.own, index[places] - first, dtype)
        return self.ranks.merge_rows(own, places, index.shape[0])

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
