"""The content of the live page: made when somebody asks, and the same for all who ask at about the same time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from baton.messages.operator import ClusterEvent, ClusterStatus, TenantRow, TenantRows
from router.http.pages.html import LiveData
from router.operations.live_page import MAX_ENDED, MAX_EVENTS, MAX_RUNNING, RECENT_S, live_page_data
from tests.doubles.fake_clock import FakeClock
from tests.support.live_cluster_page import history_of, node, row


def picture_of(**changed: object) -> dict[str, object]:
    parts: dict[str, object] = {
        "status": ClusterStatus("c", "ok", "", [node("d0", "decode"), node("p0", "prefill"), node("r0", "router")]),
        "model": "m",
        "history": history_of(2),
        "running": [row("a")],
        "num_running": 1,
        "ended": [],
        "events": [],
        "router": "r0",
        "tenants": TenantRows(()),
    }
    return live_page_data(**{**parts, **changed})  # type: ignore[arg-type]


def test_a_node_of_several_ranks_says_its_shape() -> None:
    nodes = [node("d0", "decode", tp=2, pp=2), node("d1", "decode", tp=1, pp=1), node("d2", "decode")]
    found = json.loads(json.dumps(picture_of(status=ClusterStatus("c", "ok", "", nodes))))
    assert [each["shape"] for each in found["nodes"]] == ["tp2 pp2", "", ""]


def test_routers_have_rows_of_their_own_and_prefill_nodes_come_before_decode_nodes() -> None:
    found = json.loads(json.dumps(picture_of()))
    assert [each["name"] for each in found["routers"]] == ["r0"]
    assert [each["name"] for each in found["nodes"]] == ["p0", "d0"]


def test_each_router_has_its_own_figures_and_the_cluster_their_sum() -> None:
    nodes = [node("r0", "router"), node("r1", "router"), node("old", "router")]
    found = json.loads(json.dumps(picture_of(status=ClusterStatus("c", "ok", "", nodes), history=history_of(6, 2))))
    figures = {each["name"]: each["figures"] for each in found["routers"]}
    assert figures["old"] is None, "a router of another version publishes nothing"
    assert figures["r0"]["tokens_per_s"] == figures["r1"]["tokens_per_s"] == 25
    assert found["totals"]["tokens_per_s"] == 50
    assert len(found["history"]["tokens_per_s"]) == len(found["history"]["age_s"]) == 6


def test_the_use_of_the_kv_cache_is_that_of_all_nodes_of_a_role() -> None:
    nodes = [
        node("p0", "prefill", kv_usage=0.5, total_blocks=100),
        node("p1", "prefill", kv_usage=0.0, total_blocks=300),
        node("d0", "decode"),
    ]
    found = json.loads(json.dumps(picture_of(status=ClusterStatus("c", "ok", "", nodes))))
    assert found["totals"]["kv"] == [{"role": "prefill", "usage": 0.125, "blocks": 400}]


def test_requests_that_are_not_listed_are_counted() -> None:
    found = picture_of(running=[row(f"r{n}") for n in range(MAX_RUNNING)], num_running=300)
    assert found["more_running"] == 300 - MAX_RUNNING
    assert picture_of()["more_running"] == 0


def test_a_pair_counts_its_recent_hand_offs() -> None:
    ended = [
        row("b", kv_bytes=7),
        row("c", prefill_node="p1", kv_bytes=3),
        row("old", age_s=RECENT_S + 1, kv_bytes=100),
    ]
    alone = row("alone", prefill_node="")
    assert picture_of(ended=[*ended, alone])["pairs"] == [
        {"prefill": "p0", "decode": "d0", "requests": 2, "bytes": 7},
        {"prefill": "p1", "decode": "d0", "requests": 1, "bytes": 3},
    ]


def test_tenants_have_their_shares_of_the_last_minute_and_what_their_requests_waited() -> None:
    row = TenantRow("a", "normal", 1.0, 1, 0, 90.0, 60.0, 2, 3.0, 5.0, 0, 1)
    idle = replace(row, tenant="idle", running=0, placed_last_minute=0, served_last_minute=0.0)
    waits = replace(row, tenant="b", waiting=1, placed_last_minute=0, served_last_minute=20.0)
    ended = replace(idle, tenant="ended", served_last_minute=12.0)
    found = picture_of(tenants=TenantRows([row, waits, ended, idle, replace(row, tenant="")], 240.0))["tenants"]
    assert isinstance(found, list)
    shown = [(each["name"], each["share"], each["wait_ms"]) for each in found]
    assert shown == [("a", 0.25, 1500.0), ("b", round(20 / 240, 4), None), ("ended", 0.05, None)]


def test_events_and_requests_are_bounded_and_the_latest_comes_first() -> None:
    events = [ClusterEvent(n, float(n), "Warning", "NodeLost", f"n{n}") for n in range(100)]
    ended = [row(f"r{n}") for n in range(100)]
    found = json.loads(json.dumps(picture_of(ended=ended, events=events)))
    assert [event["subject"] for event in found["events"]] == [f"n{99 - n}" for n in range(MAX_EVENTS)]
    assert [request["id"] for request in found["ended"]] == [f"r{n}" for n in range(MAX_ENDED)]


def test_who_asks_within_the_time_gets_the_same_data_and_a_failure_is_not_kept() -> None:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"%d" % len(made))
        if len(made) == 2:
            raise RuntimeError("of this moment alone")
        return made[-1]

    clock = FakeClock()
    live = LiveData(make, clock, every_s=2.0)
    assert [live.latest(), live.latest()] == [b"0", b"0"]
    clock.advance(1.9)
    assert live.latest() == b"0"
    clock.advance(0.2)
    with pytest.raises(RuntimeError):
        live.latest()
    assert live.latest() == b"2"
