"""Attention on Baton's operations, in the place of a transformers module that computes the same (rows.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.cpu.kernels.rows import GateFunction
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import Weight, rows_in
from baton.runner.model.attention import (
    Attend,
    AttentionParameters,
    PagedAttention,
    heads_in,
    of_own_heads,
    require_no_mask,
)
from baton.runner.model.fused.low_rank import Term, TermedProducts
from baton.runner.model.fused.rotation import Angles, Rotation, cos_and_sin
from baton.runner.model.fused.rows import AnyNorm, FusedLayerNorm, FusedNorm
from baton.runner.model.stored.layers import weight_of

GATE_ACTIVATIONS: Sequence[GateFunction] = get_args(GateFunction)
"""What gates of attention's result may go through."""


class AttentionWeights(NamedTuple):
    """The weights of an attention layer, with the names of their modules."""

    projections: Mapping[str, nn.Linear]
    """The products for q, k and v by name, or one product for all three."""
    out: tuple[str, nn.Linear]
    gate: tuple[str, nn.Linear] | None = None
    """What the gate of the attention's result is computed with, if that is a layer of its own."""
    by_head: bool = False
    """Whether one product gives each head's query, key and value side by side, and not all queries first."""
    keys_are_values: bool = False
    """Whether the product of keys is that of values, too: they differ by norms and rotation."""
    terms: Mapping[str, Term] = {}
    """What is added to some of the products, by name; then there is one each for q, k and v."""

    def outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What the products for q, k and v give of rows [T, K], with their terms."""
        terms = {name: term.up(term.down(x)) for name, term in self.terms.items()}
        return [part(x) + terms[name] if name in terms else part(x) for name, part in self.projections.items()]


class HeadNorms(NamedTuple):
    """The norms of queries, keys and values, each as wide as a head or as all heads, and of what attention gives."""

    query: AnyNorm | None = None
    key: AnyNorm | None = None
    value: AnyNorm | None = None
    attended: AnyNorm | None = None
    """The norm of what all heads attended, before the last product; None: there is none."""


@dataclass(frozen=True, slots=True)
class OutputGate:
    """What attention's result is multiplied with before its last product: the activation of rows of gates."""

    activation: GateFunction
    in_queries: bool
    """Whether each head's gate follows its query in their module; otherwise gates have a product of their own, which
    gives one number for each head or for each of its columns."""


class CalledAsAttention(nn.Module, HasProducts, ABC):
    """An attention that transformers' layers call as their own."""

    baton_attend: Attend
    layer_idx: int
    rotation: Rotation
    _operations: Operations
    _head_dim: int

    @abstractmethod
    def rows(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]."""
        ...

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first R columns of x [T, H, D] in place."""
        if not self.rotation.takes_angles or cos.shape[1] == 0:
            return
        self._operations.rotate(x, cos, sin, in_pairs=self.rotation.kind == "pairs")

    def _record_rotate(self, program: Program, x: Rows, cos: Rows, sin: Rows) -> None:
        if not self.rotation.takes_angles or cos.width == 0:
            return
        program.rotate(x, self._head_dim, cos, sin, in_pairs=self.rotation.kind == "pairs")

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: object = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        require_no_mask(self, attention_mask)
        x = hidden_states[0].contiguous()
        if position_embeddings is None:  # a layer without rotation among others that have one
            cos = sin = x.new_empty(x.shape[0], 0)
        else:
            at = None if position_ids is None else position_ids[0]
            if at is None and self.rotation.query_scale is not None:  # the layer counts the tokens before its rows
                before = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
                at = before + torch.arange(x.shape[0], device=x.device)
            cos, sin = cos_and_sin(position_embeddings)
            cos, sin = self.rotation.arranged(cos[0], sin[0], at)
        return self.rows(x, cos, sin).unsqueeze(0), None


