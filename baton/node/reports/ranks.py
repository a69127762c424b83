"""The metrics of the processes that compute a node's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.messages.node_report import RankReport
from baton.observe.metrics import Figure


def rank_figures(reports: Sequence[RankReport]) -> Iterator[Figure]:
    """The metrics of the ranks, for the metrics page."""
    for one in reports:
        for name, text, value in (
            ("rank_up", "Whether the process of a rank runs: 1 or 0.", one.is_up),
            ("rank_resident_memory_bytes", "Memory of a rank in use, its shared memory included.", one.resident_bytes),
            ("rank_shared_memory_bytes", "Memory that a rank shares with the node's others.", one.shared_bytes),
            ("rank_cpu_seconds_total", "Processor time of all threads of a rank.", one.cpu_s),
            ("rank_threads", "Threads of a rank.", one.num_threads),
        ):
            yield Figure(name, text, float(value), {"rank": str(one.rank)})
