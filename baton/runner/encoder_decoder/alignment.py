"""Times of a transcript's tokens, from the cross-attention of the heads that follow the speech.

As in OpenAI's Whisper and in transformers' `_extract_token_timestamps`: the attention of each head is normalised over
the tokens, smoothed over the rows of the encoder by a median, and averaged; then dynamic time warping (Sakoe and
Chiba 1978) finds the monotonic path of tokens through the recording with the most attention. The rows that count are
OpenAI's: the attention of a token says where the next one is spoken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.model_formats.files import read_object

Matrix = npt.NDArray[np.float32]

_MOST_HEADS = 64
"""The most heads that may align; OpenAI's models have up to 23."""
_USUAL_WIDTH = 7
_TOKENS_AT_ONCE = 32
"""So many tokens of which medians are found at once stay in the cache of a core, which halves the time."""


def alignment_heads(directory: Path, num_layers: int, num_heads: int) -> Mapping[int, Sequence[int]]:
    """The heads that align, by layer, of a model's generation_config.json; empty: it names none.

    Raises ConfigError for what can't be heads of this model.
    """
    path = directory / "generation_config.json"
    heads = read_object(path).get("alignment_heads") if path.is_file() else None
    if heads is None:
        return {}
    if not isinstance(heads, list) or not 0 < len(heads) <= _MOST_HEADS:
        raise ConfigError(f"{path}: alignment_heads must be a list of 1 to {_MOST_HEADS} heads; copy it again")
    if not all(_is_head(pair, num_layers, num_heads) for pair in heads):
        raise ConfigError(
            f"{path}: alignment_heads must be pairs of a layer below {num_layers} and a head below {num_heads}; copy "
            "it again"
        )
    return {layer: [head for of, head in heads if of == layer] for layer, _ in heads}


def _is_head(value: Any, num_layers: int, num_heads: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(number) is int for number in value)
        and 0 <= value[0] < num_layers
        and 0 <= value[1] < num_heads
    )


def median_width(config: Any) -> int:
    """The width of the median filter of a model's configuration. Raises ConfigError for one that is no odd number."""
    width = getattr(config, "median_filter_width", _USUAL_WIDTH)
    if type(width) is not int or not 1 <= width <= 99 or width % 2 == 0:
        raise ConfigError(f"median_filter_width is {width!r:.40} in config.json, and must be odd; copy it again")
    return width


def token_rows(heads: Iterable[tuple[Matrix, Matrix]], num_rows: int, width: int) -> Matrix:
    """Where each token is spoken: the index of a row of the encoder, float32 [T], never decreasing.

    `heads`: of each head the scaled queries [T, D] and the keys [S, D], float32; it is read once, so memory has what is
    computed of one head. `num_rows`: those of the recording, 1 to S. `width`: of the median filter. Raises
    ArithmeticError for numbers that are not finite.
    """
    total: Matrix | None = None
    count = 0
    for queries, keys in heads:
        weights = _smoothed(_normalised(_attention(queries, keys)[:, :num_rows]), width)
        total = weights if total is None else np.add(total, weights, out=total)
        count += 1
    if total is None or not np.isfinite(total).all():
        raise ArithmeticError("the model produced attention that is not finite")
    return first_rows(-total / np.float32(count))


def _attention(queries: Matrix, keys: Matrix) -> Matrix:
    """The weights [T, S] of softmax, which is taken over all rows."""
    scores = queries @ keys.T
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    weights: Matrix = scores
    return weights


def _normalised(weights: Matrix) -> Matrix:
    """Weights [T, F] with the mean 0 and the deviation 1 over the tokens; 0 where all tokens have the same."""
    centred = weights - weights.mean(axis=0)
    # Squares of weights below 1e-19 are no numbers of float32, and such rows count as much as all others.
    deviation = np.sqrt(np.square(centred, dtype=np.float64).mean(axis=0)).astype(np.float32)
    normalised: Matrix = np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)
    return normalised


