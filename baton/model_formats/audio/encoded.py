"""Decodes an audio file to mono samples at 16 kHz: block by block, so that no header decides how much is allocated."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.model_formats.limits import AUDIO_RATE

if TYPE_CHECKING:
    from soundfile import SoundFile

_FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "FLAC": "FLAC", "MP3": "MP3", "OGG": "OGG"}
"""Names of libsndfile's formats, by its own names, for those that are taken."""
_WAV_SUBTYPES = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_MOST_CHANNELS = 8
_RATES = range(4_000, 384_001)
_MOST_VALUES_PER_SECOND = 2 * 96_000
"""Samples of all channels together that are decoded for each permitted second: a bound of the time that it takes."""
_BLOCK = 1 << 15
"""Samples of each channel that are decoded at once."""
_UNKNOWN_SIZE = 0x7FFFF000
"""From this size on, the header of a WAV file does not tell one: the file was written to a pipe."""
_FULL_SCALE = 1 << 15


class UnusableAudio(ValueError):
    """Audio that can't be decoded, or is not to be; the message says why."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Bounds of one recording."""

    most_bytes: int
    """Bytes of the encoded file."""
    most_seconds: int
    """Length of the recording: 32,000 bytes a second once it is decoded."""


def decode_audio(data: bytes, limits: AudioLimits) -> NDArray[np.int16]:
    """The samples [n] of a WAV, FLAC, MP3 or OGG file (Vorbis, Opus, FLAC): mono, 16,000 a second.

    Channels are averaged. Raises UnusableAudio. Takes a second for some minutes of audio, so call it in a thread.
    """
    if len(data) > limits.most_bytes:
        raise UnusableAudio(f"it has {len(data)} bytes; at most {limits.most_bytes} are taken")
    _check_is_whole(data)
    with _open(data) as file:
        _check_header(file, limits)
        return _decoded(file, limits)


def _check_is_whole(data: bytes) -> None:
    """Raises UnusableAudio for a file of no known format, and for one that ends early and whose decoder ignores that.

    The first bytes are compared here, so that no other reader of libsndfile's sees what a stranger has sent.
    """
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        size = int.from_bytes(data[4:8], "little")
        # Some programs count the eight bytes before the size, too.
        if len(data) < size < _UNKNOWN_SIZE:
            raise UnusableAudio(f"it is truncated: its header promises {size} bytes, and there are {len(data)}")
    elif data.startswith(b"OggS"):
        # RFC 3533, section 6: a page has a header of 27 bytes, the sizes of its segments, and these.
        page = data[data.rfind(b"OggS") :]
        sizes = page[27 : 27 + page[26]] if len(page) > 26 else b""
        if len(page) <= 26 or len(sizes) < page[26] or len(page) < 27 + len(sizes) + sum(sizes):
            raise UnusableAudio("it is truncated: its last page is not complete")
    elif not (data.startswith((b"fLaC", b"ID3")) or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")):
        raise UnusableAudio("it is no audio in WAV, FLAC, MP3 or OGG")


def _open(data: bytes) -> SoundFile:
    """A file whose header was read. Raises UnusableAudio."""
    from soundfile import LibsndfileError, SoundFile

    class Sequential(SoundFile):  # type: ignore[misc]  # the package has no types
        """A file that is read from its beginning to its end."""

        def seekable(self) -> bool:
            # Otherwise each read also seeks to where the file is anyway, which fails in FLAC of unknown length.
            return False

    try:
        return Sequential(_Bytes(data))
    except LibsndfileError as error:
        reason = "it has no audio in WAV, FLAC, MP3 or OGG, is truncated, or its header is damaged"
        raise UnusableAudio(reason) from error


class _Bytes(io.BytesIO):
    """A file in memory. A wrong offset in the file's header is no exception, which would be logged for each seek."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        start = (0, self.tell(), len(self.getbuffer()))[whence]
        return super().seek(min(max(0, start + offset), len(self.getbuffer())))


def _check_header(file: SoundFile, limits: AudioLimits) -> None:
    name = _FORMATS.get(file.format)
    if name is None or (name == "WAV" and file.subtype not in _WAV_SUBTYPES):
        raise UnusableAudio(f"it is {file.format} of the kind {file.subtype}, which is not taken")
    if file.channels > _MOST_CHANNELS:
        raise UnusableAudio(f"it has {file.channels} channels; at most {_MOST_CHANNELS} are taken")
    if file.samplerate not in _RATES:
        raise UnusableAudio(f"it has {file.samplerate} samples a second; {_RATES.start} to {_RATES.stop - 1} are taken")
    if file.frames == 0:
        raise UnusableAudio("it is empty: it has no samples")
    if _is_length_known(file) and file.frames > limits.most_seconds * file.samplerate:
        seconds = file.frames / file.samplerate
        raise UnusableAudio(f"it is {seconds:.1f} s long; at most {limits.most_seconds} s are taken")


def _is_length_known(file: SoundFile) -> bool:
    return bool(file.frames < 2**63 - 1)


def _decoded(file: SoundFile, limits: AudioLimits) -> NDArray[np.int16]:
    import soxr
    from soundfile import LibsndfileError

    rate = file.samplerate
    most = min(limits.most_seconds * rate, limits.most_seconds * _MOST_VALUES_PER_SECOND // file.channels)
    resampler = None if rate == AUDIO_RATE else soxr.ResampleStream(rate, AUDIO_RATE, 1, dtype="float32")
    block = np.empty((_BLOCK, file.channels), dtype=np.float32)
    samples = bytearray()
    num_read, is_over = 0, False
    while not is_over:
        try:
            found = file.read(out=block)
        except LibsndfileError as error:
            raise UnusableAudio(f"it is truncated or damaged behind {num_read / rate:.1f} s") from error
        is_over = not len(found)
        num_read += len(found)
        if num_read > most:
            raise _too_long(limits, file)
        if not np.isfinite(found).all():
            raise UnusableAudio(f"it has samples that are no numbers, before {num_read / rate:.1f} s")
        mono = np.clip(found, -1.0, 1.0).mean(axis=1, dtype=np.float32)
        if resampler is not None:
            mono = resampler.resample_chunk(mono, last=is_over)
        samples += np.clip(np.rint(mono * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16).tobytes()
    if _is_length_known(file) and num_read < file.frames:
        length, found_s = file.frames / rate, num_read / rate
        raise UnusableAudio(f"it is truncated or damaged: of {length:.1f} s there are {found_s:.1f} s")
    if not samples:
        raise UnusableAudio("it is empty: it has no samples")
    return np.frombuffer(samples, dtype=np.int16)


def _too_long(limits: AudioLimits, file: SoundFile) -> UnusableAudio:
    most_values = limits.most_seconds * _MOST_VALUES_PER_SECOND
    return UnusableAudio(
        f"it is longer than the {limits.most_seconds} s, or the {most_values} samples of its {file.channels} channels, "
        "that are taken"
    )
