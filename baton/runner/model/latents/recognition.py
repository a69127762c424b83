"""Finds the attention of a transformers model whose heads share latents, and replaces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from baton.runner.backends.operations import Operations
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.comparison import (
    KINDS,
    LAYOUTS,
    NUM_ROWS,
    agree,
    angle_dtypes_of,
    angle_widths,
    children_of,
    echoed,
    factors_of,
    like_input,
    random_angles,
)
from baton.runner.model.fused.attention import GATE_ACTIVATIONS
from baton.runner.model.fused.rotation import Rotation
from baton.runner.model.latents.fused import FusedLatentAttention, Parts
from baton.runner.model.latents.heads import LatentHeads, take_heads
from baton.runner.model.latents.indexer import Selections
from baton.runner.model.latents.sparse import selects_otherwise, sparse_attention_of
from baton.runner.model.probe_attention import EchoAttention
from baton.runner.model.stored.layers import forget_weights


def refuse_selections(module: nn.Module) -> None:
    """Raise UnsupportedAttention for a model that selects keys, since GPUs do not so far."""
    if any(isinstance(getattr(part, "indexer", None), nn.Module) for part in module.modules()):
        raise UnsupportedAttention("it selects the keys that rows attend to, which is computed on CPUs alone so far")


def attend_to_latents(module: nn.Module, operations: Operations, release: Callable[[nn.Module], None]) -> None:
    """Let every attention of a model whose heads share latents attend to these, and replace those that are recognised.

    `release` is called with every module that was replaced. Raises UnsupportedAttention for one that selects keys, and
    not as it is known.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        fused: FusedLatentAttention | None
        widths, dtypes, selections = angle_widths(module), angle_dtypes_of(module), Selections()
        for parent, name, child in children_of(module):
            fused = sparse_attention_of(child, operations, generator, widths, selections)
            if fused is None:
                if isinstance(getattr(child, "indexer", None), nn.Module):
                    raise selects_otherwise(child)
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
    parts = Parts.of(child)
    if parts is None:
        return None
    first = parts.latent[1]
    x = like_input(first, torch.randn(1, NUM_ROWS, first.in_features, dtype=torch.float32, generator=generator))
    fused: FusedLatentAttention | None = None
    for width, layout, is_complex in product(widths or [0], LAYOUTS, (False, True)):
        if is_complex and layout != "half":
            continue
        angles = random_angles(width, layout, generator)
        cos, sin = (part if is_complex else part.to(x.dtype) for part in (angles.cos(), angles.sin()))
        try:
            theirs, expected = echoed(child, x, torch.complex(cos, sin) if is_complex else (cos, sin))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue  # it takes angles of another width, or other arguments
        if theirs.how is None:
            return None
        fused = fused or FusedLatentAttention(operations, child.layer_idx, parts, heads, theirs.how)
        factors = factors_of(child)
        activations = GATE_ACTIVATIONS if parts.gate is not None else GATE_ACTIVATIONS[:1]
        for kind, of_queries, of_latents, activation in product(KINDS, factors, factors, activations):
            fused.rotation = Rotation(kind, layout)
            fused.latent_factor, fused.gate_activation = of_latents, activation
            arranged = fused.rotation.arranged(cos[0], sin[0])
            if kind != "none" and arranged[0].shape[1] != heads.shape.rotated:
                continue
            ours = EchoAttention(of_queries)
            object.__setattr__(fused, "baton_attend", ours)
            out = fused.rows(x[0], *arranged)
            if agree(expected[0], out) and all(
                agree(*pair) for pair in zip(_compared(theirs), _compared(ours), strict=True)
            ):
                fused.scale_queries(of_queries)
                return fused
    return None


def _compared(echo: EchoAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of all queries and keys, and the values: numbers of keys may come in any order."""
    # Some heads are computed at a time.
    query = torch.cat([rows for rows, *_ in echo.seen], dim=1)
    _, key, value = echo.seen[0]
    return torch.einsum("qhd,kd->hqk", query.float(), key[:, 0].float()).to(query.dtype), value
