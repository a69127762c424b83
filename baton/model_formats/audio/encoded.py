"""Decodes an audio file to mono samples at 16 kHz: block by block, so that no header decides how much is allocated."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.model_formats.audio.containers import Container, decode_container
from baton.model_formats.audio.mono import AudioLimits, MonoSamples, UnusableAudio

if TYPE_CHECKING:
    from soundfile import SoundFile

_FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "FLAC": "FLAC", "MP3": "MP3", "OGG": "OGG"}
"""Names of libsndfile's formats, by its own names, for those that are taken."""
_WAV_SUBTYPES = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_BLOCK = 1 << 15
"""Samples of each channel that are decoded at once."""
_UNKNOWN_SIZE = 0x7FFFF000
"""From this size on, the header of a WAV file does not tell one: the file was written to a pipe."""


def decode_audio(data: bytes, limits: AudioLimits) -> NDArray[np.int16]:
    """The samples [n] of a file: mono, 16,000 a second.

    WAV, FLAC, MP3 and OGG (Vorbis, Opus, FLAC) are decoded here; M4A, MP4, WebM and Matroska in a child process.
    Channels are averaged. Raises UnusableAudio, and Overloaded if no child can be started. Takes a second for some
    minutes of audio, so call it in a thread.
    """
    if len(data) > limits.most_bytes:
        raise UnusableAudio(f"it has {len(data)} bytes; at most {limits.most_bytes} are taken")
    container = Container.of(data)
    if container is not None:
        return _samples_of(decode_container(data, container, limits))
    _check_is_whole(data)
    with _open(data) as file:
        _check_header(file, limits)
        return _samples_of(_decoded(file, limits))


def _samples_of(content: bytes | bytearray) -> NDArray[np.int16]:
    if not content:
        raise UnusableAudio("it is empty: it has no samples")
    return np.frombuffer(content, dtype="<i2").astype(np.int16, copy=False)


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
        raise UnusableAudio("it is no audio in WAV, FLAC, MP3, OGG, M4A or WebM")


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
    limits.check_format(file.channels, file.samplerate)
    if file.frames == 0:
        raise UnusableAudio("it is empty: it has no samples")
    if _is_length_known(file):
        limits.check_length(file.frames / file.samplerate)


def _is_length_known(file: SoundFile) -> bool:
    return bool(file.frames < 2**63 - 1)


def _decoded(file: SoundFile, limits: AudioLimits) -> bytearray:
    from soundfile import LibsndfileError

    rate = file.samplerate
    mono = MonoSamples(limits, file.channels, rate)
    block = np.empty((_BLOCK, file.channels), dtype=np.float32)
    samples = bytearray()
    is_over = False
    while not is_over:
        try:
            block_samples = file.read(out=block)
        except LibsndfileError as error:
            raise UnusableAudio(f"it is truncated or damaged behind {mono.seconds:.1f} s") from error
        is_over = not len(block_samples)
        samples += mono.convert(block_samples, is_last=is_over)
    if _is_length_known(file) and mono.num_frames < file.frames:
        length = file.frames / rate
        raise UnusableAudio(f"it is truncated or damaged: of {length:.1f} s there are {mono.seconds:.1f} s")
    return samples
