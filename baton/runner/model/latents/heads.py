"""The products of heads that share one latent a token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The key of a head is K c and r side by side, and its value is V c: c is the token's latent [L], r its rotated part [R],
and K [N, L] and V [VD, L] are weights of the head. Only c and r are cached, as the single key of the token, whose first
L numbers are its value, too. The weights move to the other side: q (K c) = (q K) c, and a weighted sum of values V c is
V times the weighted sum of latents. So a query becomes q K and its own rotated part side by side, and V multiplies what
it has attended.

All tokens are computed like this. For those of a prompt, keys and values of all heads would take fewer operations, but
they are rounded otherwise: the bits of a token would depend on whether it was a prompt's (decision 73).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.attention import MAX_HEAD_DIM
from baton.runner.backends.low_rank import LowRank, Outputs, RowAdapters
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import Weight, read_weight, rows_of
from baton.runner.model.attention import Attend, AttentionParameters, heads_in
from baton.runner.model.comparison import NUM_ROWS, agree
from baton.runner.model.stored.layers import StoredLinear, weight_of

ROWS_AT_A_TIME = 8192
"""For how many rows of heads queries of latents are made at a time, unless these are fewer heads than _FEWEST_HEADS."""
_FEWEST_HEADS = 8
_MULTIPLE = 8
"""The widths of heads that the kernels attend to are multiples of this."""


class LatentShape(NamedTuple):
    """The widths of what heads make of latents."""

    heads: int
    plain: int
    """N: the part of a head's key that is made of the latent."""
    latent: int
    """L"""
    rotated: int
    """R: the part that all heads share."""
    value: int
    """VD"""


class _Adapted(NamedTuple):
    """What an adapter adds to the products of each head."""

    queries: Sequence[Any]
    outputs: Sequence[Any]


