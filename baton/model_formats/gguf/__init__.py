"""GGUF, llama.cpp's file format: the container, and its facts in the words of transformers' model directories."""
