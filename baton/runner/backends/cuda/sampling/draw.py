"""The sampler's main kernel: from logits on a GPU to tokens, one program a row, with bits that depend on the row alone.

Whatever is summed over the vocabulary is summed in integers, whose sums are the same in any order: in tiles of any
size, on any number of threads, and in parts of a vocabulary that ranks have computed. A token's weight, exp(logit -
largest logit), is a float32 of a few multiplications and additions that are written out (`exp_of`), since the functions
of a GPU and of numpy differ in the last bit. It counts in units of 2^-44: what is lighter, less than 6e-14 of the best
token, has no weight.

The order of tokens, heaviest first and ties by id, needs no sorting. `_reach` halves the range of float32 bits in which
the token must be at which a sum over this order, of ones or of weights, exceeds a number. top_k, top_p and the draw are
three such numbers. Once few tokens are left in the range they are put side by side.

The arrays that a step's rows are described by are those of baton/runner/execution/sampling_arrays.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.runner.backends.cuda.sampling.edits import add_biases, copy_row, exclude, penalise
from baton.runner.backends.cuda.sampling.numbers import (
    ID_BITS,
    MINUS_INFINITY,
    NOT_FINITE,
    NOTHING,
    OPTIONS,
    exp_of,
    logit_of,
    place_of,
    units_of,
)
from baton.runner.execution.sampling_arrays import Drawing, Field, Real

_TILE, _WARPS = 4096, 16
_ROOM = 4096
"""How many tokens are put side by side."""
_MOST_PROGRAMS = 128
"""The most programs of one launch; each has room for a row."""

_FIELDS, _REALS = tl.constexpr(len(Field)), tl.constexpr(len(Real))
_ROW, _SEED, _POSITION = (tl.constexpr(int(field)) for field in (Field.ROW, Field.SEED, Field.POSITION))
_TOP_K, _IS_EDITED = tl.constexpr(int(Field.TOP_K)), tl.constexpr(int(Field.IS_EDITED))
_TEMPERATURE, _MIN_P, _SIGMA, _TOP_P = (
    tl.constexpr(int(field)) for field in (Real.TEMPERATURE, Real.MIN_P, Real.TOP_N_SIGMA, Real.TOP_P)
)
_LIGHTEST = tl.constexpr(0x29800000)
"""The bits of 2^-44, the least weight that counts."""
_BEYOND = tl.constexpr(0x3F800001)
"""The bits of the float32 behind 1, the largest weight."""


def draw(
    logits: torch.Tensor,
    results: torch.Tensor,
    given: Drawing,
    tile: int = _TILE,
    room: int = _ROOM,
    programs: int = _MOST_PROGRAMS,
) -> None:
    """Write the drawn token's place into the cells of the given rows; NOTHING if no token is possible."""
    vocab, count = logits.shape[1], given.fields.shape[0]
    work = logits.new_empty(min(programs, count), vocab + room)
    scalars = logits.stride(0), vocab, work.stride(0), given.masks.shape[1]
    for first in range(0, count, programs):
        some = given._replace(fields=given.fields[first:], reals=given.reals[first:])
        grid = (min(programs, count - first),)
        _draw[grid](logits, results, work, *some, *scalars, TILE=tile, ROOM=room, num_warps=_WARPS, **OPTIONS)


