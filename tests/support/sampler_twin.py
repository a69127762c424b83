"""The arithmetic of the device's sampler in numpy, operation by operation, with a sort in place of its searches."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from baton.messages.sampling import SamplingParams
from baton.runner.execution.philox import uniform
from baton.runner.execution.sampler import SamplingState, process
from baton.runner.execution.sampling_arrays import UNITS

Row = npt.NDArray[np.float32]
F = np.float32


def masked(row: Row, state: SamplingState) -> Row:
    if state.mask is None:
        return row
    allowed = np.unpackbits(state.mask.view(np.uint8), count=row.size, bitorder="little").view(np.bool_)
    return np.where(allowed, row, F(-np.inf))


def exp(x: Row) -> Row:
    near = np.maximum(x, F(-86.0))
    n = np.floor(near * F(1.44269504088896341) + F(0.5))
    r = near - n * F(0.693359375)
    r = r - n * F(-2.12194440e-4)
    p = np.full_like(x, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F(factor)
    p = p * (r * r) + r + F(1.0)
    power = ((n.astype(np.int32) + 127) << 23).view(F)
    return np.where(x < F(-86.0), F(0.0), p * power)


def units(weights: Row) -> npt.NDArray[np.int64]:
    return (weights * F(UNITS)).astype(np.int64)


def lowest_of(scaled: Row, peak: F, sigmas: float) -> F:
    """The least scaled logit that top_n_sigma keeps."""
    possible = scaled[scaled > -np.inf].astype(np.float64)
    distances = float(peak) - possible
    scale = 2.0 ** (20 - max(math.frexp(distances.max())[1] - 1, -200) if distances.max() else 220)
    steps = (distances * scale + 0.5).astype(np.int64)
    mean = float(steps.sum()) / steps.size
    variance = float((steps * steps).sum()) / steps.size - mean * mean
    return F(peak - F(sigmas * (math.sqrt(max(variance, 0.0)) / scale)))


def drawn(logits: Row, state: SamplingState) -> int:
    """The token of a row of finite logits; -1 if none is possible."""
    params = state.params
    with np.errstate(over="ignore", invalid="ignore"):
        row = masked(process(logits, state), state)
        if row.max() == -np.inf:
            return -1
        scaled = row / F(params.temperature) if params.temperature else row
        peak = scaled.max()
        if params.is_greedy or np.isinf(peak):
            return int(row.argmax())
        weights = exp(scaled - peak)
        lowest = lowest_of(scaled, peak, params.top_n_sigma) if params.top_n_sigma else F(-np.inf)
    weights[(scaled < lowest) | (weights < F(params.min_p))] = 0.0
    return _of_weights(weights, params, state.num_output_tokens)


def _of_weights(weights: Row, params: SamplingParams, position: int) -> int:
    in_order, top_k = np.arange(weights.size), params.top_k
    by_weight = 0 < top_k < weights.size or params.top_p < 1.0
    if by_weight:
        in_order = np.lexsort((in_order, -weights))
    cumulated = np.cumsum(units(weights[in_order]))
    if 0 < top_k < weights.size:
        cumulated = cumulated[:top_k]
    kept = int(cumulated[-1])
    if params.top_p < 1.0:
        needed = min(math.ceil(params.top_p * float(kept)), kept)
        kept = int(cumulated[np.searchsorted(cumulated, needed, side="left")])
    target = int(uniform(params.seed, position) * 2**53) * kept >> 53
    return int(in_order[np.searchsorted(cumulated, target, side="right")])


def weight_of_all(logits: Row, state: SamplingState) -> int:
    """The sum of all weights, in units, from which log-probabilities are made."""
    possible = masked(logits, state)
    return int(units(exp(possible - possible.max())).sum())
