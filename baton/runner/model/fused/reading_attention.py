"""Attention to keys and values that another layer has put into the cache, in the place of a transformers module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import rows_in
from baton.runner.model.attention import PagedAttention, of_own_heads
from baton.runner.model.fused.attention import CalledAsAttention, FusedAttention
from baton.runner.model.fused.rotation import Rotation
from baton.runner.model.fused.rows import AnyNorm
from baton.runner.model.stored.layers import weight_of


class ReadingAttention(CalledAsAttention):
    """Attention that computes queries alone, and attends to the keys and values of an earlier layer."""

    source: FusedAttention
    """The layer whose keys and values these are."""

    def __init__(
        self,
        operations: Operations,
        layer_idx: int,
        source: FusedAttention,
        query: tuple[str, nn.Linear],
        out: tuple[str, nn.Linear],
        heads: tuple[int, int, int],
        norm: AnyNorm | None,
        rotation: Rotation,
    ) -> None:
        """`heads`: H, KH and the width of a head. `norm`: of queries."""
        super().__init__()
        self.layer_idx = layer_idx
        self.rotation = rotation
        self._operations = operations
        # Not a part of this module, which nn.Module's own __setattr__ would make of it.
        object.__setattr__(self, "source", source)
        num_heads, num_kv_heads, self._head_dim = heads
        self.own_heads = operations.ranks.shard.heads(num_heads, num_kv_heads)
        self._norm = norm
        how = replace(source.how, scale=source.how.scale * rotation.query_factor)
        self._how = of_own_heads(how, self.own_heads)
        own, dim, weight = self.own_heads.queries, self._head_dim, weight_of(query[1])
        rows = [range(own.start * dim, own.stop * dim)]
        packed = operations.pack_own(*rows_in([weight], rows))
        self._query = AdaptableProduct(operations, packed, weight.shape[1], [(query[0], weight.shape[0])], rows)
        bias = query[1].bias
        self._query_bias = None if bias is None else bias.detach()[rows[0].start : rows[0].stop].clone()
        self._out = AdaptableProduct.of_layer(operations, out[0], weight_of(out[1]))
        self._out_bias = None if out[1].bias is None else out[1].bias.detach().clone()

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._query, self._out

    def rows(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]."""
        return self.read(x, cos, sin, sampling=False)

    def read(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sampling: bool) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sampling`, T are the rows that sample."""
        query = self._query.linear(x, self._query_bias).view(x.shape[0], -1, self._head_dim)
        if self.rotation.norms_last:
            self._rotate(query, cos, sin)
        if self._norm is not None:
            query = self._norm.rows(query)
        if not self.rotation.norms_last:
            self._rotate(query, cos, sin)
        source = self.source
        attended = self.baton_attend.attend(
            source.layer_idx, query, *source.shared, self._how, sampling=sampling, stores=False
        )
        own = attended.view(attended.shape[0], -1)
        ranks = self._operations.ranks
        return self._out.linear(ranks.gather(own, [own.shape[1]] * ranks.shard.size), self._out_bias)

    def record_reading(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, into: str
    ) -> Rows:
        """Append to a program what `read` computes."""
        query = self._query.record(program, x, self._query_bias, into="query of a reader")
        if self.rotation.norms_last:
            self._record_rotate(program, query, cos, sin)
        if self._norm is not None:
            query = self._norm.record(program, query, into="query")
        if not self.rotation.norms_last:
            self._record_rotate(program, query, cos, sin)
        attended = paged.record_reading(program, self.source.layer_idx, query, self._how, into="attended")
        return self._out.record(program, attended, self._out_bias, into=into)
