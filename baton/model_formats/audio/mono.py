"""Decoded audio, block by block, as mono samples of 16 bits at 16 kHz, within the bounds of one recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.model_formats.limits import AUDIO_RATE

MOST_CHANNELS = 8
RATES = range(4_000, 384_001)
"""Samples a second of each channel."""
_MOST_VALUES_PER_SECOND = 2 * 96_000
"""Samples of all channels together that are decoded for each permitted second: a bound of the time that it takes."""


class UnusableAudio(ValueError):
    """Audio that can't be decoded, or is not to be; the message says why."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Bounds of one recording."""

    most_bytes: int
    """Bytes of the encoded file."""
    most_seconds: int
    """Length of the recording: 32,000 bytes a second once it is decoded."""

    def check_format(self, channels: int, rate: int) -> None:
        """Raises UnusableAudio for more channels, or another number of samples a second, than are taken."""
        if not 0 < channels <= MOST_CHANNELS:
            raise UnusableAudio(f"it has {channels} channels; at most {MOST_CHANNELS} are taken")
        if rate not in RATES:
            raise UnusableAudio(f"it has {rate} samples a second; {RATES.start} to {RATES.stop - 1} are taken")

    def check_length(self, seconds: float) -> None:
        """Raises UnusableAudio for a recording that says it is longer than is taken."""
        if seconds > self.most_seconds:
            raise UnusableAudio(f"it is {seconds:.1f} s long; at most {self.most_seconds} s are taken")

    def most_frames(self, channels: int, rate: int) -> int:
        """The most samples of each channel that are decoded."""
        return min(self.most_seconds * rate, self.most_seconds * _MOST_VALUES_PER_SECOND // channels)

    def too_long(self, channels: int) -> UnusableAudio:
        """The error for a recording that has more samples, whatever its header said."""
        most_values = self.most_seconds * _MOST_VALUES_PER_SECOND
        return UnusableAudio(
            f"it is longer than the {self.most_seconds} s, or the {most_values} samples of its {channels} channels, "
            "that are taken"
        )


_FULL_SCALE = 1 << 15


class MonoSamples:
    """Makes the samples of one recording, of one number of channels and one rate."""

    def __init__(self, limits: AudioLimits, channels: int, rate: int) -> None:
        """Raises UnusableAudio for more channels, or another rate, than are taken."""
        import soxr

        limits.check_format(channels, rate)
        self.num_frames = 0
        """Samples of each channel that were given."""
        self._rate = rate
        self._channels = channels
        self._limits = limits
        self._most = limits.most_frames(channels, rate)
        self._resampler = None if rate == AUDIO_RATE else soxr.ResampleStream(rate, AUDIO_RATE, 1, dtype="float32")

    @property
    def seconds(self) -> float:
        """Length of what was given."""
        return self.num_frames / self._rate

    def convert(self, block: NDArray[np.float32], *, is_last: bool = False) -> bytes:
        """The next samples as little-endian bytes, of a block [samples, channels] whose full scale is 1.

        Channels are averaged. Raises UnusableAudio when the recording becomes too long, or has values that are no
        numbers.
        """
        self.num_frames += len(block)
        if self.num_frames > self._most:
            raise self._limits.too_long(self._channels)
        if not np.isfinite(block).all():
            raise UnusableAudio(f"it has samples that are no numbers, before {self.seconds:.1f} s")
        mono = np.clip(block, -1.0, 1.0).mean(axis=1, dtype=np.float32)
        if self._resampler is not None:
            mono = self._resampler.resample_chunk(mono, last=is_last)
        samples: NDArray[np.int16] = np.clip(np.rint(mono * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype("<i2")
        return samples.tobytes()
