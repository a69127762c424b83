"""Decoded audio, block by block, as mono samples of 16 bits at 16 kHz, within the bounds of a recording."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.model_formats.audio.limits import AudioLimits, UnusableAudio
from baton.model_formats.limits import AUDIO_RATE

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
