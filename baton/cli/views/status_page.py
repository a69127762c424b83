"""Renders the page of `baton status` as text and as JSON. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from baton.cli.output import fine_duration, table_lines
from baton.cli.views.cluster_view import ClusterView
from baton.messages.node_report import KV_PROBE_FAILED, HandoffSide, NodeReport
from baton.messages.operator import NodeStatus

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent

_FAILURES = 5
"""How many of the latest failures are shown."""
_BAR = 10


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The load of all nodes of one role together."""

    role: str
    ready: int
    total: int
    running: int
    waiting: int
    kv_usage: float | None
    """Share of the blocks that is in use; None for routers."""
    open_leases: int | None
    """Leases that these nodes have granted and that have not ended; None if no node answered."""
    open_transfers: int | None
    """Transfers by which these nodes read; None if no node answered."""
    shapes: Mapping[str, int]
    """How many nodes have each shape; empty for routers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that degrades the cluster."""

    subject: str
    why: str


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that the page shows."""

    view: ClusterView
    load: Sequence[RoleLoad]
    degraded: Sequence[Problem]
    failures: Sequence[ClusterEvent]
    """Warnings, the latest first."""

    def to_json(self) -> dict[str, Any]:
        """The page as a JSON object."""
        return {
            **self.view.to_json(),
            "load": [asdict(sample) for sample in self.load],
            "degraded": [asdict(reason) for reason in self.degraded],
            "failures": [asdict(event) for event in self.failures],
        }


def overview(
    view: ClusterView,
    reports: Mapping[str, NodeReport],
    problems: Mapping[str, str],
    events: Sequence[ClusterEvent],
) -> Overview:
    """Summarise a cluster. `events` are ordered by time, the oldest first.

    `reports` and `problems` are of the nodes that were asked, by their incarnation.
    """
    roles = dict.fromkeys(node.role for node in view.nodes)
    load = [_load([node for node in view.nodes if node.role == role], reports) for role in roles]
    failures = [event for event in reversed(events) if event.severity == "Warning"][:_FAILURES]
    return Overview(view, load, _degraded(view, reports, problems), failures)


def status_lines(seen: Overview, now: float) -> list[str]:
    """The page as lines of text. `now` is in seconds since the epoch."""
    view = seen.view
    lines = [
        f"{view.cluster}: {view.health}{f' ({view.detail})' if view.detail else ''}",
        ", ".join(f"{load.ready}/{load.total} {load.role} ready" for load in seen.load),
    ]
    columns = ["ROLE", "RUNNING", "WAITING", "KV IN USE", "LEASES", "TRANSFERS"]
    load_rows = [_load_row(load) for load in seen.load]
    if any(node.shape.num_ranks > 1 for node in view.nodes):
        columns.append("SHAPE")
        load_rows = [[*row, _shapes(load)] for row, load in zip(load_rows, seen.load, strict=True)]
    lines += ["", *table_lines(columns, load_rows)]
    if view.supervisor is not None:
        rows = [
            [process.name, process.status, str(process.restarts), str(process.pid or "-"), process.last_exit or "-"]
            for process in view.supervisor.processes
        ]
        lines += ["", *table_lines(["PROCESS", "STATUS", "RESTARTS", "PID", "LAST-EXIT"], rows)]
    if seen.degraded:
        lines += ["", *table_lines(["DEGRADED", "WHY"], [[reason.subject, reason.why] for reason in seen.degraded])]
    if seen.failures:
        rows = [
            [f"{fine_duration(now - event.time)} ago", event.reason, event.subject or "-", event.detail or "-"]
            for event in seen.failures
        ]
        lines += ["", *table_lines(["LAST FAILURES", "REASON", "SUBJECT", "DETAIL"], rows)]
    return lines


def bar(share: float, width: int = _BAR) -> str:
    """A share as a bar, such as `####......`.

    A share above 0 has at least one mark, and a share below 1 at least one gap.
    """
    marks = min(round(share * width), width)
    if 0.0 < share < 1.0:
        marks = min(max(marks, 1), width - 1)
    return "#" * marks + "." * (width - marks)


def _load(nodes: Sequence[NodeStatus], reports: Mapping[str, NodeReport]) -> RoleLoad:
    """The load of nodes of the same role."""
    role = nodes[0].role
    answered = [reports[node.incarnation].handoff.open for node in nodes if node.incarnation in reports]
    sides = [handoff.side for handoffs in answered for handoff in handoffs]
    blocks = sum(node.total_blocks for node in nodes)
    used = sum(node.kv_usage * node.total_blocks for node in nodes)
    return RoleLoad(
        role=role,
        ready=sum(node.status == "Ready" for node in nodes),
        total=len(nodes),
        running=sum(node.running for node in nodes),
        waiting=sum(node.waiting for node in nodes),
        kv_usage=None if role == "router" else used / blocks if blocks else 0.0,
        open_leases=sides.count(HandoffSide.SENDER) if answered else None,
        open_transfers=sides.count(HandoffSide.READER) if answered else None,
        shapes={} if role == "router" else dict(Counter(str(shape) for shape in sorted(node.shape for node in nodes))),
    )


def _degraded(view: ClusterView, reports: Mapping[str, NodeReport], problems: Mapping[str, str]) -> list[Problem]:
    reasons = []
    for node in view.nodes:
        if node.status != "Ready":
            reasons.append(Problem(node.name, f"{node.status}: {node.detail}" if node.detail else node.status))
        elif node.incarnation in problems:
            reasons.append(Problem(node.name, problems[node.incarnation]))
        if node.incarnation in reports:
            reasons += _refused_links(node.name, reports[node.incarnation])
            reasons += _failed_probes(node.name, reports[node.incarnation])
    known = {node.name for node in view.nodes}
    processes = view.supervisor.processes if view.supervisor is not None else ()
    others = [process for process in processes if process.status != "Ready" and process.name not in known]
    return reasons + [
        Problem(other.name, f"{other.status}: {other.last_exit or 'for no known reason'}") for other in others
    ]


def _refused_links(name: str, report: NodeReport) -> list[Problem]:
    links = report.handoff.refused_links
    return [Problem(name, f"no link with {link.peer}, {fine_duration(link.age_s)} ago: {link.story}") for link in links]


def _failed_probes(name: str, report: NodeReport) -> list[Problem]:
    probes = report.handoff.failed_probes
    return [Problem(name, f"{KV_PROBE_FAILED}, {fine_duration(probe.age_s)} ago: {probe.detail}") for probe in probes]


def _load_row(load: RoleLoad) -> list[str]:
    kv = "-" if load.kv_usage is None else f"{bar(load.kv_usage)} {100 * load.kv_usage:.0f}%"
    counts = ["-" if count is None else str(count) for count in (load.open_leases, load.open_transfers)]
    return [load.role, str(load.running), str(load.waiting), kv, *counts]


def _shapes(load: RoleLoad) -> str:
    """The shapes of a role's nodes: `tp2`, or with the number of nodes where they differ, `1 tp1, 2 tp2`."""
    if len(load.shapes) == 1:
        return next(iter(load.shapes))
    return ", ".join(f"{count} {shape}" for shape, count in load.shapes.items()) or "-"