def _smoothed(weights: Matrix, width: int) -> Matrix:
    """The median of each `width` neighbours along the last axis, mirrored at the ends; all as it is if F is smaller
    than that."""
    num_rows, half = weights.shape[1], width // 2
    if not half or num_rows <= half:
        return weights
    padded = np.pad(weights, ((0, 0), (half, half)), mode="reflect")
    smoothed = np.empty_like(weights)
    for first in range(0, weights.shape[0], _TOKENS_AT_ONCE):
        some = padded[first : first + _TOKENS_AT_ONCE]
        smoothed[first : first + _TOKENS_AT_ONCE] = _median([some[:, at : at + num_rows] for at in range(width)])
    return smoothed


def _median(values: list[Matrix]) -> Matrix:
    """The median of an odd number of arrays, element by element.

    Of half of them and two more neither the smallest nor the largest is the median, so both are left out, and another
    one comes in their place. Whole arrays are compared, which takes a tenth of the time of sorting the neighbours.
    """
    most = len(values) // 2 + 2
    held, rest = [row.copy() for row in values[:most]], values[most:]
    spare = np.empty_like(held[0])
    while len(held) > 1:
        for index in range(1, len(held)):
            np.minimum(held[0], held[index], out=spare)
            np.maximum(held[0], held[index], out=held[index])
            held[0], spare = spare, held[0]
        for index in range(1, len(held) - 1):
            np.maximum(held[-1], held[index], out=spare)
            np.minimum(held[-1], held[index], out=held[index])
            held[-1], spare = spare, held[-1]
        del held[0], held[-1]
        if rest:
            held.append(rest.pop(0).copy())
    return held[0]


def first_rows(costs: Matrix) -> Matrix:
    """The first row of each token on the cheapest path through costs [T, F] by steps of one token, one row, or both."""
    is_both, is_token = _steps(costs)
    rows = np.empty(costs.shape[0], dtype=np.float32)
    token, row = costs.shape
    while token > 0 or row > 0:
        if token:
            rows[token - 1] = row - 1
        if not token:
            row -= 1
        elif not row or is_token[token + row, token]:
            token -= 1
        elif is_both[token + row, token]:
            token, row = token - 1, row - 1
        else:
            row -= 1
    return rows


def _steps(costs: Matrix) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """By which step the cheapest path comes to each cell: of a token and a row, or of a token; otherwise of a row.

    Both are [T + F + 1, T + 1]: cell (token, row), counted from 1, is at [token + row, token]. The cells of a diagonal
    depend on those of the two before alone, so each is computed at once. Of equal costs the step of a row is taken, as
    in OpenAI's Whisper.
    """
    num_tokens, num_rows = costs.shape
    # Row r of a matrix whose rows are one shorter than they were begins r places later: columns become diagonals.
    wide = np.zeros((num_tokens, num_rows + num_tokens), dtype=np.float32)
    wide[:, :num_rows] = costs
    width = num_rows + num_tokens - 1
    diagonals = np.ascontiguousarray(wide.reshape(-1)[: num_tokens * width].reshape(num_tokens, width).T)
    is_both = np.zeros((num_tokens + num_rows + 1, num_tokens + 1), dtype=np.bool_)
    is_token = np.zeros_like(is_both)
    before, last, now = (np.full(num_tokens + 1, np.inf, dtype=np.float32) for _ in range(3))
    before[0] = 0.0
    for diagonal in range(2, num_tokens + num_rows + 1):
        low, high = max(1, diagonal - num_rows), min(num_tokens, diagonal - 1)
        both, token, row = before[low - 1 : high], last[low - 1 : high], last[low : high + 1]
        by_both = np.logical_and(both < token, both < row, out=is_both[diagonal, low : high + 1])
        by_token = np.logical_and(token < both, token < row, out=is_token[diagonal, low : high + 1])
        cheapest = np.where(by_both, both, np.where(by_token, token, row))
        np.add(cheapest, diagonals[diagonal - 2, low - 1 : high], out=now[low : high + 1])
        before, last, now = last, now, before
        now[0] = np.inf
    return is_both, is_token