class LatentHeads(nn.Module, HasProducts):
    """The weights K and V of all heads, in the place of the linear layer that makes keys and values of latents."""

    def __init__(self, operations: Operations, weight: Weight, shape: LatentShape, dtype: torch.dtype) -> None:
        """`weight`: [H * (N + VD), L], of each head first K and then V; `dtype`: that of the rows."""
        super().__init__()
        self._operations = operations
        self.shape = shape
        self.own_heads = operations.ranks.shard.heads(shape.heads, 1)
        """The heads that this rank computes."""
        of_head, own = shape.plain + shape.value, self.own_heads.queries
        read = read_weight(rows_of(weight, own.start * of_head, own.stop * of_head))
        rows = read.detach() if isinstance(read, torch.Tensor) else read.dequantized(dtype)
        heads = rows.view(len(own), of_head, shape.latent)
        self.of_queries = operations.pack_heads([head[: shape.plain].T.contiguous() for head in heads])
        self.of_outputs = operations.pack_heads([head[shape.plain :] for head in heads])
        self._product = _LatentProduct(operations, shape, own, self.of_queries, self.of_outputs)

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return (self._product,)

    def attend(
        self,
        attend: Attend,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        how: AttentionParameters,
    ) -> torch.Tensor:
        """The outputs of all heads [T, H, VD], from queries of their keys [T, H, N + R] and latents as keys of one
        head, [T, 1, L + R]."""
        own = self.attend_own(attend, layer, heads_in(query, self.own_heads.queries), latent, how, sampling=False)
        return self.gathered(own).view(own.shape[0], self.shape.heads, self.shape.value)

    def attend_own(
        self,
        attend: Attend,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        how: AttentionParameters,
        *,
        sampling: bool,
        selected: torch.Tensor | None = None,
        are_stored: bool = False,
    ) -> torch.Tensor:
        """The outputs of this rank's heads [T, h, VD], from queries of their keys [T, h, N + R] and latents as keys.

        Some heads are computed at a time where their bits allow it: queries of latents are several times as wide as the
        model's rows, and memory that was used before is faster than new memory. `selected`:
        the keys that each row attends to; None: all that it sees. `are_stored`: whether the cache has the latents.
        """
        num_rows, num_heads = query.shape[:2]
        value = latent[..., : self.shape.latent]
        out = query.new_empty(num_rows, num_heads, self.shape.value)
        together = max(_FEWEST_HEADS, ROWS_AT_A_TIME // max(1, num_rows))
        if not self._operations.heads_are_independent:
            together = num_heads
        for first in range(0, num_heads, together):
            heads = slice(first, min(first + together, num_heads))
            of_latents = self._queries(query[:, heads], heads)
            stores = first == 0 and not are_stored
            attended = attend.attend(
                layer, of_latents, latent, value, how, sampling=sampling, stores=stores, selected=selected
            )
            self._multiply(attended, self.of_outputs, heads, out[:, heads], "outputs")
        return out

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads [T, H * VD], from those of this rank's [T, h, VD]."""
        ranks, width = self._operations.ranks, own.shape[1] * own.shape[2]
        return ranks.gather(own.view(own.shape[0], width), [width] * ranks.shard.size)

    def _queries(self, query: torch.Tensor, heads: slice) -> torch.Tensor:
        """Queries of latents [T, h, L + R] of some heads, from those of their keys [T, h, N + R]."""
        plain, latent = self.shape.plain, self.shape.latent
        of_latents = query.new_empty(*query.shape[:2], latent + self.shape.rotated)
        self._multiply(query[..., :plain], self.of_queries, heads, of_latents[..., :latent], "queries")
        of_latents[..., latent:] = query[..., plain:]
        return of_latents

    def _multiply(self, x: torch.Tensor, weights: Any, heads: slice, out: torch.Tensor, name: str) -> None:
        adapters = self._product.adapters_of(x)
        if adapters is None:
            self._operations.linear_of_heads(x, weights[heads], out)
            return
        for place, head in enumerate(range(heads.start, heads.stop)):
            own = [None if adapted is None else getattr(adapted, name)[head] for adapted in adapters.weights]
            out[:, place] = self._operations.linear(
                x[:, place].contiguous(), weights[head], adapters=RowAdapters(adapters.slots, own)
            )


class _LatentProduct(AdaptableProduct):
    """The product of which adapters know, by the name of the linear layer: its weight is that of all heads."""

    def __init__(
        self, operations: Operations, shape: LatentShape, heads: range, of_queries: Any, of_outputs: Any
    ) -> None:
        """`heads`: those of which this rank has weights."""
        num_outputs = shape.heads * (shape.plain + shape.value)
        super().__init__(operations, None, shape.latent, [("", num_outputs)])
        self.shape = shape
        self._heads = heads
        self._of_queries = of_queries
        self._of_outputs = of_outputs
        self.other_shapes = {(shape.latent, shape.plain), (shape.value, shape.latent)}

    def adapters_of(self, x: torch.Tensor) -> RowAdapters | None:
        """The adapters of rows [T, ...]; None if none changes this product."""
        return self._adapters(x)

    def adapt(self, terms: Sequence[LowRank], dtype: torch.dtype) -> _Adapted:
        """With an adapter K becomes K + f B A for its rows B of the head: so to q K is added f (q B) A.

        A bias of keys adds the same to all scores of a query, which changes nothing.
        """
        queries: list[Any] = []
        outputs: list[Any] = []
        plain, of_head = self.shape.plain, self.shape.plain + self.shape.value
        for head, of_query, of_output in zip(self._heads, self._of_queries, self._of_outputs, strict=True):
            places = range(head * of_head, (head + 1) * of_head)
            keys = [term.parts([(places.start, places.start + plain)]) for term in terms]
            turned = [_transposed(term) for term in keys if term is not None]
            values = [term.parts([(places.start + plain, places.stop)]) for term in terms]
            queries.append(self._operations.adapt(of_query, turned, dtype))
            outputs.append(self._operations.adapt(of_output, [term for term in values if term is not None], dtype))
        return _Adapted(queries, outputs)


def _transposed(term: LowRank) -> LowRank:
    """The term whose B A is that of this one transposed."""
    (own,) = term.outputs
    return LowRank(own.b.T.contiguous(), term.factor, (Outputs(0, term.a.T.contiguous()),))


def heads_of(attention: Any, operations: Operations, generator: torch.Generator) -> LatentHeads | None:
    """The heads of an attention, if these share latents; otherwise None.

    Transformers' modules make keys and values of latents in a method of their own, `expand_kv`. What it gives is
    compared, and an attention of which it is something else has no such heads.
    """
    layer = getattr(attention, "kv_b_proj", None)
    if not isinstance(layer, nn.Linear) or not callable(getattr(attention, "expand_kv", None)):
        return None
    dtype = layer.dtype if isinstance(layer, StoredLinear) else layer.weight.dtype
    shape = _shape_of(attention, layer, dtype, generator)
    return None if shape is None else LatentHeads(operations, weight_of(layer), shape, dtype)


def take_heads(
    attention: Any, operations: Operations, generator: torch.Generator, release: Callable[[nn.Module], None]
) -> LatentHeads | None:
    """Let an attention attend to latents, if its heads share any; `release` is called with the replaced layer."""
    heads = heads_of(attention, operations, generator)
    if heads is None:
        return None
    layer, attention.kv_b_proj = attention.kv_b_proj, heads
    release(layer)
    replaced = {"baton_latents": heads, "own_heads": heads.own_heads, "expand_kv": _latents_as_keys}
    for name, value in replaced.items():
        object.__setattr__(attention, name, value)
    return heads


def _latents_as_keys(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [1, 1, T, L] and what is rotated [1, 1, T, R] as the keys and values of one head."""
    keys = torch.cat((latent, rotated), dim=-1)
    return keys, keys[..., : latent.shape[-1]]


def _shape_of(attention: Any, layer: nn.Linear, dtype: torch.dtype, generator: torch.Generator) -> LatentShape | None:
    """The shape of an attention's heads, if it makes keys and values of latents with this layer; otherwise None."""
    latent, rotated = layer.in_features, getattr(attention, "qk_rope_head_dim", None)
    if layer.bias is not None or not isinstance(rotated, int):
        return None
    if latent % _MULTIPLE or rotated % _MULTIPLE or latent + rotated > MAX_HEAD_DIM:
        return None
    rows = torch.randn(1, 1, NUM_ROWS, latent + rotated, dtype=torch.float32, generator=generator).to(dtype)
    given = rows[..., :latent], rows[..., latent:]
    keys, values = (made[0] for made in attention.expand_kv(*given))
    heads, _, width = keys.shape
    shape = LatentShape(heads, width - rotated, latent, rotated, values.shape[-1])
    if layer.out_features != heads * (shape.plain + shape.value):
        return None
    made = layer(given[0][0, 0]).view(NUM_ROWS, heads, -1).transpose(0, 1)
    expected = torch.cat((made[..., : shape.plain], given[1][0].expand(heads, -1, -1)), dim=-1)
    is_same = agree(keys, expected) and agree(values, made[..., shape.plain :])
    return shape if is_same else None
