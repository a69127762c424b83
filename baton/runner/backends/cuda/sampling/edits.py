"""What a request's parameters do to a row of logits before a token is drawn, as `sampler.process` does it in numpy."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.runner.backends.cuda.sampling.numbers import MINUS_INFINITY
from baton.runner.execution.sampling_arrays import Field, Real

_MASK, _BIASES, _OCCURRENCES, _EXCLUDED = (
    tl.constexpr(int(field)) for field in (Field.MASK, Field.BIASES, Field.OCCURRENCES, Field.EXCLUDED)
)
_REPETITION, _FREQUENCY, _PRESENCE = (
    tl.constexpr(int(field)) for field in (Real.REPETITION, Real.FREQUENCY, Real.PRESENCE)
)


@triton.jit
def copy_row(source, own, field, masks, num_tokens, num_words, TILE: tl.constexpr):
    """Copy a row; what its mask does not allow is minus infinity, and stays so whatever is added."""
    mask = tl.load(field + _MASK)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < num_tokens
        x = tl.load(source + tokens, mask=inside, other=0.0)
        if mask >= 0:
            words = tl.load(masks + mask * num_words + tokens // 32, mask=inside, other=0)
            x = tl.where(((words >> (tokens % 32)) & 1) != 0, x, MINUS_INFINITY)
        tl.store(own + tokens, x, mask=inside)
    tl.debug_barrier()


@triton.jit
def add_biases(own, field, biased, biases, TILE: tl.constexpr):
    end = tl.load(field + _BIASES + 1)
    for start in range(tl.load(field + _BIASES), end, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < end
        token = tl.load(biased + at, mask=inside, other=0)
        x = tl.load(own + token, mask=inside, other=0.0)
        x = tl.where(x == MINUS_INFINITY, x, x + tl.load(biases + at, mask=inside, other=0.0))
        tl.store(own + token, x, mask=inside)
    tl.debug_barrier()


@triton.jit
def penalise(own, field, real, occurring, times, TILE: tl.constexpr):
    """The penalties as `sampler.process` applies them, in the same operations."""
    end = tl.load(field + _OCCURRENCES + 1)
    repetition = tl.load(real + _REPETITION).to(tl.float32)
    frequency = tl.load(real + _FREQUENCY).to(tl.float32)
    presence = tl.load(real + _PRESENCE).to(tl.float32)
    for start in range(tl.load(field + _OCCURRENCES), end, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < end
        token = tl.load(occurring + at, mask=inside, other=0)
        often = tl.load(times + at, mask=inside, other=0)
        x = tl.load(own + token, mask=inside, other=0.0)
        x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(often > 0, x - frequency * often.to(tl.float32) - presence, x)
        tl.store(own + token, x, mask=inside)
    tl.debug_barrier()


@triton.jit
def exclude(own, field, excluded, TILE: tl.constexpr):
    end = tl.load(field + _EXCLUDED + 1)
    for start in range(tl.load(field + _EXCLUDED), end, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < end
        token = tl.load(excluded + at, mask=inside, other=0)
        tl.store(own + token, tl.full((TILE,), MINUS_INFINITY, tl.float32), mask=inside)
    tl.debug_barrier()
