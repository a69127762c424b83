"""The content of the live page and its feed: one snapshot for all viewers, none without viewers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from baton.errors import Overloaded
from baton.messages.cluster import ClusterStatus
from baton.messages.steering import ClusterEvent
from router.http.live import MAX_VIEWERS, LiveFeed
from router.operations.live_page import MAX_ENDED, MAX_EVENTS, MAX_RUNNING, RECENT_S, live_page_data
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


def test_events_and_requests_are_bounded_and_the_latest_comes_first() -> None:
    events = [ClusterEvent(n, float(n), "Warning", "NodeLost", f"n{n}") for n in range(100)]
    ended = [row(f"r{n}") for n in range(100)]
    found = json.loads(json.dumps(picture_of(ended=ended, events=events)))
    assert [event["subject"] for event in found["events"]] == [f"n{99 - n}" for n in range(MAX_EVENTS)]
    assert [request["id"] for request in found["ended"]] == [f"r{n}" for n in range(MAX_ENDED)]


class CountedSnapshots:
    """Makes numbered snapshots and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> bytes:
        self.made += 1
        return b"%d" % self.made


async def _first(feed: LiveFeed) -> tuple[AsyncGenerator[bytes, None], bytes]:
    snapshots = feed.follow()
    assert isinstance(snapshots, AsyncGenerator)
    return snapshots, await anext(snapshots)


async def test_all_viewers_share_one_snapshot_and_later_ones_get_it_at_once() -> None:
    snapshots = CountedSnapshots()
    feed = LiveFeed(snapshots, every_s=3600)
    viewers = [await _first(feed) for _ in range(3)]
    assert ([seen for _, seen in viewers], snapshots.made, feed.num_viewers) == ([b"1"] * 3, 1, 3)
    for viewer, _ in viewers:
        await viewer.aclose()
    assert feed.num_viewers == 0


async def test_a_slow_viewer_skips_snapshots_and_none_are_made_without_viewers() -> None:
    snapshots = CountedSnapshots()
    feed = LiveFeed(snapshots, every_s=0)
    viewer, _ = await _first(feed)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert int(await anext(viewer)) == snapshots.made > 10
    await viewer.aclose()
    made = snapshots.made
    for _ in range(10):
        await asyncio.sleep(0)
    assert snapshots.made == made


async def test_a_failed_snapshot_is_skipped_and_the_next_one_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    snapshots = CountedSnapshots()

    def draw() -> bytes:
        if snapshots() == b"2":
            raise RuntimeError("of this second alone")
        return b"%d" % snapshots.made

    viewer, first = await _first(LiveFeed(draw, every_s=0))
    assert (first, await anext(viewer)) == (b"1", b"3")
    assert "of this second alone" in caplog.text
    await viewer.aclose()


async def test_too_many_viewers_are_refused() -> None:
    feed = LiveFeed(CountedSnapshots(), every_s=3600)
    viewers = [await _first(feed) for _ in range(MAX_VIEWERS)]
    with pytest.raises(Overloaded):
        await _first(feed)
    assert feed.num_viewers == MAX_VIEWERS
    for viewer, _ in viewers:
        await viewer.aclose()


async def test_a_closed_feed_ends_for_all_viewers() -> None:
    feed = LiveFeed(CountedSnapshots(), every_s=3600)
    viewer, _ = await _first(feed)
    rest = asyncio.ensure_future(anext(viewer, b"over"))
    await asyncio.sleep(0)
    feed.close()
    assert await rest == b"over"
    assert feed.num_viewers == 0
