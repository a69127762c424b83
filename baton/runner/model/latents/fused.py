"""Attention to latents with what rows go through before and behind it, in as few products as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.cpu.kernels.rows import GateFunction
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import rows_of
from baton.runner.model.attention import AttentionParameters, PagedAttention
from baton.runner.model.fused.attention import CalledAsAttention, joined_bias
from baton.runner.model.fused.rotation import Rotation
from baton.runner.model.fused.rows import AnyNorm
from baton.runner.model.latents.heads import ROWS_AT_A_TIME, LatentHeads
from baton.runner.model.stored.layers import weight_of


class Parts(NamedTuple):
    """The layers of an attention to latents besides those of its heads, with their names."""

    down: tuple[str, nn.Linear] | None
    """What makes the narrow rows of which queries are made; None: they are made of the model's rows."""
    down_norm: AnyNorm | None
    query: tuple[str, nn.Linear]
    latent: tuple[str, nn.Linear]
    """What makes latents, and behind them what is rotated."""
    latent_norm: AnyNorm
    out: tuple[str, nn.Linear]
    gate: tuple[str, nn.Linear] | None = None
    """What the gates of the heads' outputs are computed with: one number for each head, or for each of its columns."""

    @classmethod
    def of(cls, attention: Any) -> Parts | None:
        """None for an attention that has others."""

        def linear(name: str) -> tuple[str, nn.Linear] | None:
            part = getattr(attention, name, None)
            return (name, part) if isinstance(part, nn.Linear) else None

        down, norm = linear("q_a_proj"), getattr(attention, "q_a_layernorm", None)
        query, latent, out = (
            linear("q_proj" if down is None else "q_b_proj"),
            linear("kv_a_proj_with_mqa"),
            linear("o_proj"),
        )
        latent_norm = getattr(attention, "kv_a_layernorm", None)
        if query is None or latent is None or out is None or not isinstance(latent_norm, AnyNorm):
            return None
        if (norm is not None) != (down is not None) or not isinstance(norm, AnyNorm | None):
            return None
        return cls(down, norm, query, latent, latent_norm, out, linear("g_proj"))


