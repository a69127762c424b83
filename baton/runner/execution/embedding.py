"""Embeddings as runners return them: the last token's final hidden state, normalised to length 1 (L2).

This is "last-token pooling", as in vLLM for generative models. The bytes are float32, little-endian, as they go over
the wire and, base64-encoded, to clients.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def embedding_of(hidden: npt.NDArray[np.float32]) -> bytes:
    """The embedding of one hidden state, float32 [size]; zeros stay zeros. ArithmeticError for non-finite numbers.

    Squares of float32 are exact in float64 and their sum is rounded once, so the bits depend on the row alone.
    """
    if not np.isfinite(hidden).all():
        raise ArithmeticError("the model produced a non-finite embedding")
    wide = hidden.astype(np.float64)
    length = math.sqrt(math.fsum((wide * wide).tolist()))
    return (wide / length if length else wide).astype("<f4").tobytes()


def embedding_of_number(number: int, size: int) -> bytes:
    """The embedding that runners without a model return: a different one for each 64-bit number."""
    words = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return embedding_of(((words >> np.uint64(40)).astype(np.float32) - 2.0**23).astype(np.float32))
