"""The operations on a GPU: attention in Triton, CUDA graphs, and products in calls of a fixed number of rows."""
