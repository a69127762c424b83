"""What clients send as audio: decoded to samples at 16 kHz, within bounds, and cut into parts of at most 30 s."""

from baton.model_formats.audio.encoded import AudioLimits, UnusableAudio, decode_audio
from baton.model_formats.audio.windows import SAMPLE_RATE, pcm_of, windows

__all__ = ["SAMPLE_RATE", "AudioLimits", "UnusableAudio", "decode_audio", "pcm_of", "windows"]
