"""Norms, MLPs and attention on Baton's operations, each in the place of a transformers module that computes the same.

`forward` takes and returns what the replaced module does, so transformers' own loop can run them. `rows` computes the
same without the leading dimension of one, for Baton's loop (decoder.py), and `record` appends it to a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.program import Program
from baton.runner.backends.operations import Activation, Operations
from baton.runner.backends.weight_rows import Weight, rows_in
from baton.runner.model.attention import (
    Attend,
    AttentionParameters,
    PagedAttention,
    of_own_heads,
    require_no_mask,
)


@runtime_checkable
class Mixer(Protocol):
    """What stands in a layer where most models have attention: its rows depend on those of other tokens.

    A module; Baton's loop over the layers takes any that has these, under whatever name a layer has it.
    """

    layer_idx: int

    @property
    def products(self) -> Sequence[AdaptableProduct]: ...

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sample_rows`, which may be empty, only these rows.

        cos and sin are those that transformers' loop gives this part, or any others if it gives it none.
        """
        ...

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool, into: str
    ) -> Rows:
        """Append to a program what `rows` computes; with `sampling` only for the rows that sample.

        Raises KernelArgumentError for what programs have no operation for.
        """
        ...


class FusedNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, operations: Operations, weight: torch.Tensor, eps: float, plus_one: bool) -> None:
        super().__init__()
        self.rms_weight = weight.detach().clone()
        self.eps = eps
        self.plus_one = plus_one
        self._compute = operations.rms_norm
        self._add_compute = operations.add_rms_norm

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [..., N]."""
        return self._compute(x, self.rms_weight, self.eps, plus_one=self.plus_one)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum x + residual, and the norm of that sum."""
        return self._add_compute(x, residual, self.rms_weight, self.eps, plus_one=self.plus_one)

    def record(self, program: Program, x: Rows, *, into: str | Rows) -> Rows:
        return program.rms_norm(x, self.rms_weight, self.eps, plus_one=self.plus_one, into=into)

    def record_add(self, program: Program, x: Rows, residual: Rows, *, into: str | Rows) -> Rows:
        """Append the norm of x + residual to a program; the sum replaces the residual in its buffer."""
        return program.add_rms_norm(x, residual, self.rms_weight, self.eps, plus_one=self.plus_one, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x)


