"""Weights that stay in their files until layers pack them: the formats of quantised checkpoints, and who holds them.

`weight.py` says what such a weight is, `formats.py` finds a checkpoint's format, `plan.py` decides which part of a
model holds which weight, and `layers.py` has these parts. `convert_gguf.py` is a program of its own.
"""
