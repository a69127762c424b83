"""GGUF files as model directories: their tensors in transformers' order, and their blocks as they are."""
