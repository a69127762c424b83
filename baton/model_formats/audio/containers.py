"""Decodes the audio of MP4 and Matroska files, M4A and WebM among them, in a child process for each file.

FFmpeg does it, in the package av of the extra baton-serve[audio]. It reads far more formats than are wanted, and its
faults could be anything, so:

1. A file is named by its first bytes as one of two formats, and FFmpeg tries no other.
2. The child has limits of CPU time, of elapsed time and of memory, and sends at most as many samples as are taken.
3. Before the child looks at a file it gives up opening files and connections, and running programs.
4. Each file has a child of its own, so none sees what another one has left behind.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from baton.errors import Overloaded
from baton.model_formats.audio.mono import AudioLimits, UnusableAudio
from baton.model_formats.limits import AUDIO_RATE
from baton.processes.bounded_process import child_environment

DECODER = "baton.model_formats.audio.container_child"
"""The module that the child runs."""
REFUSED = 3
"""The child's exit status when the last line of its standard error says why there are no samples."""
_BASE_CPU_S = 5.0
_CPU_S_PER_SECOND = 1 / 50
"""CPU time for each permitted second of a recording: about 15 times what AAC and Opus take."""
_WALL_S_PER_CPU_S = 4.0
_MOST_REPORT_BYTES = 4096
_PIECE = 1 << 18


class Container(enum.Enum):
    """A kind of file that holds tracks of sound, and others; its value is what clients know it by."""

    MP4 = "M4A or MP4"
    MATROSKA = "WebM or Matroska"

    @classmethod
    def of(cls, data: bytes) -> Container | None:
        """What a file is, by its first bytes; None for a file of another kind."""
        if data[4:8] == b"ftyp":
            return cls.MP4
        return cls.MATROSKA if data.startswith(b"\x1a\x45\xdf\xa3") else None


def is_decoder_installed() -> bool:
    """Whether these files can be decoded here."""
    return importlib.util.find_spec("av") is not None


def decode_container(data: bytes, container: Container, limits: AudioLimits) -> bytes:
    """The samples of a file's audio: 16 bits, little-endian, mono, 16,000 a second. Raises UnusableAudio.

    Blocks until the child has ended, which its limits bound.
    """
    if not is_decoder_installed():
        raise UnusableAudio(
            f"it is {container.value}, which this server does not decode: baton-serve[audio] is not installed where it "
            "runs; WAV, FLAC, MP3 and OGG are taken"
        )
    cpu_s = _BASE_CPU_S + limits.most_seconds * _CPU_S_PER_SECOND
    arguments = [os.getpid(), container.name, limits.most_bytes, limits.most_seconds, cpu_s]
    # Resampling may add a few samples, and only a child that a file has taken over sends more than these.
    most_bytes = 2 * AUDIO_RATE * (limits.most_seconds + 1)
    command = [sys.executable, "-m", DECODER, *map(str, arguments)]
    return run_decoder(command, data, most_bytes, cpu_s * _WALL_S_PER_CPU_S)


def run_decoder(command: Sequence[str], data: bytes, most_bytes: int, wall_s: float) -> bytes:
    """The standard output of a process that gets data as its standard input: at most so many bytes, in so many seconds.

    The process has ended when this returns or raises. Raises UnusableAudio when it fails, gives too much or takes too
    long, and Overloaded when it can't be started.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
            cwd="/",
            bufsize=0,
        )
    except OSError as error:
        raise Overloaded(f"no process that decodes audio can be started: {error}") from error
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        due = time.monotonic() + wall_s
        try:
            most = {process.stdout: most_bytes, process.stderr: _MOST_REPORT_BYTES}
            output = _exchanged(process.stdin, data, most, due)
            status = process.wait(timeout=max(0.0, due - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise UnusableAudio(f"it was not decoded within {wall_s:.0f} s") from None
        finally:
            process.kill()
    if status:
        raise UnusableAudio(_reason(status, bytes(output[process.stderr])))
    return bytes(output[process.stdout])


def _exchanged(
    target: IO[bytes], data: bytes, most: Mapping[IO[bytes], int], due: float
) -> Mapping[IO[bytes], bytearray]:
    """What comes out of pipes until they are closed, while data goes into another one, which is closed then.

    `most`: the most bytes that are taken of each pipe. `due`: by `time.monotonic`. Raises UnusableAudio when there is
    more, and TimeoutError.
    """
    output: dict[IO[bytes], bytearray] = {pipe: bytearray() for pipe in most}
    left = memoryview(data)
    os.set_blocking(target.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(target, selectors.EVENT_WRITE)
        for pipe in most:
            selector.register(pipe, selectors.EVENT_READ, pipe)
        while selector.get_map():
            ready = selector.select(max(0.0, due - time.monotonic()))
            if not ready or time.monotonic() > due:
                raise TimeoutError
            for key, _ in ready:
                if key.fileobj is target:
                    try:
                        left = left[os.write(key.fd, left[:_PIECE]) :]
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(target)
                        target.close()
                    continue
                piece = os.read(key.fd, _PIECE)
                if not piece:
                    selector.unregister(key.fileobj)
                    continue
                output[key.data] += piece
                if len(output[key.data]) > most[key.data]:
                    raise UnusableAudio("its decoder made more of it than is taken")
    return output


def _reason(status: int, report: bytes) -> str:
    """Why a child that ended with a status made no samples."""
    if status == REFUSED:
        lines = report.decode(errors="replace").splitlines()
        return lines[-1] if lines else "it can't be decoded"
    if status == -signal.SIGPROF:
        return "its decoder takes more CPU time than is permitted"
    return f"its decoder ended with status {status}: it is damaged"
