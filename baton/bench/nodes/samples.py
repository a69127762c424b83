"""What nodes report about their load during a run.

A sample's time is when this process received it, so clocks of processes or hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.bench.results.outcome import Outcomes
from baton.messages.node_report import NodeReport

_TOLERANCE_S = 0.002
"""Durations are rounded, and a first token may leave the node while its step is still being timed."""


@dataclass(slots=True)
class NodeSamples:
    """One node's load over time."""

    role: str
    incarnations: list[str] = field(default_factory=list)
    """More than one: the node was restarted during the run."""
    seconds: list[float] = field(default_factory=list)
    """Time of each sample, on this process's clock."""
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    waiting_for_remote_kvs: list[int] = field(default_factory=list)
    kv_usage: list[float] = field(default_factory=list)
    leased_blocks: list[int] = field(default_factory=list)
    ended_transfers: dict[str, int] = field(default_factory=dict)
    """Ended transfers of the latest incarnation, by outcome."""
    misses: int = 0
    """How often the node did not answer."""

    def add(self, seconds: float, report: NodeReport) -> None:
        """Adds a report that was received at `seconds`."""
        incarnation, load = report.node.incarnation, report.load
        if incarnation not in self.incarnations:
            self.incarnations.append(incarnation)
        self.seconds.append(seconds)
        self.running.append(load.running)
        self.waiting.append(load.waiting)
        self.waiting_for_remote_kvs.append(load.waiting_for_remote_kvs)
        self.kv_usage.append(load.kv_usage)
        self.leased_blocks.append(load.leased_blocks)
        self.ended_transfers = {}
        for ended in report.handoff.ended:
            self.ended_transfers[ended.outcome] = self.ended_transfers.get(ended.outcome, 0) + ended.count

    def to_json(self, began_s: float) -> dict[str, Any]:
        """The samples of a result file; times count from `began_s`."""
        return {
            "role": self.role,
            "incarnations": self.incarnations,
            "seconds": [round(second - began_s, 3) for second in self.seconds],
            "running": self.running,
            "waiting": self.waiting,
            "waiting_for_remote_kvs": self.waiting_for_remote_kvs,
            "kv_usage": [round(usage, 4) for usage in self.kv_usage],
            "leased_blocks": self.leased_blocks,
            "transfers_ended": self.ended_transfers,
            "misses": self.misses,
        }


def peak_rows(nodes: Mapping[str, NodeSamples]) -> list[list[str]]:
    """Table rows: name, role, and the maximum of each figure."""
    return [
        [
            name,
            one.role,
            str(max(one.running, default=0)),
            str(max(one.waiting, default=0)),
            str(max(one.waiting_for_remote_kvs, default=0)),
            f"{max(one.kv_usage, default=0.0):.0%}",
            str(max(one.leased_blocks, default=0)),
            str(len(one.seconds)),
            str(one.misses),
        ]
        for name, one in sorted(nodes.items())
    ]


def impossible_spans(outcomes: Outcomes) -> int:
    """Counts requests whose time in the cluster is longer than the client's own wait for the first token.

    There are none as long as each duration is measured on one clock. A difference of two hosts' clocks shows here.
    """
    complete = outcomes.is_complete
    inside_s = (outcomes.queue_s + outcomes.prefill_s)[complete]
    waited_s = (outcomes.first_token_s - outcomes.sent_s)[complete]
    return int((inside_s > waited_s + _TOLERANCE_S).sum())
