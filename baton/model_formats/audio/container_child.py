"""The child process that decodes the audio of one MP4 or Matroska file (`containers`).

It reads the file from its standard input and writes samples to its standard output as they come. Its exit status is 0,
or REFUSED when the last line of its standard error says why the file is not taken. It is killed by SIGPROF when it has
used its CPU time.

Arguments: the parent's process id, a name in `Container`, the most bytes and seconds of the recording, and seconds of
CPU time.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import av
import av.subtitles.stream  # before this process gives up opening files, as soxr below
import numpy as np
import soxr  # noqa: F401
from numpy.typing import NDArray

from baton.model_formats.audio.containers import REFUSED, Container
from baton.model_formats.audio.mono import AudioLimits, MonoSamples, UnusableAudio
from baton.processes.bounded_process import limit_memory, limit_powers
from baton.processes.ends import die_with

_MEMORY_BYTES = 256 << 20
"""Memory for decoding beside the file, of which 25 minutes of AAC take 3 MiB: the index of the packets, above all."""
_STACK_BYTES = 8 << 20
_DEMUXERS: Final = {Container.MP4: "mov", Container.MATROSKA: "matroska"}
_CODECS = {"aac": "AAC", "alac": "ALAC", "opus": "Opus", "vorbis": "Vorbis", "flac": "FLAC", "mp3": "MP3"}
"""FFmpeg's names of codecs that are taken."""
_DECODERS = "aac,alac,opus,libopus,vorbis,flac,mp3,mp3float"
_MOST_TRACKS = 16
_BLOCK = 1 << 15
"""Samples of each channel that are converted at once."""
_ENCRYPTED_TAGS = ("enca", "drms")


def main(arguments: list[str]) -> int:
    """Decode one file; the result is the exit status."""
    parent, container = int(arguments[0]), Container[arguments[1]]
    limits = AudioLimits(int(arguments[2]), int(arguments[3]))
    # Ctrl-C in a terminal is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    data = sys.stdin.buffer.read(limits.most_bytes)
    # What is imported on first use is imported now.
    MonoSamples(limits, 2, 44_100).convert(np.zeros((8, 2), np.float32), is_last=True)
    av.logging.set_level(None)
    limit_memory(_MEMORY_BYTES, _STACK_BYTES)
    limit_powers()
    signal.setitimer(signal.ITIMER_PROF, float(arguments[4]))
    try:
        _check_is_whole(data, container)
        decode(data, container, limits, sys.stdout.buffer.write)
        sys.stdout.buffer.flush()
    except UnusableAudio as error:
        reason = str(error)
    except MemoryError:
        # FFmpeg reports the limit of tracks as a lack of memory, too.
        reason = f"it has more than {_MOST_TRACKS} tracks, or its decoder needs more than {_MEMORY_BYTES >> 20} MiB"
    else:
        return 0
    sys.stderr.write(f"\n{reason}\n")
    return REFUSED


def decode(data: bytes, container: Container, limits: AudioLimits, write: Callable[[bytes], object]) -> None:
    """Write the samples of a file's audio track, of several the one that FFmpeg takes for the main one.

    Raises UnusableAudio, and MemoryError.
    """
    options = {
        # No name in a file leads anywhere: neither to a file nor to a host, nor to a format or codec that is not taken.
        "protocol_whitelist": "none",
        "format_whitelist": ",".join(_DEMUXERS.values()),
        "codec_whitelist": _DECODERS,
        "max_streams": str(_MOST_TRACKS),
    }
    try:
        file = av.open(io.BytesIO(data), format=_DEMUXERS[container], options=options, metadata_errors="replace")
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, OverflowError) as error:
        raise UnusableAudio(f"it is no {container.value} file, or a damaged one") from error
    with file:
        track = file.streams.best("audio")
        if track is None:
            raise UnusableAudio("it has no audio track")
        _check_track(track, limits)
        _write_samples(_blocks(file, track), limits, write)


def _check_track(track: Any, limits: AudioLimits) -> None:
    codec = track.codec_context
    if codec is None or codec.codec.canonical_name not in _CODECS:
        kind = "an unknown codec" if codec is None else codec.codec.canonical_name
        raise UnusableAudio(f"its sound is in {kind}; of its kind {', '.join(_CODECS.values())} are taken")
    with suppress(UnicodeDecodeError):
        # The tag of a damaged file need not be text.
        if codec.codec_tag in _ENCRYPTED_TAGS:
            raise _encrypted()
    # Threads would count as processes, which this one may not start.
    codec.thread_count = 1
    if track.duration is not None and track.time_base is not None:
        limits.check_length(float(track.duration * track.time_base))


