"""Cuts samples into the parts that a model for speech takes: each ending where it is quiet."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.model_formats.limits import AUDIO_RATE, LONGEST_SPEECH_S

MOST_SAMPLES = LONGEST_SPEECH_S * AUDIO_RATE
"""The most samples of a part."""
_QUIET = AUDIO_RATE // 50
"""20 ms: shorter than a pause between two words, longer than a period of the lowest voice."""
_SILENCE = 32
"""Root mean square of 20 ms below which they are silent: -60 dB of the greatest amplitude."""

_AS_QUIET = 4
"""A pause is a run of 20 ms pieces that have at most so many times the energy of the quietest one (6 dB more)."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording in parts."""

    samples: NDArray[np.int16]
    parts: Sequence[tuple[int, int]]
    """The indices of the samples of each part."""
    silent: Set[int]
    """The places of the parts in which nothing is to be heard."""


def divided(samples: NDArray[np.int16], most_samples: int = MOST_SAMPLES) -> Recording:
    """A recording in parts of at most so many samples. Takes a second for hours of audio, so call it in a thread."""
    parts = windows(samples, most_samples)
    return Recording(samples, parts, {number for number, part in enumerate(parts) if _is_silent(samples, part)})


def windows(samples: NDArray[np.int16], most_samples: int = MOST_SAMPLES) -> Sequence[tuple[int, int]]:
    """The parts of a recording, as indices of samples: where each begins, and where it stops.

    A part has at most so many samples. All but the last one stop in the middle of the longest pause of their last
    sixth, which are 5 s of 30.
    """
    searched = max(1, most_samples // 6 // _QUIET) * _QUIET
    parts = []
    start = 0
    while len(samples) - start > most_samples:
        stop = _pause(samples, start + most_samples - searched, searched)
        parts.append((start, stop))
        start = stop
    return [*parts, (start, len(samples))]


def _pause(samples: NDArray[np.int16], first: int, num_samples: int) -> int:
    """The middle of the longest pause in so many samples from the first on; of several such pauses the last one.

    The longest one, since a recording without noise is silent between any two words, and even within some.
    """
    # Integers, so that the sums are the same everywhere.
    pieces = samples[first : first + num_samples].reshape(-1, _QUIET).astype(np.int64)
    energies = (pieces * pieces).sum(axis=1)
    is_quiet = energies <= max(_AS_QUIET * int(energies.min()), _QUIET * _SILENCE**2)
    begins = np.flatnonzero(np.diff(is_quiet, prepend=False, append=False))
    starts, stops = begins[::2], begins[1::2]
    longest = len(starts) - 1 - int(np.argmax((stops - starts)[::-1]))
    return first + int(starts[longest] + stops[longest]) * _QUIET // 2


def _is_silent(samples: NDArray[np.int16], part: tuple[int, int]) -> bool:
    """Whether no 20 ms of a part are louder than -60 dBFS (root mean square)."""
    start, stop = part
    squares = np.square(samples[start:stop].astype(np.int64))
    sums = np.add.reduceat(squares, np.arange(0, len(squares), _QUIET))
    return bool(sums.max() < _QUIET * _SILENCE**2)


def pcm_of(samples: NDArray[np.int16], part: tuple[int, int]) -> bytes:
    """One part as bytes: 16-bit samples, little-endian, without a header."""
    start, stop = part
    return samples[start:stop].astype("<i2").tobytes()