class FusedLatentAttention(CalledAsAttention):
    """Latents, and the narrow rows of queries, in one product; then norms, rotation, attention, projection."""

    def __init__(
        self,
        operations: Operations,
        layer_idx: int,
        parts: Parts,
        heads: LatentHeads,
        how: AttentionParameters,
    ) -> None:
        """A new attention rotates nothing; its maker sets `rotation`, and what else is public."""
        super().__init__()
        self.layer_idx = layer_idx
        self.rotation = Rotation("none", "halves")
        self.latent_factor = 1.0
        """What latents are multiplied with behind their norm."""
        self.gate_activation: GateFunction = "sigmoid"
        """What the gates of the heads' outputs go through, if there are any."""
        self.kv_b_proj = heads
        self.own_heads = heads.own_heads
        self._operations = operations
        self._how = how
        self._shape = heads.shape
        self._norms = parts.down_norm, parts.latent_norm
        firsts = [parts.latent] if parts.down is None else [parts.down, parts.latent]
        self._width_of_queries = 0 if parts.down is None else parts.down[1].out_features
        weights = [weight_of(part) for _, part in firsts]
        modules = [(name, part.out_features) for name, part in firsts]
        self._down = AdaptableProduct(operations, operations.pack(*weights), weights[0].shape[1], modules)
        self._down_bias = joined_bias(weights, [part.bias for _, part in firsts])
        name, query = parts.query
        of_head, own = heads.shape.plain + heads.shape.rotated, self.own_heads.queries
        weight, rows = weight_of(query), range(own.start * of_head, own.stop * of_head)
        packed = operations.pack_own(rows_of(weight, rows.start, rows.stop))
        self._query = AdaptableProduct(operations, packed, weight.shape[1], [(name, weight.shape[0])], [rows])
        self._query_bias = None if query.bias is None else query.bias.detach()[rows.start : rows.stop].clone()
        self._gates: AdaptableProduct | None = None
        if parts.gate is not None:
            name, gate = parts.gate
            weight, of_head = weight_of(gate), gate.out_features // heads.shape.heads
            rows = range(own.start * of_head, own.stop * of_head)
            packed = operations.pack_own(rows_of(weight, rows.start, rows.stop))
            self._gates = AdaptableProduct(operations, packed, weight.shape[1], [(name, weight.shape[0])], [rows])
        name, out = parts.out
        self._out = AdaptableProduct.of_layer(operations, name, weight_of(out))
        self._out_bias = None if out.bias is None else out.bias.detach().clone()

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return [part for part in (self._down, self._query, self._gates, self._out) if part is not None]

    def scale_queries(self, factor: float) -> None:
        """Multiply the scores of all queries with a number that the model multiplies queries with."""
        self._how = replace(self._how, scale=self._how.scale * factor)

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sample_rows`, which may be empty, only these rows."""
        down = self._down.linear(x, self._down_bias)
        (down_norm, latent_norm), narrow, width = self._norms, self._width_of_queries, self._shape.latent
        latent = down.new_empty(down.shape[0], 1, self.key_width)
        rotated = latent[..., width : width + self._shape.rotated]
        normed = latent_norm.rows(down[:, narrow : narrow + width])
        latent[:, 0, :width] = normed if self.latent_factor == 1.0 else normed * self.latent_factor
        rotated[:, 0] = down[:, narrow + width :]
        self._rotate(rotated, cos, sin)
        self._complete(latent, x, cos, sin)
        given = x if down_norm is None else down_norm.rows(down[:, :narrow])
        if sample_rows is not None:
            x, given, cos, sin = (rows[sample_rows] for rows in (x, given, cos, sin))
            self._down.keep(sample_rows)
        selected = self._selected(latent, x, given, cos, sin, sample_rows)
        num_heads, query_width = len(self.own_heads.queries), self._shape.plain + self._shape.rotated
        query = self._query.linear(given, self._query_bias).view(given.shape[0], num_heads, query_width)
        self._rotate(query[..., self._shape.plain :], cos, sin)
        own = self.kv_b_proj.attend_own(
            self.baton_attend,
            self.layer_idx,
            query,
            latent,
            self._how,
            sampling=sample_rows is not None,
            selected=selected,
            are_stored=self._stores_before,
        )
        if own.shape[0] == 0:
            return x[:0]
        if self._gates is not None:
            rows = own.view(own.shape[0], -1)
            own = self._operations.multiply(rows, self._gates.linear(x), self.gate_activation).view(own.shape)
        return self._out.linear(self.kv_b_proj.gathered(own), self._out_bias)

    @property
    def key_width(self) -> int:
        """The numbers of a token in the cache."""
        return self._shape.latent + self._shape.rotated

    @property
    def _stores_before(self) -> bool:
        """Whether `_selected` stores latents in the cache."""
        return False

    def _complete(self, latent: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Write what else the cache has of rows x [T, K] behind their latents [T, 1, key_width]: here nothing."""

    def _selected(
        self,
        latent: torch.Tensor,
        x: torch.Tensor,
        narrow: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The keys to which rows x [T, K] attend, if they don't attend to all that they see; `narrow`: of what queries
        are made. `sample_rows`: which of a step's rows these are; None: all."""

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes the products of heads, for which programs have no adapters."""
        return any(product.is_adapted for product in self.kv_b_proj.products)

    @property
    def most_recorded_rows(self) -> int:
        """The most rows of a step that a program computes: it makes the queries of all heads before it attends."""
        return max(1, 4 * ROWS_AT_A_TIME // len(self.own_heads.queries))

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool, into: str
    ) -> Rows:
        """Append to a program what `rows` computes; with `sampling` only for the rows that sample."""
        shape, narrow, heads = self._shape, self._width_of_queries, len(self.own_heads.queries)
        down_norm, latent_norm = self._norms
        down = self._down.record(program, x, self._down_bias, into="narrow rows")
        normed = latent_norm.record(program, down.columns(narrow, narrow + shape.latent), into="normed latents")
        if self.latent_factor != 1.0:
            normed = program.scale(normed, self.latent_factor, into="scaled latents")
        latent = program.scratch("latents", self.key_width)
        program.copy_columns(normed, latent, width=shape.latent)
        behind = down.columns(narrow + shape.latent, down.width)
        program.copy_columns(behind, latent, width=shape.rotated, to=shape.latent)
        self._record_rotation(program, latent, shape.latent, 1, cos, sin)
        self._record_completion(program, latent, x, cos, sin)
        paged.record_storing(program, self.layer_idx, latent, latent.columns(0, shape.latent))
        given = x if down_norm is None else down_norm.record(program, down.columns(0, narrow), into="normed narrow")
        if sampling:
            given = program.take_sampled(given, into="sampled narrow rows")
            cos, sin = (program.take_sampled(rows, into=f"sampled {of}") for rows, of in ((cos, "cos"), (sin, "sin")))
        selected = self._record_selection(program, x, given, cos, sin, paged, sampling=sampling)
        query = self._query.record(program, given, self._query_bias, into="query")
        self._record_rotation(program, query, shape.plain, heads, cos, sin)
        key_dim = shape.latent + shape.rotated
        of_latents = program.scratch("queries of latents", heads * key_dim, sampled=query.sampled)
        program.linear_of_heads(query, self.kv_b_proj.of_queries, of_latents)
        program.copy_columns(query, of_latents, heads, first=shape.plain, width=shape.rotated, to=shape.latent)
        attended = paged.record_reading(
            *(program, self.layer_idx, of_latents, self._how),
            into="attended",
            key_dim=key_dim,
            selected=selected,
            gathers=False,
        )
        out = program.scratch("outputs of heads", heads * shape.value, sampled=query.sampled)
        program.linear_of_heads(attended, self.kv_b_proj.of_outputs, out)
        if self._gates is not None:
            gated = program.take_sampled(x, into="sampled rows of gates") if sampling else x
            gates = self._gates.record(program, gated, None, into="gates")
            out = program.multiply(out, gates, self.gate_activation, into="gated outputs")
        every = program.gathered(out, into="outputs of all heads")
        return self._out.record(program, every, self._out_bias, into=into)

    def _record_completion(self, program: Program, latent: Rows, x: Rows, cos: Rows, sin: Rows) -> None:
        """Append to a program what `_complete` does."""

    def _record_selection(
        self, program: Program, x: Rows, narrow: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool
    ) -> Rows | None:
        """Append to a program what `_selected` does. With `sampling` x has all rows, the others those that sample."""

    def _record_rotation(self, program: Program, x: Rows, first: int, heads: int, cos: Rows, sin: Rows) -> None:
        """Append the rotation of the columns from `first` on in each head of x."""
        if self.rotation.kind != "none" and cos.width:
            in_pairs = self.rotation.kind == "pairs"
            program.rotate(x, x.width // heads, cos, sin, first=first, in_pairs=in_pairs)
