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
from router.operations.live_page import MAX_ENDED, MAX_EVENTS, RECENT_S, live_page_data
from tests.support.live_cluster_page import node, row


def picture_of(**changed: object) -> dict[str, object]:
    parts: dict[str, object] = {
        "status": ClusterStatus("c", "ok", "", [node("d0", "decode"), node("p0", "prefill"), node("r0", "router")]),
        "running": [row("a")],
        "ended": [],
        "events": [],
        "totals": {"running": 1},
        "router": "r0",
        "wall": 5.0,
    }
    return live_page_data(**{**parts, **changed})  # type: ignore[arg-type]


def test_routers_come_first_then_prefill_then_decode_nodes() -> None:
    nodes = picture_of()["nodes"]
    assert isinstance(nodes, list)
    assert [each["name"] for each in nodes] == ["r0", "p0", "d0"]


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
