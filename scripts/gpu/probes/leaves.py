"""A probe of the planned sampler: each row of logits in leaves of 1,024 tokens, the same for a divided vocabulary.

A leaf's sum depends on its own tokens alone, so a row has the same bits in any batch, and ranks that have some of the
leaves each exchange sums instead of logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LEAF = 1024


class Leaves(NamedTuple):
    """What is known of each leaf, [rows, leaves]."""

    best: torch.Tensor
    """float32: the largest logit."""
    place: torch.Tensor
    """int32: the lowest token that has it."""
    total: torch.Tensor
    """float32: the sum of exp(logit - best)."""
    finite: torch.Tensor
    """int32: 1 if all logits are finite."""


def leaves(logits: torch.Tensor) -> Leaves:
    """The leaves of float32 logits [rows, tokens]."""
    rows, tokens = logits.shape
    count = triton.cdiv(tokens, LEAF)
    empty = [logits.new_empty((rows, count), dtype=dtype) for dtype in (torch.float32, torch.int32) * 2]
    found = Leaves(*empty)
    _leaf[(count, rows)](logits, *found, tokens, logits.stride(0), LEAF_TOKENS=LEAF, num_warps=4)
    return found


def greedy(found: Leaves) -> torch.Tensor:
    """The token with the largest logit of each row, the lowest of equal ones."""
    best = found.best.max(1, keepdim=True).values
    places = torch.where(found.best == best, found.place, torch.iinfo(torch.int32).max)
    return places.min(1).values


@triton.jit(do_not_specialize=["num_tokens", "stride"])
def _leaf(logits, best, place, total, finite, num_tokens, stride, LEAF_TOKENS: tl.constexpr):
    """Programs: leaves x rows."""
    leaf = tl.program_id(0)
    row = tl.program_id(1)
    tokens = leaf * LEAF_TOKENS + tl.arange(0, LEAF_TOKENS)
    inside = tokens < num_tokens
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=inside, other=float("-inf"))
    highest = tl.max(x, 0)
    to = row * tl.num_programs(0) + leaf
    tl.store(best + to, highest)
    tl.store(place + to, tl.min(tl.where((x == highest) & inside, tokens, num_tokens), 0))
    tl.store(total + to, tl.sum(tl.where(inside, tl.exp(x - highest), 0.0), 0))
    tl.store(finite + to, tl.min(tl.where(inside & (tl.abs(x) == float("inf")) | (x != x), 0, 1), 0))