class FusedAttention(CalledAsAttention):
    """Attention that computes queries, keys and values in one product; then norms, rotation, attention, projection."""

    def __init__(
        self,
        operations: Operations,
        layer_idx: int,
        given: AttentionWeights,
        heads: tuple[int, int, int],
        norms: HeadNorms,
        how: AttentionParameters,
        rotation: Rotation,
        gate: OutputGate | None = None,
        shared_as: str | None = None,
    ) -> None:
        """`heads`: H, KH and the width of a head. `norms`: each as wide as one head, or as all of its heads; keys that
        are values have one, before the rotation.

        `shared_as`: under which name the model's other layers are given the keys and values; None: none are.
        """
        super().__init__()
        self.layer_idx = layer_idx
        self.rotation = rotation
        self._operations = operations
        num_heads, num_kv_heads, self._head_dim = heads
        self._value_dim = given.out[1].in_features // num_heads
        self.own_heads = operations.ranks.shard.heads(num_heads, num_kv_heads)
        """The heads that this rank computes."""
        self._heads, self._kv_heads = len(self.own_heads.queries), len(self.own_heads.kv)
        self._norms = HeadNorms(
            _of_heads(norms.query, self.own_heads.queries),
            _of_heads(norms.key, self.own_heads.kv),
            _of_heads(norms.value, self.own_heads.kv),
            norms.attended,
        )
        self._rotates_first = rotation.norms_last or norms.query is None or norms.key is None
        self._keys_are_values = given.keys_are_values
        assert not (self._keys_are_values and self._rotates_first), "keys would be rotated in place"
        self._shared_as = shared_as
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        self._gate = gate
        self._has_gates_in_queries = gate is not None and gate.in_queries
        scale = how.scale * rotation.query_factor * rotation.key_factor
        self._how = of_own_heads(replace(how, scale=scale), self.own_heads)
        self.how = how
        """The parameters of the whole layer."""
        own_rows = self._rows_by_head() if given.by_head else self._own_rows(num_heads, num_kv_heads)
        weights = {name: weight_of(part) for name, part in given.projections.items()}
        self._qkv: AdaptableProduct | TermedProducts
        if given.terms:
            self._qkv = _termed(operations, given, own_rows)
        else:
            self._qkv = AdaptableProduct(
                operations,
                operations.pack_own(*rows_in([*weights.values()], own_rows)),
                next(iter(weights.values())).shape[1],
                [(name, weight.shape[0]) for name, weight in weights.items()],
                own_rows,
            )
        bias = joined_bias([*weights.values()], [part.bias for part in given.projections.values()])
        self._qkv_bias = None if bias is None else torch.cat([bias[rows.start : rows.stop] for rows in own_rows])
        self._gates: AdaptableProduct | None = None
        if given.gate is not None:
            name, weight = given.gate[0], weight_of(given.gate[1])
            own, of_head = self.own_heads.queries, weight.shape[0] // num_heads
            rows = [range(own.start * of_head, own.stop * of_head)]
            packed = operations.pack_own(*rows_in([weight], rows))
            self._gates = AdaptableProduct(operations, packed, weight.shape[1], [(name, weight.shape[0])], rows)
        self._is_common = self._are_heads_common()
        self._out = AdaptableProduct.of_layer(operations, given.out[0], weight_of(given.out[1]))
        self._out_bias = None if given.out[1].bias is None else given.out[1].bias.detach().clone()

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        qkv = self._qkv.products if isinstance(self._qkv, TermedProducts) else (self._qkv,)
        return (*qkv, self._out) if self._gates is None else (*qkv, self._gates, self._out)

    def _own_rows(self, num_heads: int, num_kv_heads: int) -> list[range]:
        """Where the own queries, the gates among them, keys and values are among the stacked outputs."""
        own, dim = self.own_heads, self._head_dim
        keys = num_heads * dim * (2 if self._has_gates_in_queries else 1)
        queries = [range(own.queries.start * dim, own.queries.stop * dim)]
        if self._has_gates_in_queries:
            # One gate follows each query; here all gates follow all queries, as programs can take them.
            places = (2 * head + part for part in (0, 1) for head in own.queries)
            queries = [range(at * dim, (at + 1) * dim) for at in places]
        own_keys = range(keys + own.kv.start * dim, keys + own.kv.stop * dim)
        if self._keys_are_values:
            return [*queries, own_keys]
        values, dim = keys + num_kv_heads * dim, self._value_dim
        return [*queries, own_keys, range(values + own.kv.start * dim, values + own.kv.stop * dim)]

    def _rows_by_head(self) -> list[range]:
        """Where the own queries, keys and values are among outputs in which those of a head are side by side."""
        dim = self._head_dim
        places = (3 * head + part for part in range(3) for head in self.own_heads.queries)
        return [range(at * dim, (at + 1) * dim) for at in places]

    @property
    def _ends(self) -> tuple[int, int, int]:
        """Where queries, gates that follow them, and keys end among the columns of their product.

        Values are the columns behind; keys that are values have none behind them.
        """
        queries, keys = self._heads * self._head_dim, self._kv_heads * self._head_dim
        gates = 2 * queries if self._has_gates_in_queries else queries
        return queries, gates, gates + keys

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sample_rows`, which may be empty, only these rows."""
        operations, count, dim = self._operations, x.shape[0], self._head_dim
        queries, keys, values = self._ends
        qkv = self._qkv.linear(x, self._qkv_bias)
        if (bound := self.rotation.bound) is not None:
            qkv = qkv.clamp_(-bound, bound)
        query, gates = qkv[:, :queries].view(count, -1, dim), qkv[:, queries:keys]
        key = qkv[:, keys:values].view(count, -1, dim)
        value = key if self._keys_are_values else qkv[:, values:].view(count, -1, self._value_dim)
        if self._gates is not None:
            gates = self._gates.linear(x)
        attended_norm = self._norms.attended
        is_prepared = self._prepare_at_once(qkv, value, cos, sin)
        if not is_prepared:
            query, key, value = self._prepared(qkv, query, key, value, cos, sin)
        if sample_rows is not None:
            query, gates = query[sample_rows], gates[sample_rows]
            self._qkv.keep(sample_rows)
        attended = self.baton_attend.attend(
            self.layer_idx, query, key, value, self._how, sampling=sample_rows is not None, stores=not is_prepared
        )
        if attended.shape[0] == 0:
            return x[:0]
        own = attended.view(attended.shape[0], -1)
        if self._gate is not None:
            own = operations.multiply(own, gates, self._gate.activation)
        every = operations.ranks.gather(own, [own.shape[1]] * operations.ranks.shard.size)
        if attended_norm is not None:
            every = attended_norm.rows(every)
        return self._out.linear(every, self._out_bias)

    def _prepare_at_once(self, qkv: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Do what `_prepared` does, and store keys and values; False, and nothing is done, if operations can't."""
        paged = self.baton_attend
        if not self._is_common or not isinstance(paged, PagedAttention):
            return False
        norms = None
        if isinstance(self._norms.query, FusedNorm) and isinstance(self._norms.key, FusedNorm):
            norms = self._norms.query.of_head(qkv.dtype), self._norms.key.of_head(qkv.dtype)
        if not self.rotation.takes_angles:
            cos = sin = cos[:, :0]
        x = qkv[:, : self._ends[2]].view(qkv.shape[0], -1, self._head_dim)
        rows = HeadRows(x, value, self._heads, norms, self.rotation.kind == "pairs")
        return paged.prepare_heads(self.layer_idx, rows, cos, sin)

    def _are_heads_common(self) -> bool:
        """Whether queries and keys are as `HeadRows` describes, and nobody else needs keys and values."""
        query, key, value, _ = self._norms
        rotation = self.rotation
        if value is not None or rotation.value_factor != 1.0 or rotation.query_scale is not None:
            return False
        if self._keys_are_values or self._has_gates_in_queries or self._shared_as is not None:
            return False
        if query is None and key is None:
            return True
        own = [norm for norm in (query, key) if isinstance(norm, FusedNorm) and norm.width == self._head_dim]
        return len(own) == 2 and not rotation.norms_last and own[0].plus_one == own[1].plus_one

    def _prepared(
        self,
        qkv: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as attention takes them, from parts of qkv, which may be changed in place."""
        query_norm, key_norm, value_norm, _ = self._norms
        (query_cos, cos), (query_sin, sin) = self._angles_of_both(cos), self._angles_of_both(sin)
        if value_norm is not None:
            value = self._normed(value, value_norm, self.own_heads.kv)
        if self.rotation.value_factor != 1.0:
            value = value * self.rotation.value_factor
        if self._rotates_first and (self._has_gates_in_queries or query_cos is not cos):
            self._rotate(query, query_cos, query_sin)
            self._rotate(key, cos, sin)
        elif self._rotates_first:
            self._rotate(qkv[:, : self._ends[2]].view(qkv.shape[0], -1, self._head_dim), cos, sin)
        if query_norm is not None and key_norm is not None:
            query = self._normed(query, query_norm, self.own_heads.queries)
            key = self._normed(key, key_norm, self.own_heads.kv)
        if not self._rotates_first:
            self._rotate(query, query_cos, query_sin)
            self._rotate(key, cos, sin)
        if self._shared_as is not None:
            self._shared = key, value
        return query, key, value

    @property
    def shared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [T, KH, D] of this rank's heads in the latest call of `rows`, for layers that share them.

        Raises KeyError, as a model without them does.
        """
        if self._shared is None:
            raise KeyError(self._shared_as)
        return self._shared

    @contextmanager
    def sharing(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[None]:
        """Share other keys and values [T, KH, D] in the body."""
        kept, self._shared = self._shared, (key, value)
        try:
            yield
        finally:
            self._shared = kept

    @property
    def head_dim(self) -> int:
        """D."""
        return self._head_dim

    def forward(
        self,
        *arguments: Any,
        shared_kv_states: MutableMapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, None]:
        out = super().forward(*arguments, **named)
        # A rank has only its own heads, so that a layer there that isn't recognised fails for want of them.
        if shared_kv_states is not None and self._shared is not None and self._operations.ranks.shard.size == 1:
            key, value = (rows.transpose(0, 1)[None] for rows in self._shared)
            shared_kv_states[str(self._shared_as)] = key, value
        return out

    def _normed(self, x: torch.Tensor, norm: AnyNorm, own: range) -> torch.Tensor:
        """The norm of each head of x [T, H, D], or of all heads together. `own`: which heads these are."""
        if norm.width == x.shape[2]:
            return norm.rows(x)
        ranks, width = self._operations.ranks, len(own) * x.shape[2]
        rows = x.reshape(x.shape[0], width)
        if ranks.shard.size == 1:
            return norm.rows(rows).view(x.shape)
        every = ranks.gather(rows, [width] * ranks.shard.size)
        # Several ranks have the same heads of keys if there are fewer heads than ranks.
        alike = every.shape[1] // norm.width
        every = every.view(x.shape[0], -1, width)[:, ::alike].reshape(x.shape[0], -1)
        return heads_in(norm.rows(every).view(x.shape[0], -1, x.shape[2]), own)

    def _angles_of_both(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines or sines of queries and of keys."""
        if self.rotation.query_scale is None:
            return angles, angles
        of_keys, of_queries = angles.chunk(2, dim=1)
        return of_queries.contiguous(), of_keys.contiguous()

    def _recorded_angles_of_both(self, angles: Rows) -> tuple[Rows, Rows]:
        if self.rotation.query_scale is None:
            return angles, angles
        half = angles.width // 2
        return angles.columns(half, angles.width), angles.columns(0, half)

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool, into: str
    ) -> Rows:
        """Append to a program what `rows` computes; with `sampling` only for the rows that sample."""
        queries, keys, values = self._ends
        qkv = self._qkv.record(program, x, self._qkv_bias, into="qkv")
        if (bound := self.rotation.bound) is not None:
            qkv = program.clamp(qkv, bound, into="bounded qkv")
        query, gates = qkv.columns(0, queries), qkv.columns(queries, keys)
        key = qkv.columns(keys, values)
        value = key if self._keys_are_values else qkv.columns(values, qkv.width)
        if self._gates is not None:
            gates = self._gates.record(program, x, None, into="gates")
        query_norm, key_norm, value_norm, attended_norm = self._norms
        (query_cos, cos), (query_sin, sin) = self._recorded_angles_of_both(cos), self._recorded_angles_of_both(sin)
        if value_norm is not None:
            value = self._record_norm(program, value, value_norm, self.own_heads.kv, into="value")
        if (factor := self.rotation.value_factor) != 1.0:
            value = program.scale(value, factor, into="scaled value")
        if self._rotates_first and (self._has_gates_in_queries or query_cos is not cos):
            self._record_rotate(program, query, query_cos, query_sin)
            self._record_rotate(program, key, cos, sin)
        elif self._rotates_first:
            self._record_rotate(program, qkv.columns(0, values), cos, sin)
        if query_norm is not None and key_norm is not None:
            query = self._record_norm(program, query, query_norm, self.own_heads.queries, into="query")
            key = self._record_norm(program, key, key_norm, self.own_heads.kv, into="key")
        if not self._rotates_first:
            self._record_rotate(program, query, query_cos, query_sin)
            self._record_rotate(program, key, cos, sin)
        if sampling:
            query = program.take_sampled(query, into="sampled query")
        gathers = self._gate is None
        attended = paged.record(program, self.layer_idx, query, key, value, self._how, into="attended", gathers=gathers)
        if self._gate is not None:
            gates = program.take_sampled(gates, into="sampled gates") if sampling else gates
            attended = program.multiply(attended, gates, self._gate.activation, into="gated attended")
            attended = program.gathered(attended, into="attended")
        if attended_norm is not None:
            attended = attended_norm.record(program, attended, into="normed attended")
        return self._out.record(program, attended, self._out_bias, into=into)

    def _record_norm(self, program: Program, x: Rows, norm: AnyNorm, own: range, *, into: str) -> Rows:
        """Append to a program what `_normed` computes."""
        num_ranks = self._operations.ranks.shard.size
        if norm.width == self._head_dim or num_ranks == 1:
            return norm.record(program, x, into=into)
        if norm.width != x.width * num_ranks:
            raise KernelArgumentError("x", "has heads that other ranks have, too, and the norm is of all heads")
        every = norm.record(program, program.gathered(x, into=f"{into} of all heads"), into=into)
        return every.columns(own.start * self._head_dim, own.stop * self._head_dim)


def _termed(operations: Operations, given: AttentionWeights, own_rows: Sequence[range]) -> TermedProducts:
    """The products for q, k and v with their terms; `own_rows`: where a rank's are among all outputs."""
    ends = accumulate(part.out_features for part in given.projections.values())
    own = {
        name: range(rows.start - end + part.out_features, rows.stop - end + part.out_features)
        for (name, part), rows, end in zip(given.projections.items(), own_rows, ends, strict=True)
    }
    return TermedProducts(operations, given.projections, given.terms, own)


def _of_heads(norm: AnyNorm | None, own: range) -> AnyNorm | None:
    """A norm of the heads `own`, from one of all heads."""
    return norm.of_heads(own) if isinstance(norm, FusedLayerNorm) and norm.num_heads is not None else norm


def joined_bias(weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The bias of stacked weights, of which some may have none; None if all have none."""
    known = next((bias for bias in biases if bias is not None), None)
    if known is None:
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([known.new_zeros(w.shape[0]) if bias is None else bias.detach() for w, bias in pairs])
