"""Bounds of one recording, and why a file is no recording that is taken."""

from __future__ import annotations

from dataclasses import dataclass

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
