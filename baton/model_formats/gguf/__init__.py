"""GGUF, llama.cpp's file format: the container, and its facts in the words of transformers' model directories.

`open_gguf` opens a file, and the converter (`baton/runner/model/stored/convert_gguf.py`) takes the rest.
"""
