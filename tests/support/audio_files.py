"""Audio files for tests: tones, silence, and files whose headers lie."""

from __future__ import annotations

import io
import struct

import numpy as np
import soundfile
from numpy.typing import NDArray

FORMATS = ("WAV PCM_16", "WAV PCM_24", "WAV FLOAT", "FLAC PCM_16", "MP3 MPEG_LAYER_III", "OGG VORBIS", "OGG OPUS")
"""A container and a codec each, by libsndfile's names."""


def tone(seconds: float, rate: int = 16_000, channels: int = 1, hertz: float = 440.0) -> NDArray[np.float32]:
    """A tone, the same in all channels: [samples, channels]."""
    times = np.arange(round(seconds * rate)) / rate
    one = (0.3 * np.sin(2 * np.pi * hertz * times)).astype(np.float32)
    return np.repeat(one[:, None], channels, axis=1)


def encoded(samples: NDArray[np.float32], rate: int = 16_000, kind: str = "WAV PCM_16") -> bytes:
    """A file with these samples."""
    container, codec = kind.split()
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, samples.shape[1], codec, format=container) as writer:
        # Encoders of OGG overflow their stack with much at once.
        for start in range(0, len(samples), 4096):
            writer.write(samples[start : start + 4096])
    return file.getvalue()


def flac_that_claims(data: bytes, num_samples: int) -> bytes:
    """A FLAC file whose header has another number of samples; 0: unknown. RFC 9639, section 8.2."""
    changed = bytearray(data)
    changed[21] = (changed[21] & 0xF0) | (num_samples >> 32)
    changed[22:26] = struct.pack(">I", num_samples & 0xFFFFFFFF)
    return bytes(changed)


def wav_that_claims(data: bytes, num_bytes: int) -> bytes:
    """A WAV file whose headers promise another number of bytes."""
    place = data.index(b"data")
    size = struct.pack("<I", num_bytes)
    return data[:4] + size + data[8 : place + 4] + size + data[place + 8 :]
