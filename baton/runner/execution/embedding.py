"""Embeddings as runners return them: what the model's layers ended with at the last token, of length 1 (L2).

As vLLM embeds with models that generate ("last-token pooling"). Bytes are float32, little-endian: what goes over the
wire, and what clients ask for as base64.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def embedding_of(hidden: npt.NDArray[np.float32]) -> bytes:
    """Of one row, float32 [size]; zeros stay zeros. Raises ArithmeticError when a number is not finite.

    Squares of float32 are exact in float64 and their sum is rounded once, so the bits depend on nothing but the row.
    """
    if not np.isfinite(hidden).all():
        raise ArithmeticError("the model produced a non-finite embedding")
    wide = hidden.astype(np.float64)
    length = math.sqrt(math.fsum((wide * wide).tolist()))
    return (wide / length if length else wide).astype("<f4").tobytes()


def embedding_of_number(number: int, size: int) -> bytes:
    """For runners without a model: another one for each number of 64 bits."""
    words = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return embedding_of(((words >> np.uint64(40)).astype(np.float32) - 2.0**23).astype(np.float32))
