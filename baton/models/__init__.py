"""What names a model: a directory, a GGUF file, a name of our own, or a name of the hub; all become a directory.

Command line, benchmarks and `baton.LLM` take the same names: `find_model` in `resolve.py`.
"""
