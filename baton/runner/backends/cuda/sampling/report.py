"""The last kernel of the sampler: what log-probabilities are made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.runner.backends.cuda.sampling.numbers import (
    MINUS_INFINITY,
    NOT_FINITE,
    NOTHING,
    OPTIONS,
    exp_of,
    logit_of,
    place_of,
    token_of,
    units_of,
)
from baton.runner.execution.sampling_arrays import REPORT_HEAD, ReportField

_TILE, _WARPS = 4096, 16
_FIELDS, _HEAD = tl.constexpr(len(ReportField)), tl.constexpr(REPORT_HEAD)
_ROW, _MASK, _NUM_BEST, _RESULT = (tl.constexpr(int(field)) for field in ReportField)


def report(
    logits: torch.Tensor, results: torch.Tensor, masks: torch.Tensor, reports: torch.Tensor, tile: int = _TILE
) -> None:
    """Write what log-probabilities are made of into the results, once all tokens are drawn."""
    scalars = logits.stride(0), logits.shape[1], masks.shape[1]
    grid = (reports.shape[0],)
    _report[grid](logits, results, masks, reports, *scalars, TILE=tile, num_warps=_WARPS, **OPTIONS)


@triton.jit(do_not_specialize=["logits", "results", "masks", "reports", "stride", "num_tokens", "num_words"])
def _report(logits, results, masks, reports, stride, num_tokens, num_words, TILE: tl.constexpr):
    """Programs: reports."""
    fields = reports + tl.program_id(0) * _FIELDS
    row, mask = tl.load(fields + _ROW), tl.load(fields + _MASK)
    cell = tl.load(results + row)
    if (cell != NOT_FINITE) & (cell != NOTHING):
        source, to = logits + row * stride, results + tl.load(fields + _RESULT)
        token = token_of(cell)
        own_place = place_of(tl.load(source + token), token)
        highest = tl.full((TILE,), NOTHING, tl.int64)
        above = tl.zeros((TILE,), tl.int64)
        for start in range(0, num_tokens, TILE):
            places = _possible(source, masks, mask, start, num_tokens, num_words, TILE)
            highest = tl.maximum(highest, places)
            above += (logit_of(places) > logit_of(own_place)).to(tl.int64)
        best = tl.max(highest, 0)
        units = tl.zeros((TILE,), tl.int64)
        for start in range(0, num_tokens, TILE):
            places = _possible(source, masks, mask, start, num_tokens, num_words, TILE)
            units += units_of(exp_of(logit_of(places) - logit_of(best)))
        tl.store(to, best)
        tl.store(to + 1, own_place)
        tl.store(to + 2, tl.sum(units, 0))
        tl.store(to + 3, tl.sum(above, 0) + 1)
        for rank in range(tl.load(fields + _NUM_BEST)):
            if rank > 0:
                last = best
                highest = tl.full((TILE,), NOTHING, tl.int64)
                for start in range(0, num_tokens, TILE):
                    places = _possible(source, masks, mask, start, num_tokens, num_words, TILE)
                    highest = tl.maximum(highest, tl.where(places < last, places, NOTHING))
                best = tl.max(highest, 0)
            tl.store(to + _HEAD + rank, best)


@triton.jit
def _possible(source, masks, mask, start, num_tokens, num_words, TILE: tl.constexpr):
    """The places of a tile's tokens; those that the mask does not allow have minus infinity."""
    tokens = start + tl.arange(0, TILE)
    inside = tokens < num_tokens
    x = tl.load(source + tokens, mask=inside, other=MINUS_INFINITY)
    if mask >= 0:
        words = tl.load(masks + mask * num_words + tokens // 32, mask=inside, other=0)
        x = tl.where(((words >> (tokens % 32)) & 1) != 0, x, MINUS_INFINITY)
    return place_of(x, tokens)