class FusedMlp(nn.Module, HasProducts):
    """A gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        operations: Operations,
        gate: Weight,
        up: Weight,
        down: Weight,
        down_bias: torch.Tensor | None,
        activation: Activation,
        gate_and_up_in_one: bool = False,
    ) -> None:
        """`gate_and_up_in_one`: the replaced module computes both in one module, gate_up_proj."""
        super().__init__()
        self._activation = activation
        n, k = gate.shape
        modules = [("gate_up_proj", 2 * n)] if gate_and_up_in_one else [("gate_proj", n), ("up_proj", n)]
        self._gated = AdaptableProduct(operations, operations.pack_gated(gate, up), k, modules)
        self._down = AdaptableProduct(operations, operations.pack(down), n, [("down_proj", down.shape[0])])
        self._bias = None if down_bias is None else down_bias.detach().clone()

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._gated, self._down

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] to [T, K]."""
        return self._down.linear(self._gated.gated_linear(x, self._activation), self._bias)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        inner = self._gated.record_gated(program, x, self._activation, into="inner")
        return self._down.record(program, inner, self._bias, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


class FusedAttention(nn.Module, HasProducts):
    """Attention that computes queries, keys and values in one product; then norms, rotation, attention, projection."""

    baton_attend: Attend

    def __init__(
        self,
        operations: Operations,
        layer_idx: int,
        weights: tuple[Weight, ...],
        biases: tuple[torch.Tensor | None, ...],
        out: tuple[Weight, torch.Tensor | None],
        heads: tuple[int, int, int],
        norms: tuple[FusedNorm | None, FusedNorm | None],
        how: AttentionParameters,
        half_angles: bool,
    ) -> None:
        """`weights` and `biases`: of q, k and v, or of all three in one; `heads`: H, KH and the width of a head.

        `half_angles`: the model computes cosines and sines for one half of the columns, and uses them for both.
        """
        super().__init__()
        self.layer_idx = layer_idx
        self.half_angles = half_angles
        self._operations = operations
        num_heads, num_kv_heads, self._head_dim = heads
        self.own_heads = operations.ranks.shard.heads(num_heads, num_kv_heads)
        """The heads that this rank computes."""
        self._heads, self._kv_heads = len(self.own_heads.queries), len(self.own_heads.kv)
        self._norms = norms
        self._how = of_own_heads(how, self.own_heads)
        own_rows = self._own_rows(num_heads, num_kv_heads)
        names = ("q_proj", "k_proj", "v_proj") if len(weights) > 1 else ("qkv_proj",)
        self._qkv = AdaptableProduct(
            operations,
            operations.pack_own(*rows_in(weights, own_rows)),
            weights[0].shape[1],
            [(name, weight.shape[0]) for name, weight in zip(names, weights, strict=True)],
        )
        bias = _joined_bias(weights, biases)
        self._qkv_bias = None if bias is None else torch.cat([bias[rows.start : rows.stop] for rows in own_rows])
        self._out = AdaptableProduct(
            operations, operations.pack(out[0]), out[0].shape[1], [("o_proj", out[0].shape[0])]
        )
        self._out_bias = None if out[1] is None else out[1].detach().clone()

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._qkv, self._out

    def _own_rows(self, num_heads: int, num_kv_heads: int) -> list[range]:
        """Where the own queries, keys and values are among the outputs of the stacked weights."""
        own, dim = self.own_heads, self._head_dim
        parts = ((0, own.queries), (num_heads, own.kv), (num_heads + num_kv_heads, own.kv))
        return [range((before + heads.start) * dim, (before + heads.stop) * dim) for before, heads in parts]

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sample_rows`, which may be empty, only these rows."""
        operations, heads, both = self._operations, self._heads, self._heads + self._kv_heads
        qkv = self._qkv.linear(x, self._qkv_bias).view(x.shape[0], -1, self._head_dim)
        query, key, value = qkv[:, :heads], qkv[:, heads:both], qkv[:, both:]
        query_norm, key_norm = self._norms
        if query_norm is None or key_norm is None:
            operations.rotate(qkv[:, :both], cos, sin)
        else:
            query, key = query_norm(query), key_norm(key)
            operations.rotate(query, cos, sin)
            operations.rotate(key, cos, sin)
        if sample_rows is not None:
            query = query[sample_rows]
            self._qkv.keep(sample_rows)
        attended = self.baton_attend.attend(
            self.layer_idx, query, key, value, self._how, sampling=sample_rows is not None
        )
        if attended.shape[0] == 0:
            return x[:0]
        own = attended.view(attended.shape[0], -1)
        every = operations.ranks.gather(own, [own.shape[1]] * operations.ranks.shard.size)
        return self._out.linear(every, self._out_bias)

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool, into: str
    ) -> Rows:
        """Append to a program what `rows` computes; with `sampling` only for the rows that sample."""
        dim, queries, both = (
            self._head_dim,
            self._heads * self._head_dim,
            (self._heads + self._kv_heads) * self._head_dim,
        )
        qkv = self._qkv.record(program, x, self._qkv_bias, into="qkv")
        query, key, value = qkv.columns(0, queries), qkv.columns(queries, both), qkv.columns(both, qkv.width)
        query_norm, key_norm = self._norms
        if query_norm is None or key_norm is None:
            program.rotate(qkv.columns(0, both), dim, cos, sin)
        else:
            query = query_norm.record(program, query, into="query")
            key = key_norm.record(program, key, into="key")
            program.rotate(query, dim, cos, sin)
            program.rotate(key, dim, cos, sin)
        if sampling:
            query = program.take_sampled(query, into="sampled query")
        attended = paged.record(program, self.layer_idx, query, key, value, self._how, into="attended")
        return self._out.record(program, attended, self._out_bias, into=into)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: object = None,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        require_no_mask(self, attention_mask)
        cos, sin = (whole_angles(angles[0], self.half_angles) for angles in position_embeddings)
        out = self.rows(hidden_states[0].contiguous(), cos, sin)
        return out.unsqueeze(0), None


def whole_angles(angles: torch.Tensor, half: bool) -> torch.Tensor:
    """Cosines or sines [T, R] for every column, from those of one half where `half` is set."""
    return torch.cat((angles, angles), dim=-1) if half else angles.contiguous()


def _joined_bias(weights: tuple[Weight, ...], biases: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    known = next((bias for bias in biases if bias is not None), None)
    if known is None:
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([known.new_zeros(w.shape[0]) if bias is None else bias.detach() for w, bias in pairs])
