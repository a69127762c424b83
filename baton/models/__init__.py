"""What `--model` may name: a directory, a GGUF file, a named model, or a model of the hub; all become a directory."""
