"""Quantised weights: reads the formats in which checkpoints store them, and quantises plain ones."""
