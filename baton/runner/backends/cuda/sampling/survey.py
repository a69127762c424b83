"""The first kernel of the sampler: each row's largest logit, and whether all its logits are finite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.runner.backends.cuda.sampling.numbers import MINUS_INFINITY, NOT_FINITE, NOTHING, OPTIONS, place_of

_TILE, _WARPS = 8192, 8


def survey(logits: torch.Tensor, results: torch.Tensor, tile: int = _TILE) -> None:
    """Write the place of each row's largest logit into its cell, the first ones of `results`, which are NOTHING before.

    `logits`: float32 [rows, vocabulary].
    """
    rows, vocab = logits.shape
    grid = (triton.cdiv(vocab, tile), rows)
    _survey[grid](logits, logits.stride(0), vocab, results, TILE=tile, num_warps=_WARPS, **OPTIONS)


@triton.jit(do_not_specialize=["logits", "stride", "num_tokens", "results"])
def _survey(logits, stride, num_tokens, results, TILE: tl.constexpr):
    """Programs: tiles x rows."""
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1)
    inside = tokens < num_tokens
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=inside, other=MINUS_INFINITY)
    places = tl.where(tl.abs(x) < float("inf"), place_of(x, tokens), NOT_FINITE)
    tl.atomic_max(results + row, tl.max(tl.where(inside, places, NOTHING), 0), sem="relaxed")
