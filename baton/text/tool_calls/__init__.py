"""Finds the tool calls that a model writes into its text: one module for each format, `formats.py` has their table."""
