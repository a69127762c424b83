"""What a model may ask for at most, whatever the format of its files, and what all models for speech take."""

LONGEST_CONTEXT = 1 << 24
"""In tokens. float32, in which positions become angles, has every whole number up to here and not beyond."""
AUDIO_RATE = 16_000
"""Samples in a second of speech."""
LONGEST_SPEECH_S = 30
"""The most seconds that a model for speech takes at once: longer recordings are cut."""
