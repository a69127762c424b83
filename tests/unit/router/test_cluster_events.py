"""The events of a cluster that operators see, and how long they are kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.registry.desired import DesiredState
from router.operations.cluster_events import ClusterChange, ClusterSnapshot, EventRing, NodeSnapshot, cluster_changes
from router.placement.known_node import NodeState

READY = NodeSnapshot("d1", "decode", "h:1", NodeState.READY)
CALM = ClusterSnapshot(nodes={"d1.a": READY}, has_served=True)


def event_names(before: ClusterSnapshot, after: ClusterSnapshot) -> list[tuple[str, str]]:
    return [(each.reason, each.subject) for each in cluster_changes(before, after)]


def with_node(**changes: object) -> ClusterSnapshot:
    return replace(CALM, nodes={"d1.a": replace(READY, **changes)})  # type: ignore[arg-type]


def test_an_unchanged_cluster_makes_no_events() -> None:
    assert cluster_changes(CALM, replace(CALM)) == []


def test_a_node_that_joins_drains_or_leaves_makes_events() -> None:
    starting = with_node(state=NodeState.STARTING)
    assert cluster_changes(ClusterSnapshot(), starting) == [ClusterChange("NodeJoined", "d1", "d1.a", "decode at h:1")]
    assert event_names(starting, CALM) == [("NodeReady", "d1")]
    assert event_names(ClusterSnapshot(), CALM) == [("NodeJoined", "d1"), ("NodeReady", "d1")]
    draining = with_node(state=NodeState.DRAINING, was_draining=True)
    assert event_names(CALM, draining) == [("NodeDraining", "d1")]
    silent, gone = (with_node(state=state, was_draining=True) for state in (NodeState.SUSPECT, NodeState.LOST))
    for before in (CALM, draining):
        assert cluster_changes(before, gone) == [ClusterChange("NodeLeft", "d1", "d1.a", "drained")]
    assert event_names(draining, silent) == [("NodeLeft", "d1")]
    assert event_names(silent, gone) == [], "it has left, and is not lost"
    assert event_names(CALM, ClusterSnapshot()) == [("NodeLeft", "d1")]


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (NodeState.READY, NodeState.SUSPECT, ["NodeSuspect"]),
        (NodeState.SUSPECT, NodeState.READY, ["NodeReady"]),
        (NodeState.SUSPECT, NodeState.LOST, ["NodeLost"]),
        (NodeState.READY, NodeState.LOST, ["NodeLost"]),
        (NodeState.LOST, NodeState.SUSPECT, []),
        (NodeState.READY, NodeState.CORDONED, []),
        (NodeState.CORDONED, NodeState.READY, []),
    ],
)
def test_changes_of_a_nodes_state_make_events(before: NodeState, after: NodeState, reasons: list[str]) -> None:
    found = cluster_changes(with_node(state=before), with_node(state=after, detail="silent"))
    assert [each.reason for each in found] == reasons
    assert all(each.is_warning and each.detail == "silent" for each in found if each.reason != "NodeReady")


def test_a_node_that_gets_no_new_requests_any_more_and_one_that_gets_them_again_make_events() -> None:
    left_out = with_node(left_out="computes other tokens")
    change = ClusterChange("NodeIncompatible", "d1", "d1.a", "computes other tokens", is_warning=True)
    assert cluster_changes(CALM, left_out) == [change]
    assert cluster_changes(left_out, with_node(left_out="computes others than d2")) == []
    assert event_names(ClusterSnapshot(), left_out)[-1] == ("NodeIncompatible", "d1")
    assert event_names(left_out, CALM) == [("NodeCompatible", "d1")]
    assert event_names(left_out, with_node(state=NodeState.CORDONED)) == []


def test_removing_a_lost_node_from_the_list_makes_no_event() -> None:
    assert cluster_changes(with_node(state=NodeState.LOST), ClusterSnapshot()) == []


def test_a_change_of_role_makes_events() -> None:
    draining = with_node(state=NodeState.DRAINING)
    after = ClusterSnapshot(nodes={"d1.b": NodeSnapshot("d1", "prefill", "h:1", NodeState.READY)})
    assert event_names(draining, after) == [
        ("NodeLeft", "d1"),
        ("NodeJoined", "d1"),
        ("RoleChanged", "d1"),
        ("NodeReady", "d1"),
    ]
    assert cluster_changes(draining, after)[2].detail == "decode to prefill"


def test_cordons_and_wanted_roles_make_events() -> None:
    wanted = replace(CALM, desired=DesiredState(frozenset({"d1", "d2"}), prefill=frozenset({"d1"})))
    assert event_names(CALM, wanted) == [("Cordoned", "d1"), ("Cordoned", "d2"), ("RoleWanted", "d1")]
    assert event_names(wanted, CALM) == [("Uncordoned", "d1"), ("Uncordoned", "d2")]


def test_a_cluster_that_starts_is_not_unavailable() -> None:
    starting = ClusterSnapshot(why_unserved="no node is up")
    assert event_names(ClusterSnapshot(), starting) == []
    assert event_names(starting, replace(CALM, nodes={})) == [("ClusterServes", "")]
    assert event_names(CALM, replace(CALM, why_unserved="no node is up")) == [("ClusterUnavailable", "")]


def test_a_failed_probe_is_an_event_of_its_own_name() -> None:
    for condition in ("KvProbeFailed", "KvPairSlow"):
        shown = replace(READY, notice=f"{condition}: d1 and known bytes of p1")
        assert event_names(CALM, replace(CALM, nodes={"d1.a": shown})) == [(condition, "d1")]


def test_changes_of_breakers_links_registry_routers_and_health_make_events() -> None:
    bad = ClusterSnapshot(
        nodes={"d1.a": replace(READY, notice="KV layouts differ")},
        routers={"r1.a": "r1"},
        open_breakers=frozenset({"d1", "p1->d1"}),
        registry_answers=False,
        why_unserved="no node can serve",
        has_served=True,
    )
    assert event_names(CALM, bad) == [
        ("RegistryLost", ""),
        ("LinkRefused", "d1"),
        ("RouterJoined", "r1"),
        ("BreakerOpened", "d1"),
        ("BreakerOpened", "p1->d1"),
        ("ClusterUnavailable", ""),
    ]
    assert event_names(bad, CALM) == [
        ("RegistryBack", ""),
        ("RouterLeft", "r1"),
        ("BreakerClosed", "d1"),
        ("BreakerClosed", "p1->d1"),
        ("ClusterServes", ""),
    ]


async def test_events_are_numbered_and_the_oldest_are_dropped() -> None:
    times = iter(range(100))
    ring = EventRing("r1.a", lambda: float(next(times)), size=3)
    assert ring.after(0) == []
    for index in range(5):
        ring.record("NodeReady", f"n{index}", is_warning=index == 4)
    found = ring.after(0)
    assert [(each.seq, each.subject, each.time) for each in found] == [(3, "n2", 2.0), (4, "n3", 3.0), (5, "n4", 4.0)]
    assert [each.severity for each in found] == ["Normal", "Normal", "Warning"]
    assert {each.router for each in found} == {"r1.a"}
    assert [each.seq for each in ring.after(4)] == [5]
    assert ring.after(5) == ring.after(99) == []


async def test_a_follower_gets_past_events_and_then_new_ones() -> None:
    ring = EventRing("r1.a", lambda: 0.0)
    ring.record("first")
    following = ring.follow(0)
    assert (await anext(following)).reason == "first"
    coming = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    assert not coming.done()
    ring.record("second")
    ring.record("third")
    assert (await coming).reason == "second"
    assert (await anext(following)).reason == "third"
