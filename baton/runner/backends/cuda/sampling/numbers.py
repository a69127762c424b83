"""Numbers of the sampler's kernels: places, weights and their units."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.runner.execution import sampling_arrays as arrays

NOTHING, NOT_FINITE, ID_BITS = (tl.constexpr(number) for number in (arrays.NOTHING, arrays.NOT_FINITE, arrays.ID_BITS))
MINUS_INFINITY = tl.constexpr(float("-inf"))
_UNITS = tl.constexpr(float(arrays.UNITS))

OPTIONS = {"num_stages": 1, "enable_fp_fusion": False}
"""A product and a sum are never contracted into one rounding."""


@triton.jit
def place_of(x, tokens):
    """The places of tokens with the logits x."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # the two zeros are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (ID_BITS - tokens.to(tl.int64))


@triton.jit
def token_of(place):
    return ID_BITS - (place & ID_BITS)


@triton.jit
def logit_of(place):
    order = (place >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp_of(x):
    """exp of x <= 0 in float32, 0 below -86: x = n ln 2 + r, and a polynomial in r (Cephes, expf.c)."""
    near = tl.maximum(x, -86.0)
    n = tl.floor(near * 1.44269504088896341 + 0.5)
    r = near - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -86.0, 0.0, p * power)


@triton.jit
def units_of(weights):
    """Weights in whole units, rounded down."""
    return (weights * _UNITS).to(tl.int64)
