"""Attention to latents with what rows go through before and behind it, in as few products as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.weight_rows import rows_of
from baton.runner.model.attention import AttentionParameters, EchoAttention, PagedAttention
from baton.runner.model.fused_layers import AnyNorm, CalledAsAttention, Rotation, joined_bias
from baton.runner.model.latents.heads import LatentHeads, take_heads
from baton.runner.model.recognition import (
    KINDS,
    LAYOUTS,
    NUM_ROWS,
    agree,
    angle_dtypes_of,
    angle_widths,
    children_of,
    echoed,
    like_input,
    random_angles,
)
from baton.runner.model.stored.layers import forget_weights, weight_of


class _Parts(NamedTuple):
    """The layers of an attention to latents besides those of its heads, with their names."""

    down: tuple[str, nn.Linear] | None
    """What makes the narrow rows of which queries are made; None: they are made of the model's rows."""
    down_norm: AnyNorm | None
    query: tuple[str, nn.Linear]
    latent: tuple[str, nn.Linear]
    """What makes latents, and behind them what is rotated."""
    latent_norm: AnyNorm
    out: tuple[str, nn.Linear]

    @classmethod
    def of(cls, attention: Any) -> _Parts | None:
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
        return cls(down, norm, query, latent, latent_norm, out)


class FusedLatentAttention(CalledAsAttention, HasProducts):
    """Latents, and the narrow rows of queries, in one product; then norms, rotation, attention, projection."""

    def __init__(
        self,
        operations: Operations,
        layer_idx: int,
        parts: _Parts,
        heads: LatentHeads,
        how: AttentionParameters,
    ) -> None:
        """It rotates nothing until it is told otherwise."""
        super().__init__()
        self.layer_idx = layer_idx
        self.rotation = Rotation("none", "halves")
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
        weight, rows = weight_of(query), slice(own.start * of_head, own.stop * of_head)
        packed = operations.pack_own(rows_of(weight, rows.start, rows.stop))
        self._query = AdaptableProduct(operations, packed, weight.shape[1], [(name, weight.shape[0])])
        self._query_bias = None if query.bias is None else query.bias.detach()[rows].clone()
        name, out = parts.out
        self._out = AdaptableProduct(
            operations, operations.pack(weight_of(out)), out.in_features, [(name, out.out_features)]
        )
        self._out_bias = None if out.bias is None else out.bias.detach().clone()

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._down, self._query, self._out

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], cos and sin [T, R] to [T, K]; with `sample_rows`, which may be empty, only these rows."""
        down = self._down.linear(x, self._down_bias)
        (down_norm, latent_norm), narrow, width = self._norms, self._width_of_queries, self._shape.latent
        latent = down.new_empty(down.shape[0], 1, width + self._shape.rotated)
        latent[:, 0, :width] = latent_norm.rows(down[:, narrow : narrow + width])
        latent[:, 0, width:] = down[:, narrow + width :]
        self._rotate(latent[..., width:], cos, sin)
        given = x if down_norm is None else down_norm.rows(down[:, :narrow])
        if sample_rows is not None:
            given, cos, sin = given[sample_rows], cos[sample_rows], sin[sample_rows]
            self._down.keep(sample_rows)
        query = self._queries(given)
        self._rotate(query[..., self._shape.plain :], cos, sin)
        own = self.kv_b_proj.attend_own(
            self.baton_attend, self.layer_idx, query, latent, self._how, sampling=sample_rows is not None
        )
        if own.shape[0] == 0:
            return x[:0]
        return self._out.linear(self.kv_b_proj.gathered(own), self._out_bias)

    def _queries(self, given: torch.Tensor) -> torch.Tensor:
        """Queries [T, h, N + R] of this rank's heads."""
        num_heads, width = len(self.own_heads.queries), self._shape.plain + self._shape.rotated
        if given.shape[0] == 0:
            return given.new_empty(0, num_heads, width)
        return self._query.linear(given, self._query_bias).view(given.shape[0], num_heads, width)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if self.rotation.kind != "none" and cos.shape[1] > 0:
            self._operations.rotate(x, cos, sin, in_pairs=self.rotation.kind == "pairs")

    def record(
        self, program: Program, x: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool, into: str
    ) -> Rows:
        """Raises KernelArgumentError: programs have no operation for the products of heads."""
        raise KernelArgumentError("x", "attends to latents, for which programs have no operations")


def attend_to_latents(module: nn.Module, operations: Operations, release: Callable[[nn.Module], None]) -> None:
    """Let every attention of a model whose heads share latents attend to these, and replace those that are recognised.

    `release` is called with every module that was replaced.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        widths, dtypes = angle_widths(module), angle_dtypes_of(module)
        for parent, name, child in children_of(module):
            heads = take_heads(child, operations, generator, release)
            if heads is None:
                continue
            fused = _fused(child, heads, operations, generator, widths) if len(dtypes) < 2 else None
            forget_weights(child)
            if fused is not None:
                setattr(parent, name, fused)
                release(child)


def _fused(
    child: Any, heads: LatentHeads, operations: Operations, generator: torch.Generator, widths: Sequence[int]
) -> FusedLatentAttention | None:
    """What computes the same as an attention to latents; None for one that does more or something else."""
    parts = _Parts.of(child)
    if parts is None:
        return None
    first = parts.latent[1]
    x = like_input(first, torch.randn(1, NUM_ROWS, first.in_features, dtype=torch.float32, generator=generator))
    fused: FusedLatentAttention | None = None
    for width, layout in product(widths or [0], LAYOUTS):
        angles = random_angles(width, layout, generator)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        try:
            theirs, expected = echoed(child, x, cos, sin)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue  # it takes angles of another width, or other arguments
        if theirs.how is None or len(theirs.seen) > 1:
            return None
        fused = fused or FusedLatentAttention(operations, child.layer_idx, parts, heads, theirs.how)
        for kind in KINDS:
            fused.rotation = Rotation(kind, layout)
            arranged = [fused.rotation.arranged(part[0]) for part in (cos, sin)]
            if kind != "none" and arranged[0].shape[1] != heads.shape.rotated:
                continue
            ours = EchoAttention()
            object.__setattr__(fused, "baton_attend", ours)
            out = fused.rows(x[0], *arranged)
            if agree(expected[0], out) and all(
                agree(*pair) for pair in zip(_compared(theirs), _compared(ours), strict=True)
            ):
                return fused
    return None


def _compared(echo: EchoAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of all queries and keys, and the values: numbers of keys may come in any order."""
    query, key, value = echo.seen[0]
    return torch.einsum("qhd,kd->hqk", query.float(), key[:, 0].float()).to(query.dtype), value
