"""Cuts samples into the parts that a model for speech takes: of at most 30 s, each ending where it is quiet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
"""Samples in a second, for all models for speech."""
_WINDOW = 30 * SAMPLE_RATE
_SEARCHED = 5 * SAMPLE_RATE
"""The end of a window, in which it is cut."""
_QUIET = SAMPLE_RATE // 50
"""20 ms: shorter than a pause between two words, longer than a period of the lowest voice."""


def windows(samples: NDArray[np.int16]) -> Sequence[tuple[int, int]]:
    """The parts of a recording, as indices of samples: where each begins, and where it stops.

    A part has at most 30 s. All but the last one stop in the middle of the quietest 20 ms of their last 5 s.
    """
    parts = []
    start = 0
    while len(samples) - start > _WINDOW:
        stop = _quietest(samples, start + _WINDOW - _SEARCHED)
        parts.append((start, stop))
        start = stop
    return [*parts, (start, len(samples))]


def _quietest(samples: NDArray[np.int16], first: int) -> int:
    """Where it is quietest in the 5 s from a sample on; of several such places the last one."""
    # Integers, so that the sums are the same everywhere.
    pieces = samples[first : first + _SEARCHED].reshape(-1, _QUIET).astype(np.int64)
    energies = (pieces * pieces).sum(axis=1)
    place = len(energies) - 1 - int(np.argmin(energies[::-1]))
    return first + place * _QUIET + _QUIET // 2


def pcm_of(samples: NDArray[np.int16], part: tuple[int, int]) -> bytes:
    """One part as bytes: 16-bit samples, little-endian, without a header."""
    start, stop = part
    return samples[start:stop].astype("<i2").tobytes()
