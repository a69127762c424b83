"""The operations on a CPU: C kernels, and access to their compiled library without torch."""
