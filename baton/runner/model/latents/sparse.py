"""Attention to some of the latents that a row sees: those that an indexer selects (DeepSeek-V3.2, GLM-5).

Transformers' modules make a mask of the selection, which Baton has not. So a module is replaced as a whole, if both
compute the same of random rows over a small cache, or else not served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from baton.engine.runner import KVLayout, LayerGeometry
from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.key_selection import words_of
from baton.runner.backends.operations import Operations
from baton.runner.model.attention import AttendOrSelect, AttentionParameters, PagedAttention, UnsupportedAttention
from baton.runner.model.comparison import KINDS, LAYOUTS, agree, like_input, random_angles
from baton.runner.model.fused.rotation import AngleLayout, Rotation
from baton.runner.model.latents.fused import FusedLatentAttention, Parts
from baton.runner.model.latents.heads import LatentHeads, heads_of
from baton.runner.model.latents.indexer import Indexer, Selections
from baton.runner.model.stored.layers import StoredLinear

_ROWS = 32
"""A comparison has so many rows."""
_MOST = 4
"""Each row of a comparison attends to so many keys at most."""
_ENOUGH = 0.75
"""The share of rows that must agree: where two keys have nearly the same score, rounding decides which is selected."""


class SparseLatentAttention(FusedLatentAttention):
    """Attention to latents that selects keys, or takes those that the layer before it has selected."""

    baton_attend: AttendOrSelect

    def __init__(
        self,
        operations: Operations,
        layer_idx: int,
        parts: Parts,
        heads: LatentHeads,
        how: AttentionParameters,
        indexer: Indexer | None,
        selections: Selections,
    ) -> None:
        super().__init__(operations, layer_idx, parts, heads, how)
        self.indexer = indexer
        self.selections = selections
        self.num_outputs = 2
        """How many values transformers' module returns."""

    @property
    def key_width(self) -> int:
        """The numbers of a token in the cache."""
        return super().key_width + (0 if self.indexer is None else self.indexer.width)

    @property
    def _stores_before(self) -> bool:
        return self.indexer is not None

    def _complete(self, latent: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if self.indexer is not None:
            latent[:, 0, super().key_width :] = self.indexer.keys(x, cos, sin)

    def _selected(
        self,
        latent: torch.Tensor,
        x: torch.Tensor,
        narrow: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        selections, sampling = self.selections, sample_rows is not None
        if self.indexer is None:
            if selections.latest is None:
                raise UnsupportedAttention(
                    f"its layer {self.layer_idx} takes the selection of keys of a layer in another stage: use fewer "
                    "stages (--pp)"
                )
            return selections.latest[sample_rows] if sampling else selections.latest
        scores = self.indexer.scores(x, narrow, cos, sin, super().key_width)
        selected = self.baton_attend.select(self.layer_idx, latent, scores, sampling=sampling)
        if not sampling and selections.is_taken:
            selections.latest = selected
        return selected

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step's rows changes what programs compute without adapters."""
        return super().is_adapted or (self.indexer is not None and self.indexer.is_adapted)

    def _record_completion(self, program: Program, latent: Rows, x: Rows, cos: Rows, sin: Rows) -> None:
        if self.indexer is not None:
            self.indexer.record_keys(program, x, cos, sin, latent, super().key_width)

    def _record_selection(
        self, program: Program, x: Rows, narrow: Rows, cos: Rows, sin: Rows, paged: PagedAttention, *, sampling: bool
    ) -> Rows:
        indexer = self.indexer
        if indexer is None:
            return program.latest_selection(sampling=sampling)
        given = program.take_sampled(x, into="sampled rows of indexer") if sampling else x
        query, weights = indexer.record_scores(program, given, narrow, cos, sin)
        return paged.record_selecting(
            *(program, self.layer_idx, query, weights),
            first=super().key_width,
            scale=indexer.scale,
            most=indexer.most,
        )

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        rows, nothing = super().forward(*arguments, **keywords)
        # What transformers' loop hands to the next layer in place of its indices is never read.
        return (rows, nothing, rows.new_empty(0))[: self.num_outputs]


class _Seen(NamedTuple):
    """What transformers' module computed of some rows."""

    layout: AngleLayout
    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor
    num_outputs: int


def sparse_attention_of(
    attention: Any,
    operations: Operations,
    generator: torch.Generator,
    widths: Sequence[int],
    selections: Selections,
) -> SparseLatentAttention | None:
    """What computes the same as an attention that selects latents; None for any other.

    Raises UnsupportedAttention for one that has the parts for it, and computes something else.
    """
    if not hasattr(attention, "indexer") or not callable(getattr(attention, "expand_kv", None)):
        return None
    parts, given = Parts.of(attention), attention.indexer
    if parts is None or parts.down is None or (given is not None and not Indexer.is_known(given)):
        return None
    scale, heads = getattr(attention, "scaling", None), heads_of(attention, operations, generator)
    if heads is None or not isinstance(scale, float) or scale <= 0:
        return None
    first = parts.latent[1]
    x = like_input(first, torch.randn(1, _ROWS, first.in_features, dtype=torch.float32, generator=generator))
    picked = torch.stack([torch.tensor([0, row // 3, row // 2, row]) for row in range(_ROWS)])
    chosen = torch.stack([words_of(row.unique(), 1) for row in picked])
    how = AttentionParameters(scale=scale, num_kv_heads=1, values_in_keys=True)
    indexer = None if given is None else Indexer(operations, given)
    fused = SparseLatentAttention(operations, attention.layer_idx, parts, heads, how, indexer, selections)
    with _selecting_few(attention), _multiplying_as_heads(attention):
        for case in _eager(attention, x, picked, widths, generator):
            fused.num_outputs = case.num_outputs
            for kind, in_pairs in product(KINDS, (False, True)):
                if _is_alike(fused, case, x[0], Rotation(kind, case.layout), in_pairs, chosen, operations):
                    selections.latest = None
                    selections.is_taken |= indexer is None
                    return fused
    raise selects_otherwise(attention)


def selects_otherwise(attention: Any) -> UnsupportedAttention:
    """The error for an attention that selects keys as no other that is known."""
    return UnsupportedAttention(f"its layer {attention.layer_idx} selects keys in another way than is known")


@contextmanager
def _selecting_few(attention: Any) -> Iterator[None]:
    """Let transformers' module compute as it does without Baton, and select _MOST keys."""
    config, indexer = attention.config, attention.indexer
    before = config._attn_implementation_internal
    most = None if indexer is None else indexer.index_topk
    config._attn_implementation_internal = "eager"
    if indexer is not None:
        indexer.index_topk = _MOST
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        if indexer is not None:
            indexer.index_topk = most


@contextmanager
def _multiplying_as_heads(attention: Any) -> Iterator[None]:
    """Let transformers' module multiply with the weights of heads as LatentHeads does: with plain numbers.

    A layer whose weight is quantised rounds its input to 8 bits, which in float32 is more than `agree` allows.
    """
    layer = attention.kv_b_proj
    if isinstance(layer, StoredLinear):
        attention.kv_b_proj = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        attention.kv_b_proj.weight = nn.Parameter(layer.weight, requires_grad=False)
    try:
        yield
    finally:
        attention.kv_b_proj = layer


def _eager(
    attention: Any, x: torch.Tensor, picked: torch.Tensor, widths: Sequence[int], generator: torch.Generator
) -> Iterator[_Seen]:
    """What transformers' module computes of x with angles of all layouts. `picked`: what the layer before selected."""
    mask = torch.full((_ROWS, _ROWS), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
    for width, layout in product(widths, LAYOUTS):
        angles = random_angles(width, layout, generator, _ROWS)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        keywords: dict[str, Any] = {"attention_mask": mask, "position_embeddings": (cos, sin), "position_ids": None}
        if attention.indexer is None:
            keywords["prev_topk_indices"] = picked[None]
        try:
            out = attention(hidden_states=x, **keywords)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue  # it takes angles of another width, or other arguments
        yield _Seen(layout, cos[0], sin[0], out[0][0], len(out))


def _is_alike(
    fused: SparseLatentAttention,
    seen: _Seen,
    x: torch.Tensor,
    rotation: Rotation,
    in_pairs: bool,
    chosen: torch.Tensor,
    operations: Operations,
) -> bool:
    """Whether the rows that a fused attention computes over a small cache agree with those of transformers."""
    cos, sin = rotation.arranged(seen.cos, seen.sin)
    if rotation.kind == "none" or cos.shape[1] != fused.kv_b_proj.shape.rotated:
        return False
    layout = KVLayout(
        _ROWS,
        (LayerGeometry(1, fused.key_width, fused.kv_b_proj.shape.latent, values_in_keys=True),),
        str(x.dtype).removeprefix("torch."),
    )
    paged = PagedAttention(operations, x.new_zeros(2 * layout.block_elements), layout, [fused.layer_idx])
    starts, table = torch.tensor([0, _ROWS], dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
    lengths, slots = torch.tensor([_ROWS], dtype=torch.int32), torch.arange(_ROWS, 2 * _ROWS)
    paged.layout = StepLayout(starts, lengths, [table], [slots], starts)
    object.__setattr__(fused, "baton_attend", paged)
    fused.rotation = rotation
    indexer, most = fused.indexer, 0
    if indexer is None:
        fused.selections.latest = chosen
    else:
        indexer.in_pairs, most, indexer.most = in_pairs, indexer.most, _MOST
    try:
        out = fused.rows(x, cos, sin)
    finally:
        if indexer is not None:
            indexer.most = most
    # The first rows see no more keys than they may have.
    alike = [agree(theirs, ours) for theirs, ours in zip(seen.rows[_MOST:], out[_MOST:], strict=True)]
    return sum(alike) >= _ENOUGH * len(alike)
