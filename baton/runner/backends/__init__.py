"""Implementations of a step's operations: C kernels for CPUs, CUDA, plain torch, and a slow reference for tests."""