@triton.jit(
    do_not_specialize=[
        "logits",
        "results",
        "work",
        "fields",
        "reals",
        "biased",
        "biases",
        "occurring",
        "times",
        "excluded",
        "masks",
        "stride",
        "num_tokens",
        "width",
        "num_words",
    ]
)
def _draw(
    logits,
    results,
    work,
    fields,
    reals,
    biased,
    biases,
    occurring,
    times,
    excluded,
    masks,
    stride,
    num_tokens,
    width,
    num_words,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Programs: rows that are drawn."""
    number = tl.program_id(0).to(tl.int64)
    own, field, real = work + number * width, fields + number * _FIELDS, reals + number * _REALS
    row = tl.load(field + _ROW)
    best = tl.load(results + row)
    if best != NOT_FINITE:
        source = logits + row * stride
        if tl.load(field + _IS_EDITED) != 0:
            copy_row(source, own, field, masks, num_tokens, num_words, TILE)
            add_biases(own, field, biased, biases, TILE // 4)
            penalise(own, field, real, occurring, times, TILE // 4)
            exclude(own, field, excluded, TILE // 4)
            best = _best(own, num_tokens, TILE)
            source = own
        temperature = tl.load(real + _TEMPERATURE).to(tl.float32)
        if logit_of(best) == MINUS_INFINITY:
            best = tl.full((), NOTHING, tl.int64)
        elif temperature > 0.0:
            peak = tl.div_rn(logit_of(best), temperature)
            # A temperature may be so small that scaling overflows: then the largest logit takes it all.
            if tl.abs(peak) < float("inf"):
                best = _drawn(source, own, field, real, temperature, peak, num_tokens, TILE, ROOM)
        tl.store(results + row, best)


@triton.jit
def _best(own, num_tokens, TILE: tl.constexpr):
    """The place of the largest logit."""
    best = tl.full((TILE,), NOTHING, tl.int64)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < num_tokens
        x = tl.load(own + tokens, mask=inside, other=MINUS_INFINITY)
        best = tl.maximum(best, tl.where(inside, place_of(x, tokens), NOTHING))
    return tl.max(best, 0)


@triton.jit
def _weights_at(own, places, inside):
    """Weights, and their bits, which have the order of the weights."""
    weights = tl.load(own + places, mask=inside, other=0.0)
    return weights, weights.to(tl.int32, bitcast=True)


@triton.jit
def _drawn(source, own, field, real, temperature, peak, num_tokens, TILE: tl.constexpr, ROOM: tl.constexpr):
    """The place of the token that is drawn, without its logit; what weighs something are finite logits."""
    PART: tl.constexpr = TILE // 2
    min_p = tl.load(real + _MIN_P).to(tl.float32)
    sigmas = tl.load(real + _SIGMA)
    lowest = tl.full((), MINUS_INFINITY, tl.float32)
    if sigmas > 0.0:
        lowest = peak - (sigmas * _deviation(source, temperature, peak, num_tokens, TILE // 4)).to(tl.float32)
    total = tl.zeros((PART,), tl.int64)
    count = tl.zeros((PART,), tl.int32)
    for start in range(0, num_tokens, PART):
        tokens = start + tl.arange(0, PART)
        inside = tokens < num_tokens
        scaled = tl.div_rn(tl.load(source + tokens, mask=inside, other=MINUS_INFINITY), temperature)
        weights = exp_of(scaled - peak)
        weights = tl.where((scaled < lowest) | (weights < min_p), 0.0, weights)
        tl.store(own + tokens, weights, mask=inside)
        units = units_of(weights)
        total += units
        count += (units > 0).to(tl.int32)
    tl.debug_barrier()
    kept = tl.sum(total, 0)
    num_above = tl.sum(count, 0).to(tl.int64)
    # All that is kept is the beginning of one order, so the draw needs to know no more of it than its weight.
    top_k, top_p = tl.load(field + _TOP_K), tl.load(real + _TOP_P)
    at_least = tl.full((), _LIGHTEST, tl.int32)
    if (top_k > 0) & (top_k < num_above):
        at_least, num_above, before, weight = _reach(own, num_tokens, top_k - 1, True, at_least, num_above, TILE, ROOM)
        kept = weight + (top_k - before) * units_of(at_least.to(tl.float32, bitcast=True))
    if top_p < 1.0:
        needed = tl.minimum(tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64), kept)
        at_least, num_above, before, weight = _reach(
            own, num_tokens, needed - 1, False, at_least, num_above, TILE, ROOM
        )
        unit = units_of(at_least.to(tl.float32, bitcast=True))
        kept = weight + ((needed - 1 - weight) // unit + 1) * unit
    target = tl.umulhi(_uniform(field), kept.to(tl.uint64)).to(tl.int64)
    by_bits = (top_k > 0) | (top_p < 1.0)
    if by_bits:
        at_least, num_above, before, weight = _reach(own, num_tokens, target, False, at_least, num_above, TILE, ROOM)
        target = (target - weight) // units_of(at_least.to(tl.float32, bitcast=True))
    return ID_BITS - _in_order_of_ids(own, num_tokens, target, by_bits, at_least, TILE)


@triton.jit
def _uniform(field):
    """The random number of a row's position (philox.py), in units of 2^-64."""
    position = tl.load(field + _POSITION)
    low_word, high_word = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = tl.full((), 0, tl.uint32)
    high, low, _, _ = tl.philox(tl.load(field + _SEED), low_word, high_word, zero, zero)
    return ((high >> 5).to(tl.uint64) << 37) | ((low >> 6).to(tl.uint64) << 11)


@triton.jit
def _deviation(source, temperature, peak, num_tokens, TILE: tl.constexpr):
    """The standard deviation of the scaled logits, from their distances to the largest one in 2^21 steps at most."""
    top = peak.to(tl.float64)
    distances = tl.zeros((TILE,), tl.float64)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        x = tl.load(source + tokens, mask=tokens < num_tokens, other=MINUS_INFINITY)
        scaled = tl.div_rn(x, temperature)
        distances = tl.maximum(distances, tl.where(scaled > MINUS_INFINITY, top - scaled.to(tl.float64), 0.0))
    widest = tl.max(distances, 0)
    exponent = tl.maximum((widest.to(tl.int64, bitcast=True) >> 52) - 1023, -200)
    scale = ((1043 - exponent) << 52).to(tl.float64, bitcast=True)
    counts = tl.zeros((TILE,), tl.int32)
    sums = tl.zeros((TILE,), tl.int64)
    squares = tl.zeros((TILE,), tl.int64)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        x = tl.load(source + tokens, mask=tokens < num_tokens, other=MINUS_INFINITY)
        scaled = tl.div_rn(x, temperature)
        is_possible = scaled > MINUS_INFINITY
        steps = (tl.where(is_possible, top - scaled.to(tl.float64), 0.0) * scale + 0.5).to(tl.int64)
        counts += is_possible.to(tl.int32)
        sums += steps
        squares += steps * steps
    num = tl.sum(counts, 0).to(tl.float64)
    mean = tl.sum(sums, 0).to(tl.float64) / num
    variance = tl.sum(squares, 0).to(tl.float64) / num - mean * mean
    return tl.sqrt(tl.maximum(variance, 0.0)) / scale


@triton.jit
def _reach(own, num_tokens, target, BY_NUMBER: tl.constexpr, lowest, num_above, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Find the token at which a sum over the tokens, heaviest first, exceeds `target`: of ones, or of units.

    `lowest`: bits of which it is known that the tokens with at least these reach it; `num_above`: how many those are.
    Returns the token's bits, how many tokens have at least these, how many have more, and what those with more weigh.
    """
    beyond = tl.full((), _BEYOND, tl.int32)
    num_beyond = tl.full((), 0, tl.int64)
    weight_beyond = tl.full((), 0, tl.int64)
    first = tl.full((), 0, tl.int32)
    length = first + num_tokens
    while beyond - lowest > 1:
        if (first == 0) & (num_above - num_beyond <= ROOM):
            length = _put_together(own, num_tokens, lowest, beyond, TILE)
            first += num_tokens
        middle = lowest + (beyond - lowest) // 2
        nums = tl.zeros((TILE,), tl.int32)
        units = tl.zeros((TILE,), tl.int64)
        for start in range(0, length, TILE):
            at = start + tl.arange(0, TILE)
            weights, bits = _weights_at(own + first, at, at < length)
            chosen = (bits >= middle) & (bits < beyond)
            nums += chosen.to(tl.int32)
            units += tl.where(chosen, units_of(weights), 0)
        num = num_beyond + tl.sum(nums, 0)
        weight = weight_beyond + tl.sum(units, 0)
        is_above = num > target if BY_NUMBER else weight > target
        if is_above:
            lowest = middle
            num_above = num
        else:
            beyond = middle
            num_beyond = num
            weight_beyond = weight
    return lowest, num_above, num_beyond, weight_beyond


@triton.jit
def _put_together(own, num_tokens, lowest, beyond, TILE: tl.constexpr):
    """Write the weights with these bits behind all weights, side by side; returns how many they are."""
    tl.debug_barrier()
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        weights, bits = _weights_at(own, tokens, tokens < num_tokens)
        chosen = (bits >= lowest) & (bits < beyond)
        ones = chosen.to(tl.int32)
        found = tl.sum(ones, 0)
        if found > 0:
            tl.store(own + num_tokens + count + tl.cumsum(ones, 0) - 1, weights, mask=chosen)
            count += found
    tl.debug_barrier()
    return count


@triton.jit
def _counted(own, tokens, num_tokens, by_bits, wanted):
    """What is summed over the ids: ones for tokens with the wanted bits, or units."""
    weights, bits = _weights_at(own, tokens, tokens < num_tokens)
    return tl.where(by_bits, (bits == wanted).to(tl.int64), units_of(weights))


@triton.jit
def _in_order_of_ids(own, num_tokens, target, by_bits, wanted, TILE: tl.constexpr):
    """The token at which the sum over the ids exceeds `target`."""
    tile = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int64)
    after = tl.sum(_counted(own, tl.arange(0, TILE), num_tokens, by_bits, wanted), 0)
    while (after <= target) & (tile + TILE < num_tokens):
        tile += TILE
        before = after
        after += tl.sum(_counted(own, tile + tl.arange(0, TILE), num_tokens, by_bits, wanted), 0)
    tokens = tile + tl.arange(0, TILE)
    cumulated = before + tl.cumsum(_counted(own, tokens, num_tokens, by_bits, wanted), 0)
    return (tile + tl.sum((cumulated <= target).to(tl.int32), 0)).to(tl.int64)
