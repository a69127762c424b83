"""Measurements that benchmarks alone take: the limits of this machine, and how the time of a step divides."""
