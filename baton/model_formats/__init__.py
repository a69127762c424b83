"""Readers of model files, and what they say about a model: configuration, names of tensors, tokenizer. No tensors.

Routers, commands and nodes take them; `files.py` has what all of them read with.
"""
