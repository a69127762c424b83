"""The operations on a GPU: FlashAttention, CUDA graphs, and products in calls of a fixed number of rows."""
