"""Finds the tool calls that a model writes into its text: `formats.py` has the table, `parsers.py` reads them."""