def _blocks(file: Any, track: Any) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """What is in a track: the rate and samples [n, channels] of each decoded frame. Raises UnusableAudio."""
    seconds = 0.0
    try:
        for packet in file.demux(track):
            if packet.has_sidedata("encryption_info") or packet.has_sidedata("encryption_init_info"):
                raise _encrypted()
            if packet.is_corrupt:
                raise UnusableAudio(f"it is truncated or damaged behind {seconds:.1f} s")
            for frame in packet.decode():
                seconds += frame.samples / max(1, frame.sample_rate)
                yield frame.sample_rate, _floats(frame)
    except (UnusableAudio, MemoryError):
        raise
    except (av.FFmpegError, ValueError, OverflowError) as error:
        raise UnusableAudio(f"it is truncated or damaged behind {seconds:.1f} s") from error


def _floats(frame: Any) -> NDArray[np.float32]:
    """A frame as [samples, channels] with a full scale of 1."""
    values: NDArray[Any] = frame.to_ndarray()
    channels = frame.layout.nb_channels
    values = values.T if frame.format.is_planar else values.reshape(-1, channels)
    if values.dtype.kind == "i":
        return (values / np.float64(2 ** (8 * values.itemsize - 1))).astype(np.float32)
    return values.astype(np.float32)


def _write_samples(
    blocks: Iterator[tuple[int, NDArray[np.float32]]], limits: AudioLimits, write: Callable[[bytes], object]
) -> None:
    """Convert and write blocks, many at once, and begin anew where the number of channels or the rate changes."""
    mono: MonoSamples | None = None
    kind, waiting, num_waiting = (0, 0), list[NDArray[np.float32]](), 0
    seconds = 0.0

    def convert(*, is_last: bool) -> None:
        nonlocal mono, waiting, num_waiting, seconds
        if mono is not None:
            block = np.concatenate(waiting) if waiting else np.zeros((0, kind[1]), np.float32)
            write(mono.convert(block, is_last=is_last))
            if is_last:
                seconds += mono.seconds
                limits.check_length(seconds)
                mono = None
        waiting, num_waiting = [], 0

    for rate, block in blocks:
        if (rate, block.shape[1]) != kind:
            convert(is_last=True)
            kind = (rate, block.shape[1])
        if mono is None:
            mono = MonoSamples(limits, block.shape[1], rate)
        waiting.append(block)
        num_waiting += len(block)
        if num_waiting >= _BLOCK:
            convert(is_last=False)
    convert(is_last=True)


def _check_is_whole(data: bytes, container: Container) -> None:
    """Raises UnusableAudio for a file that ends early, which FFmpeg takes for one that ends there."""
    end = _end_of_boxes(data) if container is Container.MP4 else _end_of_segment(data)
    if end > len(data):
        raise UnusableAudio(f"it is truncated: its headers promise {end} bytes, and there are {len(data)}")


def _end_of_boxes(data: bytes) -> int:
    """Where the last box of an MP4 file ends by its header (ISO/IEC 14496-12, section 4.2)."""
    offset = 0
    while offset + 8 <= len(data):
        size = int.from_bytes(data[offset : offset + 4], "big")
        if size == 1:
            size = int.from_bytes(data[offset + 8 : offset + 16], "big")
        if size == 0:
            # The box goes on to the end of the file.
            return len(data)
        if size < 8:
            raise UnusableAudio(f"it is damaged: it has a box of {size} bytes")
        offset += size
    return offset


def _end_of_segment(data: bytes) -> int:
    """Where the segment of a Matroska file ends by its header, or 0 if it has none or does not say (RFC 8794)."""
    offset = 0
    for _ in range(2):
        length = _length_of(data, offset, 4)
        identity = data[offset : offset + length]
        offset += length
        length = _length_of(data, offset, 8)
        size = int.from_bytes(data[offset : offset + length], "big") & ((1 << 7 * length) - 1)
        if identity == b"\x18\x53\x80\x67":
            return 0 if size == (1 << 7 * length) - 1 else offset + length + size
        offset += length + size
    return 0


def _length_of(data: bytes, offset: int, most: int) -> int:
    """Bytes of a variable-length integer, by the leading zeros of its first byte; 0: it is none, or too long."""
    length = 9 - data[offset].bit_length() if offset < len(data) else 0
    return length if length <= most else 0


def _encrypted() -> UnusableAudio:
    return UnusableAudio("it is encrypted")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
