"""The timeline of a node during a run: its engine steps and its KV transfers.

A node reports times on its own clock, and what that clock shows when it answers. So the age of each step at the answer
is known, and a step's time on this process's clock is the answer's arrival minus that age. The error is at most the
answer's time on the wire; the fastest answer of a run sets the offset. Clocks of two nodes are never compared.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.bench.results.outcome import Outcomes
from baton.messages.ids import AttemptKey
from baton.messages.node import StepFigures
from baton.messages.node_report import NodeReport, NodeTrace, TraceEvent, TraceStep

_MAX_ROWS = 4000
"""A plot can't show more."""
_MERGE_GAP_S = 0.002
"""Decode steps that are closer than this are merged if there are too many steps."""


@dataclass(frozen=True, slots=True)
class NodeStep:
    """One engine step, on this process's clock."""

    ended_s: float
    figures: StepFigures
    goes_on: bool
    """Whether there was more to compute when the step had ended."""

    @property
    def began_s(self) -> float:
        return self.ended_s - self.figures.step_ms / 1e3

    @property
    def kind(self) -> str:
        if not self.figures.prefill_tokens:
            return "decode"
        return "mixed" if self.figures.decode_sequences else "prefill"

    @property
    def tokens(self) -> int:
        return self.figures.prefill_tokens + self.figures.decode_rows


@dataclass(frozen=True, slots=True)
class KvRead:
    """One read of KV blocks, on this process's clock."""

    began_s: float
    ended_s: float
    num_bytes: int


class Interval(NamedTuple):
    """A step or a read, for a plot; `size`: its tokens or bytes."""

    begin_s: float
    end_s: float
    kind: str
    size: int


class NodeTimeline:
    """Collects a node's answers and places their steps and reads on this process's clock. Times are seconds."""

    def __init__(self) -> None:
        self.after = 0
        """Sequence number of the last known event."""
        self.steps_after = 0
        """Sequence number of the last known step."""
        self._offset_s = float("inf")
        """This process's clock minus the node's: an upper bound, lowered by each faster answer."""
        self._new_steps: list[TraceStep] = []
        self._new_events: list[TraceEvent] = []
        self._steps: list[NodeStep] = []
        self._reads: list[KvRead] = []

    def skip(self, trace: NodeTrace) -> None:
        """Drops an answer from before the run."""
        self.after = trace.events[-1].seq if trace.events else self.after
        self.steps_after = trace.steps[-1].seq if trace.steps else self.steps_after

    def add(self, received_s: float, trace: NodeTrace) -> None:
        """Adds an answer that arrived at `received_s`."""
        self._offset_s = min(self._offset_s, received_s - trace.monotonic_ns / 1e9)
        self._new_steps += trace.steps
        self._new_events += trace.events
        self.skip(trace)

    def restart(self) -> None:
        """The node was restarted, maybe on another host: sequence numbers and clock start anew."""
        self._convert_new()
        self.after = self.steps_after = 0
        self._offset_s = float("inf")

    @property
    def steps(self) -> Sequence[NodeStep]:
        self._convert_new()
        return self._steps

    @property
    def reads(self) -> Sequence[KvRead]:
        self._convert_new()
        return self._reads

    def busy_shares(self, began_s: float, ended_s: float) -> dict[str, float]:
        """The share of the time from `began_s` to `ended_s` that went into each kind of step."""
        shares: dict[str, float] = {}
        for step in self.steps:
            inside_s = min(step.ended_s, ended_s) - max(step.began_s, began_s)
            if inside_s > 0:
                shares[step.kind] = shares.get(step.kind, 0.0) + inside_s / (ended_s - began_s)
        return shares

    def rows(self, origin_s: float) -> list[list[Any]]:
        """The rows of a result file: [start_s, end_s, kind, tokens or bytes]; times count from `origin_s`."""
        steps = [Interval(step.began_s, step.ended_s, step.kind, step.tokens) for step in self.steps]
        reads = [Interval(read.began_s, read.ended_s, "transfer", read.num_bytes) for read in self.reads]
        if len(steps) > _MAX_ROWS:
            steps = merge_decode_steps(steps)
        return [
            [round(interval.begin_s - origin_s, 6), round(interval.end_s - origin_s, 6), interval.kind, interval.size]
            for interval in sorted([*steps, *reads])
        ]

    def _convert_new(self) -> None:
        """Converts the times of new answers to this process's clock."""
        self._steps += [
            NodeStep(step.monotonic_ns / 1e9 + self._offset_s, step.figures, step.goes_on) for step in self._new_steps
        ]
        self._reads += reads_of(self._new_events, self._offset_s)
        self._new_steps, self._new_events = [], []


def reads_of(events: Iterable[TraceEvent], offset_s: float) -> list[KvRead]:
    """Pairs the start and end events of reads; reads of one attempt end in the order in which they started."""
    started_s: defaultdict[AttemptKey, deque[float]] = defaultdict(deque)
    reads = []
    for event in events:
        when_s = event.monotonic_ns / 1e9 + offset_s
        if event.name == "read_started":
            started_s[event.attempt].append(when_s)
        elif event.name == "read_done" and started_s[event.attempt]:
            reads.append(KvRead(started_s[event.attempt].popleft(), when_s, event.value))
    return reads


def merge_decode_steps(steps: Sequence[Interval]) -> list[Interval]:
    """Merges steps that only decode with the step right before them."""
    joined: list[Interval] = []
    for step in steps:
        before = joined[-1] if joined else None
        if before and before.kind == step.kind == "decode" and step.begin_s - before.end_s <= _MERGE_GAP_S:
            joined[-1] = before._replace(end_s=step.end_s, size=before.size + step.size)
        else:
            joined.append(step)
    return joined


# What nodes report about their load during a run.
#
# A sample's time is when this process received it, so clocks of processes or hosts are never compared.

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
            samples.role,
            str(max(samples.running, default=0)),
            str(max(samples.waiting, default=0)),
            str(max(samples.waiting_for_remote_kvs, default=0)),
            f"{max(samples.kv_usage, default=0.0):.0%}",
            str(max(samples.leased_blocks, default=0)),
            str(len(samples.seconds)),
            str(samples.misses),
        ]
        for name, samples in sorted(nodes.items())
    ]


def impossible_spans(outcomes: Outcomes) -> int:
    """Counts requests whose time in the cluster is longer than the client's own wait for the first token.

    There are none as long as each duration is measured on one clock. A difference of two hosts' clocks shows here.
    """
    complete = outcomes.is_complete
    inside_s = (outcomes.queue_s + outcomes.prefill_s)[complete]
    waited_s = (outcomes.first_token_s - outcomes.sent_s)[complete]
    return int((inside_s > waited_s + _TOLERANCE_S).sum())
