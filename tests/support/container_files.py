"""MP4 and Matroska files for tests, as phones and browsers record them, written by FFmpeg's own muxers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import av
import numpy as np

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
