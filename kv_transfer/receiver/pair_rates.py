"""How fast the memory of each sender is read: what the reads of a join probe took, and whether that is too slow. Pure.

The first read of a probe sets up the connection, which takes many times as long as its bytes, so that a block that has
proven right is read again a few times, and the quickest of these reads counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.messages.node_report import SLOW_BYTES_PER_S, MeasuredPair

TIMED_READS = 3
"""How often a block is read again to be timed."""
_LONGEST_FIRST_S = 1.0
"""After a first read that took longer, none is timed: its own time says enough, and requests wait for the probe."""
_OVERHEAD_S = 1e-3
"""What a read may take beside its bytes before the pair counts as slow: threads that wake up, and polls."""
_LONGEST_LANE = 120


@dataclass(slots=True)
class ReadTiming:
    """What the reads of one probe took."""

    num_bytes: int = 0
    lane: str = ""
    num_reads: int = 0
    first_s: float = 0.0
    best_s: float = math.inf
    """The quickest of those after the first."""

    def took(self, num_bytes: int, seconds: float, lane: str) -> None:
        """Note a read."""
        self.num_reads += 1
        if self.num_reads == 1:
            self.num_bytes, self.first_s, self.lane = num_bytes, seconds, lane[:_LONGEST_LANE]
        else:
            self.best_s = min(self.best_s, seconds)

    @property
    def wants_more(self) -> bool:
        """Whether the block is to be read once more."""
        return self.num_bytes > 0 and self.first_s <= _LONGEST_FIRST_S and self.num_reads <= TIMED_READS

    @property
    def seconds(self) -> float:
        """The time of the bytes, as far as it is known."""
        return min(self.best_s, self.first_s)


class PairRates:
    """The rates of all senders that one node reads from."""

    def __init__(self, node_id: str, memory_kind: str = "") -> None:
        """`memory_kind`: DRAM or VRAM, of the node that reads."""
        self._node_id = node_id
        self._memory_kind = memory_kind
        self._pairs: dict[str, MeasuredPair] = {}
        """The measured pairs, by the sender's incarnation."""

    def measured(self, incarnation: str, peer: str, memory_kind: str, timing: ReadTiming) -> str:
        """A probe of this sender has passed. Returns why the pair is too slow, for operators; empty if it is not."""
        if not timing.num_bytes or timing.seconds <= 0:
            return ""
        rate, kinds = timing.num_bytes / timing.seconds, (memory_kind, self._memory_kind)
        detail = ""
        if set(kinds) == {"VRAM"} and timing.seconds > timing.num_bytes / SLOW_BYTES_PER_S + _OVERHEAD_S:
            detail = self._why_slow(peer, rate, timing.lane)
        self._pairs[incarnation] = MeasuredPair(peer, rate, timing.num_bytes, timing.lane, *kinds, detail)
        return detail

    def _why_slow(self, peer: str, rate: float, lane: str) -> str:
        return (
            f"{self._node_id} reads the KV of {peer} from GPU to GPU with {rate / 1e9:.2f} GB/s over "
            f"{lane or 'an unknown lane'}, and less than {SLOW_BYTES_PER_S / 1e9:g} means that it goes through "
            "the host: see that UCX finds NVLink or RDMA (UCX_TLS, UCX_NET_DEVICES), and that it may use cuda_ipc"
        )

    def forget(self, incarnation: str) -> None:
        """The sender's memory is disconnected."""
        self._pairs.pop(incarnation, None)

    def shown(self) -> list[MeasuredPair]:
        """All measured pairs, by the sender's name."""
        return sorted(self._pairs.values(), key=lambda pair: pair.peer)
