"""The weights of GGUF files as tensors, and such a file as an ordinary model directory."""
