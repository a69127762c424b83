"""What clients send as audio: decoded to samples at 16 kHz, within bounds, and cut into parts of at most 30 s."""

from baton.model_formats.audio.encoded import decode_audio
from baton.model_formats.audio.mono import AudioLimits, UnusableAudio
from baton.model_formats.audio.windows import MOST_SAMPLES, Recording, divided, pcm_of, windows

__all__ = [
    "MOST_SAMPLES",
    "AudioLimits",
    "Recording",
    "UnusableAudio",
    "decode_audio",
    "divided",
    "pcm_of",
    "windows",
]
