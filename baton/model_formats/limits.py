"""What a model may ask for at most, whatever the format of its files."""

LONGEST_CONTEXT = 1 << 24
"""In tokens. float32, in which positions become angles, has every whole number up to here and not beyond."""
