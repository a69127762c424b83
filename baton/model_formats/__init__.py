"""Readers of model files, and what they say about a model: configuration, names of tensors, tokenizer. No tensors."""
