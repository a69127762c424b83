"""The page of `baton status`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from baton.cli.cluster.state import ClusterState, ProcessState
from baton.cli.views.cluster_view import ClusterView
from baton.cli.views.status_page import bar, overview, status_lines
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport
from baton.messages.node_report import (
    FailedProbe,
    HandoffReport,
    HandoffSide,
    NodeReport,
    OpenHandoff,
    ProbeFault,
    RefusedLink,
)
from baton.messages.operator import ClusterEvent, NodeStatus
from tests.support.router_parts import decode, prefill


def node(name: str, role: str, **changes: object) -> NodeStatus:
    found = NodeStatus(name, role, "Ready", f"{name}.1", "h:1", 1, "m", running=0, waiting=0, kv_usage=0.0)
    return replace(found, **changes)  # type: ignore[arg-type]


LEASE = OpenHandoff(AttemptKey("a", 1, 1), HandoffSide.SENDER, "GRANTED", "d1", "d1.1", 2, 0.5)
REFUSED = RefusedLink("p1", "layout_mismatch", "KV layouts differ", 12.0, 4)
FAILED = FailedProbe("p2", ProbeFault.WRONG_BYTES, "other bytes arrived", 3.0, 1)
REPORTS = {
    "p1.1": NodeReport(prefill(), LoadReport(), {}, HandoffReport("", [LEASE, LEASE])),
    "d1.1": NodeReport(decode(), LoadReport(), {}, HandoffReport("", [], [], [REFUSED], [FAILED])),
}
NODES = [
    node("p1", "prefill", running=2, waiting=1, kv_usage=0.5, total_blocks=200),
    node("d1", "decode", running=3, kv_usage=1.0, total_blocks=100),
    node("d2", "decode", status="CrashLoop", detail="no weights", total_blocks=300),
    node("d3", "decode", incarnation="d3.1"),
    node("r0", "router"),
]
EVENTS = [
    ClusterEvent(seq, 1000.0 + seq, severity, reason, "d2", detail=f"detail {seq}")
    for seq, (severity, reason) in enumerate([("Warning", "NodeLost"), ("Normal", "NodeReady"), ("Warning", "Retry")])
]


def test_the_whole_screen() -> None:
    redis = ProcessState("redis", "redis", "Starting", 0, 0, 2, "", "", "", "", "exit code 1")
    state = ClusterState("c", "ready", 1, 0, 0.0, "m", "auto", "h:1", "h:2", (redis,))
    view = ClusterView("c", "degraded", "two parts", NODES, state)
    found = overview(view, REPORTS, {"d3.1": "d3 at h:1 did not answer within 2 s"}, EVENTS)
    assert status_lines(found, 1010.0) == [
        "c: degraded (two parts)",
        "1/1 prefill ready, 2/3 decode ready, 1/1 router ready",
        "",
        "ROLE      RUNNING   WAITING   KV IN USE        LEASES   TRANSFERS",
        "prefill   2         1         #####..... 50%   2        0",
        # The usage is weighted by blocks: the small node is full, the large one empty.
        "decode    3         0         ##........ 25%   0        0",
        "router    0         0         -                -        -",
        "",
        "PROCESS   STATUS     RESTARTS   PID   LAST-EXIT",
        "redis     Starting   2          -     exit code 1",
        "",
        "DEGRADED   WHY",
        "d1         no link with p1, 12s ago: KV layouts differ",
        "d1         KvProbeFailed, 3.0s ago: other bytes arrived",
        "d2         CrashLoop: no weights",
        "d3         d3 at h:1 did not answer within 2 s",
        "redis      Starting: exit code 1",
        "",
        "LAST FAILURES   REASON     SUBJECT   DETAIL",
        "8.0s ago        Retry      d2        detail 2",
        "10s ago         NodeLost   d2        detail 0",
    ]


def test_shapes_are_shown_where_a_node_has_several_ranks() -> None:
    nodes = [*NODES, node("d4", "decode", tp=2, pp=2), node("d5", "decode", tp=2, pp=1)]
    lines = status_lines(overview(ClusterView("c", "ok", "", nodes, None), {}, {}, []), 1010.0)
    assert lines[3:7] == [
        "ROLE      RUNNING   WAITING   KV IN USE        LEASES   TRANSFERS   SHAPE",
        "prefill   2         1         #####..... 50%   -        -           tp1",
        "decode    3         0         ##........ 25%   -        -           3 tp1, 1 tp2, 1 tp2 pp2",
        "router    0         0         -                -        -           -",
    ]


def test_the_document_has_its_documented_keys() -> None:
    found = overview(ClusterView("c", "ok", "", [node("r0", "router")], None), {}, {}, []).to_json()
    assert {"cluster", "health", "detail", "nodes", "supervisor"} < found.keys()
    assert (found["degraded"], found["failures"]) == ([], [])


def test_the_document_can_be_written_as_json_with_the_shapes_of_all_nodes() -> None:
    nodes = [*NODES, node("d4", "decode", tp=2, pp=2)]
    found = overview(ClusterView("c", "ok", "", nodes, None), {}, {}, []).to_json()
    read = json.loads(json.dumps(found, default=str))
    assert [load["shapes"] for load in read["load"]] == [{"tp1": 1}, {"tp1": 3, "tp2 pp2": 1}, {}]


def test_the_load_of_a_role_is_in_the_document() -> None:
    found = overview(ClusterView("c", "ok", "", [node("r0", "router")], None), {}, {}, []).to_json()
    assert (found["load"][0]["ready"], found["load"][0]["kv_usage"], found["load"][0]["open_leases"]) == (1, None, None)


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "...."), (0.01, "#..."), (0.5, "##.."), (0.99, "###."), (1.0, "####"), (1.2, "####")]
)
def test_a_bar(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn
