"""What the reads from one sender took, on the reader's own clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.observe.metrics import Histogram

READ_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
)
"""vLLM's from 5 ms on; over shared memory a read takes less than its first."""
BYTES_BUCKETS = tuple(float(1 << power) for power in range(10, 34, 2))
DESCRIPTOR_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0, 1000.0, 4000.0)
"""Neighbouring blocks are one descriptor."""


@dataclass(slots=True)
class ReadHistograms:
    """Of the reads that brought their bytes."""

    seconds: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_S))
    post_seconds: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_S))
    """Of those, what the backend's post calls took."""
    num_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES_BUCKETS))
    descriptors: Histogram = field(default_factory=lambda: Histogram(DESCRIPTOR_BUCKETS))

    def add(self, num_bytes: int, num_ranges: int, read_s: float, post_s: float) -> None:
        """One read more."""
        self.seconds.observe(read_s)
        self.post_seconds.observe(post_s)
        self.num_bytes.observe(num_bytes)
        self.descriptors.observe(num_ranges)
