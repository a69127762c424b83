"""Recordings of phones and browsers become samples in a child process, whose faults and appetite stay its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from random import Random
from typing import Any

import av
import numpy as np
import pytest

from baton.model_formats.audio import AudioLimits, UnusableAudio, decode_audio
from baton.model_formats.audio.container_child import decode
from baton.model_formats.audio.containers import Container, run_decoder
from baton.model_formats.limits import AUDIO_RATE
from baton.processes.bounded_process import child_environment
from tests.support.audio_files import tone


def recorded(
    container: str,
    codec: str = "",
    seconds: float = 2,
    rate: int = 48_000,
    channels: int = 1,
    *,
    tracks: int = 1,
    video: str = "",
    options: Mapping[str, str] | None = None,
) -> bytes:
    """A file with a tone in each of its tracks of audio, and with a track of video.

    `container`, `codec`, `video`, `options`: FFmpeg's names of a muxer, of encoders, and the muxer's options.
    """
    target = io.BytesIO()
    opened: Any = av.open(target, "w", format=container, options=dict(options or {}))
    with opened as file:
        pictures = file.add_stream(video, rate=10, width=64, height=64, pix_fmt="yuv420p") if video else None
        layout = "mono" if channels == 1 else "stereo"
        sounds = [file.add_stream(codec, rate=rate, layout=layout) for _ in range(tracks if codec else 0)]
        if pictures is not None:
            for _ in range(round(seconds * 10)):
                picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
                file.mux(pictures.encode(picture))
            file.mux(pictures.encode(None))
        for sound in sounds:
            samples = np.ascontiguousarray(tone(seconds, rate, channels).T)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, 0
            file.mux(sound.encode(frame))
            file.mux(sound.encode(None))
    return target.getvalue()


LIMITS = AudioLimits(25 << 20, 60)
M4A = recorded("ipod", "aac", rate=44_100, channels=2)
WEBM = recorded("webm", "libopus")
FILES = {
    "M4A": M4A,
    "WebM": WEBM,
    "ALAC": recorded("ipod", "alac"),
    "Matroska": recorded("matroska", "flac", rate=44_100),
    "MP4 with video": recorded("mp4", "aac", video="mpeg4"),
    "WebM with video": recorded("webm", "libopus", video="libvpx"),
    "MP4 in fragments": recorded("mp4", "aac", options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
    "MP4 with MP3": recorded("mp4", "libmp3lame"),
}


def decoded(data: bytes, limits: AudioLimits = LIMITS) -> bytes:
    """What the child would make of a file, made in this process."""
    container = Container.of(data)
    assert container is not None
    samples = bytearray()
    decode(data, container, limits, samples.extend)
    return bytes(samples)


def refusal(data: bytes, limits: AudioLimits = LIMITS) -> str:
    with pytest.raises(UnusableAudio) as caught:
        decoded(data, limits)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_tone_stays_that_tone(name: str) -> None:
    samples = np.frombuffer(decoded(FILES[name]), "<i2").astype(float)
    # Encoders put silence before and behind it, and what a file says of that is not always heeded.
    assert abs(len(samples) - 2 * AUDIO_RATE) <= AUDIO_RATE // 20
    inner = samples[AUDIO_RATE // 2 : AUDIO_RATE * 3 // 2]
    assert np.argmax(np.abs(np.fft.rfft(inner))) == 440
    assert np.abs(inner).max() == pytest.approx(0.3 * 2**15, rel=0.15)


@pytest.mark.parametrize("data", [M4A, WEBM])
def test_the_child_sends_all_samples_or_why_there_are_none(data: bytes) -> None:
    assert decode_audio(data, LIMITS).tobytes() == decoded(data)
    with pytest.raises(UnusableAudio, match=r"truncated: its headers promise \d+ bytes, and there are"):
        decode_audio(data[:-1000], LIMITS)


def test_files_without_sound_that_is_taken_are_refused() -> None:
    assert "no audio track" in refusal(recorded("mp4", video="mpeg4"))
    assert "its sound is in ac3; of its kind AAC, ALAC" in refusal(recorded("matroska", "ac3"))
    key = {"encryption_scheme": "cenc-aes-ctr", "encryption_key": "00" * 16, "encryption_kid": "11" * 16}
    assert "encrypted" in refusal(recorded("mp4", "aac", options=key))
    assert "encrypted" in refusal(M4A.replace(b"mp4a", b"enca"))
    assert decoded(M4A.replace(b"mp4a", b"mp\x80a")) == decoded(M4A), "a tag that is no text"
    for start in (M4A[:12], WEBM[:4]):
        assert "or a damaged one" in refusal(start + Random(1).randbytes(10_000))
    with pytest.raises(UnusableAudio, match="more than 16 tracks"):
        decode_audio(recorded("mp4", "aac", 0.1, tracks=17), LIMITS)


def test_a_recording_has_at_most_the_permitted_length_whatever_its_header_says() -> None:
    short = AudioLimits(25 << 20, 1)
    assert "s long; at most 1 s are taken" in refusal(M4A, short)
    # WebM has the length of none of its tracks.
    assert "longer than the 1 s" in refusal(WEBM, short)
    shorter = bytearray(M4A)
    place = shorter.index(b"mdhd") + 20
    shorter[place : place + 4] = bytes([0, 0, 0, 1])
    assert "longer than the 1 s" in refusal(bytes(shorter), short)


def test_damaged_files_are_decoded_or_refused() -> None:
    """Whatever is in a file, nothing else is raised."""
    for name, data in FILES.items():
        random = Random(name)
        for _ in range(12):
            changed = bytearray(data)
            for _ in range(random.randrange(1, 8)):
                # An MP4 file has its headers at its end, a WebM file at its beginning.
                place = random.choice((random.randrange(12, 800), len(data) - random.randrange(1, 1500)))
                changed[place % len(data)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            with contextlib.suppress(UnusableAudio, MemoryError):
                assert len(decoded(bytes(changed))) <= 2 * AUDIO_RATE * 61


POWERLESS = """
import socket, subprocess, sys
from baton.model_formats.audio import container_child

