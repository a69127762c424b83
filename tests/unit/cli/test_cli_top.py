"""The screen of `baton top`, line by line."""

from __future__ import annotations

from dataclasses import replace

from baton.cli.views.cluster_view import ClusterView
from baton.cli.views.top_page import Screen, top_lines
from baton.messages.operator import ClusterEvent, NodeStatus, RequestRow

NODE = NodeStatus("d0", "decode", "Ready", "d0.1", "h:1", 1, "m", running=3, waiting=1, kv_usage=0.97, age_s=70.0)
ROUTER = replace(NODE, name="router-0", role="router", status="Lost", kv_usage=0.0, running=4, waiting=0)
VIEW = ClusterView("c", "degraded", "router-0 is Lost", [NODE, ROUTER], None)
ROWS = [
    RequestRow("b", "Retrying", "r0", 0.25, "p0", "d0", 5, 2, 2, 31.0, None),
    RequestRow("a" * 64, "Waiting", "r0", 12.0, "", "", 5, 0, 1, None, None),
    RequestRow("c", "Finished", "r0", 9.0, "p0", "d0", 5, 2, 1, 31.0, 99.0),
]
EVENTS = [
    ClusterEvent(1, 1000.0, "Normal", "NodeReady", "d0", detail="decode"),
    ClusterEvent(2, 1004.0, "Warning", "Lost", "router-0"),
]


def test_shapes_are_shown_where_a_node_has_several_ranks() -> None:
    view = replace(VIEW, nodes=[replace(NODE, tp=2, pp=1), ROUTER])
    lines = [line.plain.rstrip() for line in top_lines(view, [], [], 1010.0, Screen(80))]
    assert lines[2:5] == [
        "NODE      ROLE     STATUS  RUNNING WAITING  KV                  %     AGE  SHAPE",
        "d0        decode   Ready         3       1  ###############.   97   1m10s  tp2",
        "router-0  router   Lost          4       0                      -   1m10s  -",
    ]


def test_the_whole_screen() -> None:
    lines = top_lines(VIEW, ROWS, EVENTS, 1010.0, Screen(80))
    assert [line.plain.rstrip() for line in lines] == [
        "c: degraded   1/1 nodes ready, 4 requests, 1 waiting at nodes   router-0 is Lost",
        "",
        "NODE      ROLE     STATUS  RUNNING WAITING  KV                         %     AGE",
        "d0        decode   Ready         3       1  ######################.   97   1m10s",
        "router-0  router   Lost          4       0                             -   1m10s",
        "",
        "REQUEST                       STATE            AGE  PROMPT OUTPUT    TTFT  PATH",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaa  Waiting          12s       5      0       -  -",
        "b                             Retrying        0.2s       5      2    31ms  p0 >",
        "",
        "     AGE  EVENT",
        "    6.0s  Lost       router-0",
        "     10s  NodeReady  d0  decode",
    ]
    (shown,) = (span for span in lines[4].spans if span.style == "red")
    assert lines[4].plain[shown.start : shown.end] == "Lost  ", "the status of a lost node is red"


def test_a_small_screen_shows_how_many_lines_are_left_out() -> None:
    view = replace(VIEW, nodes=[replace(NODE, name=f"d{place}") for place in range(200)])
    rows = [replace(ROWS[0], request_id=f"r{place}") for place in range(100)]
    for height in (2, 5, 8, 12, 24, 60):
        texts = [line.plain for line in top_lines(view, rows, EVENTS * 9, 1010.0, Screen(70, height))]
        assert len(texts) <= height
        assert all(len(line) <= 70 for line in texts)
        assert texts[0].startswith("c: degraded   200/200 nodes ready, 100 requests")
    shown = sum(line.startswith("d") for line in texts)
    assert f"... and {200 - shown} more nodes" in texts
    assert any(line.endswith("more requests") for line in texts)
