"""Attention whose queries and last product are those of experts that a router chooses, one set of heads for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.routing import Routing, SharedRows
from baton.runner.model.attention import AttentionParameters, PagedAttention
from baton.runner.model.comparison import KINDS, LAYOUTS, NUM_ROWS, agree, like_input, random_angles
from baton.runner.model.fused.attention import CalledAsAttention
from baton.runner.model.fused.rotation import Rotation
from baton.runner.model.mixtures.chosen import ChosenProduct
from baton.runner.model.mixtures.separate import DOWN, ROUTER, UP
from baton.runner.model.mixtures.stacked import stacked_weights
from baton.runner.model.probe_attention import EchoAttention
from baton.runner.model.stored.layers import weight_of

_KEYS_AND_VALUES = "kv_proj"


class _Parts(NamedTuple):
    """The parts of such an attention."""

    path: str
    """The name of the module that has the experts."""
    experts: Any
    router: nn.Linear
    """The product that gives its logits."""
    kv: nn.Linear
    """The product of keys, and then values."""


class ExpertAttention(CalledAsAttention):
    """Attention of which each row chooses experts: each has a product for queries and a last one.

    The query of each head of keys and of each chosen expert attends to this head; the last products' rows, times the
    experts' weights, are summed. The router keeps its name.
    """

    def __init__(
        self,
        operations: Operations,
        layer_idx: int,
        parts: _Parts,
        most: int,
        how: AttentionParameters,
        rotation: Rotation,
        num_given: int,
    ) -> None:
        """`most`: the number of experts of a row. `num_given`: how many things the replaced module gives, of which
        nobody reads any but the first."""
        super().__init__()
        experts = nn.Module()
        experts.add_module(ROUTER, parts.experts.router)
        for name in (UP, DOWN):
            experts.add_module(name, ChosenProduct(operations, parts.experts.get_submodule(name).weight))
        self.add_module(parts.path, experts)
        self.layer_idx = layer_idx
        self.rotation = rotation
        self._operations = operations
        self._path = parts.path
        self._num_heads = how.num_kv_heads
        self._head_dim = parts.kv.out_features // (2 * how.num_kv_heads)
        self._how = how
        self._num_given = num_given
        self._bias: torch.Tensor = parts.experts.bias.detach().clone()[None]
        self._routing = Routing(parts.router.out_features, most, "softmax_of_chosen", self._bias.dtype)
        self._kv = AdaptableProduct.of_layer(operations, _KEYS_AND_VALUES, weight_of(parts.kv))
        self._kv_bias = None if parts.kv.bias is None else parts.kv.bias.detach().clone()

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return (self._kv,)

    @property
    def _experts(self) -> Any:
        return self.get_submodule(self._path)

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sample_rows`, which may be empty, only these rows."""
        experts, heads, dim, count = self._experts, self._num_heads, self._head_dim, x.shape[0]
        chosen, weights = self._operations.route(experts.router.layer(x), self._routing)
        most = self._routing.most
        queries: torch.Tensor = experts.input_linear.rows(x, chosen)
        # The queries that attend to the same head are to be neighbours.
        query = queries.view(count, most, heads, dim).transpose(1, 2).reshape(count, heads * most, dim)
        key, value = self._kv.linear(x, self._kv_bias).view(count, 2 * heads, dim).chunk(2, dim=1)
        key = key.contiguous()
        self._rotate(query, cos, sin)
        self._rotate(key, cos, sin)
        if sample_rows is not None:
            query, chosen, weights = query[sample_rows], chosen[sample_rows], weights[sample_rows]
            self._kv.keep(sample_rows)
        attended = self.baton_attend.attend(
            self.layer_idx, query, key, value, self._how, sampling=sample_rows is not None
        )
        if attended.shape[0] == 0:
            return x[:0]
        by_expert = attended.reshape(-1, heads, most, dim).transpose(1, 2).flatten(1)
        out: torch.Tensor = experts.output_linear.rows(by_expert, chosen, weights, SharedRows(self._bias))
        return out

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool, into: str
    ) -> Rows:
        """Append to a program what `rows` computes; with `sampling` only for the rows that sample."""
        experts, heads, dim, most = self._experts, self._num_heads, self._head_dim, self._routing.most
        width = heads * dim
        logits = experts.router.layer.record(program, x, into="logits of experts")
        chosen, weights = program.route(logits, self._routing, into="routed")
        queries = experts.input_linear.record(program, x, chosen, into="queries of experts")
        query = program.scratch("query", most * width)
        for place in range(most):
            own = queries.columns(place * width, (place + 1) * width)
            program.copy_columns(own, query, heads, width=dim, to=place * dim)
        both = self._kv.record(program, x, self._kv_bias, into="keys and values")
        key, value = both.columns(0, width), both.columns(width, 2 * width)
        self._record_rotate(program, query, cos, sin)
        self._record_rotate(program, key, cos, sin)
        if sampling:
            query = program.take_sampled(query, into="sampled query")
            chosen = program.take_sampled(chosen, into="sampled chosen")
            weights = program.take_sampled(weights, into="sampled weights")
        attended = paged.record(program, self.layer_idx, query, key, value, self._how, into="attended")
        by_expert = program.scratch("attended by experts", most * width, sampled=sampling)
        for place in range(most):
            own = by_expert.columns(place * width, (place + 1) * width)
            program.copy_columns(attended, own, heads, first=place * dim, width=dim)
        out: Rows = experts.output_linear.record(program, by_expert, chosen, weights, self._bias, into=into)
        return out

    def forward(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        rows, _ = super().forward(*arguments, **named)
        return (rows, *[None] * (self._num_given - 1))


def expert_attention_of(child: Any, operations: Operations, widths: Sequence[int]) -> ExpertAttention | None:
    """The attention of experts that computes what a module computes; None if there is none.

    `widths`: the numbers of angles that a position may have.
    """
    if getattr(child, "layer_idx", None) is None or (parts := _parts_of(child)) is None:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, NUM_ROWS, parts.kv.in_features, dtype=torch.float32, generator=generator)
    x = like_input(parts.kv, rows)
    for width, layout in product(widths, LAYOUTS):
        angles = random_angles(width, layout, generator)
        given = angles.cos().to(x), angles.sin().to(x)
        theirs = EchoAttention()
        object.__setattr__(child, "baton_attend", theirs)
        try:
            out = child(hidden_states=x, attention_mask=None, position_embeddings=given)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue  # it takes angles of another width, or other arguments
        if theirs.how is None or len(theirs.seen) != 1:
            return None
        query, key, value = theirs.seen[0]
        heads = parts.kv.out_features // (2 * key.shape[2])
        most = query.shape[1] // heads
        if query.shape != key.shape or value.shape != key.shape or query.shape[1] != most * heads:
            return None
        how = replace(theirs.how, num_kv_heads=heads)
        for kind in KINDS:
            rotation = Rotation(kind, layout)
            fused = ExpertAttention(operations, child.layer_idx, parts, most, how, rotation, len(out))
            ours = EchoAttention()
            object.__setattr__(fused, "baton_attend", ours)
            result = fused.rows(x[0], *rotation.arranged(given[0][0], given[1][0]))
            of_heads = query.view(-1, most, heads, key.shape[2]).transpose(1, 2).reshape(query.shape)
            expected = (of_heads, key[:, :heads], value[:, :heads], out[0][0])
            if all(agree(*both) for both in zip(expected, (*ours.seen[0], result), strict=True)):
                return fused
    return None


def _parts_of(child: nn.Module) -> _Parts | None:
    """The parts of a module by their names; None if it has others."""
    named = dict(child.named_children())
    kv = named.pop(_KEYS_AND_VALUES, None)
    if not isinstance(kv, nn.Linear) or len(named) != 1:
        return None
    ((path, experts),) = named.items()
    inner = dict(experts.named_children())
    if set(inner) != {UP, DOWN, ROUTER} or getattr(experts, "bias", None) is None:
        return None
    if any(stacked_weights(inner[name], "weight") is None for name in (UP, DOWN)):
        return None
    router = getattr(inner[ROUTER], "layer", None)
    return _Parts(path, experts, router, kv) if isinstance(router, nn.Linear) else None