def attempt(*_):
    for act in (lambda: open("/etc/hostname"), socket.socket, lambda: subprocess.Popen(["true"])):
        try:
            act()
        except OSError:
            continue
        print("a power is left", file=sys.stderr)

container_child.decode = attempt
sys.exit(container_child.main(sys.argv[1:]))
"""


def test_the_child_opens_no_file_and_no_connection_and_starts_no_process() -> None:
    arguments = [str(os.getpid()), "MATROSKA", "1000000", "1", "5"]
    command = [sys.executable, "-c", POWERLESS, *arguments]
    found = subprocess.run(command, input=WEBM, env=child_environment(), capture_output=True, check=False)
    assert (found.returncode, found.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its decoder ended with status -11"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGPROF)", "more CPU time than is permitted"),
        ("import sys; sys.stdout.buffer.write(bytes(1 << 20))", "more of it than is taken"),
        ("import sys; sys.stderr.write('x' * (1 << 20))", "more of it than is taken"),
        ("import os, signal; os.close(1); os.close(2); signal.pause()", "not decoded within"),
        ("import signal; signal.pause()", "not decoded within"),
    ],
)
def test_a_decoder_that_fails_floods_or_hangs_ends(program: str, reason: str) -> None:
    with pytest.raises(UnusableAudio, match=reason):
        run_decoder([sys.executable, "-S", "-c", program], bytes(1 << 20), 1 << 16, 0.3 if "pause" in program else 30.0)


def test_without_its_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnusableAudio, match=r"it is WebM or Matroska, .* baton-serve\[audio\] is not installed"):
        decode_audio(WEBM, LIMITS)
