"""CUDA: FlashAttention, captured graphs, and products of a fixed number of rows."""
