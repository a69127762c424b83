"""Measurements for benchmarks: the limits of this machine, and how the time of a step divides."""
