"""Histograms of the reads from one sender: durations on the reader's own clock, bytes and descriptors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.metric import Metric
from baton.observe.metrics import Histogram

READ_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
)
"""Upper bounds in seconds. Those from 5 ms on are vLLM's; reads over shared memory take less than that."""
BYTES_BUCKETS = tuple(float(1 << power) for power in range(10, 34, 2))
DESCRIPTOR_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0, 1000.0, 4000.0)
"""Upper bounds of the number of descriptors of one read; neighbouring blocks share one."""


@dataclass(slots=True)
class ReadHistograms:
    """Histograms of the reads from one sender that were done; failed reads are not counted.

    All of them are on the decode node's metrics page, with the sender as the label `peer`.
    """

    seconds: Annotated[Histogram, Metric("kv_transfer_seconds", "Durations of reads, on this node's clock.")] = field(
        default_factory=lambda: Histogram(READ_BUCKETS_S)
    )
    post_seconds: Annotated[
        Histogram, Metric("kv_transfer_post_seconds", "Time of reads that was spent on posting them.")
    ] = field(default_factory=lambda: Histogram(READ_BUCKETS_S))
    """The part of each read's duration that was spent in the backend's post calls."""
    num_bytes: Annotated[Histogram, Metric("kv_transfer_bytes", "Bytes of each read.")] = field(
        default_factory=lambda: Histogram(BYTES_BUCKETS)
    )
    descriptors: Annotated[
        Histogram, Metric("kv_transfer_descriptors", "Descriptors that were posted for each read.")
    ] = field(default_factory=lambda: Histogram(DESCRIPTOR_BUCKETS))

    def add(self, num_bytes: int, num_descriptors: int, read_s: float, post_s: float) -> None:
        """Count one read that is done. `num_descriptors`: descriptors; `read_s` and `post_s`: seconds."""
        self.seconds.observe(read_s)
        self.post_seconds.observe(post_s)
        self.num_bytes.observe(num_bytes)
        self.descriptors.observe(num_descriptors)
