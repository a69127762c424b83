"""What nodes say of themselves during a run.

A sample's time is the harness's own, from when it had the answer: there is nothing to compare between the clocks of
processes or hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.bench.results.outcome import Outcomes
from baton.messages.node_report import NodeReport

_TOLERANCE_S = 0.002
"""Spans come rounded, and a first token may leave the node while its step is still being timed."""


@dataclass(slots=True)
class NodeSamples:
    """One node's load over time."""

    role: str
    incarnations: list[str] = field(default_factory=list)
    """More than one: it was started again during the run."""
    seconds: list[float] = field(default_factory=list)
    """Of each sample, on the harness's clock."""
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    waiting_for_remote_kvs: list[int] = field(default_factory=list)
    kv_usage: list[float] = field(default_factory=list)
    leased_blocks: list[int] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """Transfers of its latest incarnation by outcome."""
    misses: int = 0
    """How often it did not answer."""

    def add(self, seconds: float, report: NodeReport) -> None:
        """Take one in."""
        incarnation, load = report.node.incarnation, report.load
        if incarnation not in self.incarnations:
            self.incarnations.append(incarnation)
        self.seconds.append(seconds)
        self.running.append(load.running)
        self.waiting.append(load.waiting)
        self.waiting_for_remote_kvs.append(load.waiting_for_remote_kvs)
        self.kv_usage.append(load.kv_usage)
        self.leased_blocks.append(load.leased_blocks)
        self.ended = {}
        for ended in report.handoff.ended:
            self.ended[ended.outcome] = self.ended.get(ended.outcome, 0) + ended.count

    def to_json(self, began_s: float) -> dict[str, Any]:
        """With times from `began_s` on."""
        return {
            "role": self.role,
            "incarnations": self.incarnations,
            "seconds": [round(second - began_s, 3) for second in self.seconds],
            "running": self.running,
            "waiting": self.waiting,
            "waiting_for_remote_kvs": self.waiting_for_remote_kvs,
            "kv_usage": [round(usage, 4) for usage in self.kv_usage],
            "leased_blocks": self.leased_blocks,
            "transfers_ended": self.ended,
            "misses": self.misses,
        }


def peak_rows(nodes: Mapping[str, NodeSamples]) -> list[list[str]]:
    """For a table: name, role, and the most of each."""
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
    """Requests whose spans in the cluster are longer than the client's own wait for the first token.

    None are, as long as each span is measured on one clock. A difference of two hosts' clocks would show here.
    """
    complete = outcomes.is_complete
    inside_s = (outcomes.queue_s + outcomes.prefill_s)[complete]
    waited_s = (outcomes.first_token_s - outcomes.sent_s)[complete]
    return int((inside_s > waited_s + _TOLERANCE_S).sum())
