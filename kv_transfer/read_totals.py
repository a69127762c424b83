"""What the reads from one sender took, on the reader's own clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReadTotals:
    """Sums over the reads that brought their bytes."""

    num_reads: int = 0
    num_bytes: int = 0
    num_ranges: int = 0
    """Descriptors that were posted."""
    read_s: float = 0.0
    post_s: float = 0.0
    """Of it, seconds in the backend's post calls."""

    def add(self, num_bytes: int, num_ranges: int, read_s: float, post_s: float) -> None:
        """One read more."""
        self.num_reads += 1
        self.num_bytes += num_bytes
        self.num_ranges += num_ranges
        self.read_s += read_s
        self.post_s += post_s
