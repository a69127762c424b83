"""Encode nodes at the router: which one makes the rows of an image, and that no request goes there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from baton.messages.kv_cache import BlockStored, KVCacheUpdate
from baton.messages.node import LoadReport, NodeDescription, Role, StepReport
from baton.messages.node_model import GENERATES, Capability
from baton.messages.spans import EncoderContent, rows_key
from baton.registry import DesiredState
from router.placement.encoders import MOST_MORE, LoadedEncoder, encoder_for
from tests.support.placement_fleet import Fleet, big
from tests.support.router_parts import decode, description, prefill, record_of, view_of

IMAGE = EncoderContent.of(b"an image")
CAN = {"capabilities": GENERATES | {Capability.IMAGE}}


def encoder(name: str, **changes: object) -> NodeDescription:
    """An encode node; its numerics name less than those of a node with a language model."""
    names = {"numerics": "rows", "row_numerics": "rows", "kv_layout": "none"}
    made = {"capabilities": frozenset((Capability.IMAGE,)), **names, **changes}
    return description(name, Role.ENCODE, **made)  # type: ignore[arg-type]


def loaded(**loads: int) -> list[LoadedEncoder]:
    return [LoadedEncoder(encoder(name), load) for name, load in loads.items()]


def test_an_image_stays_with_its_encode_node_while_that_has_not_much_more_to_do() -> None:
    digests = [f"{number}" for number in range(3000)]
    three = {digest: encoder_for(digest, loaded(e0=0, e1=MOST_MORE, e2=0)) for digest in digests}
    counts = Counter(node.node_id for node in three.values() if node is not None)
    assert len(counts) == 3
    assert min(counts.values()) > 900
    two = {digest: encoder_for(digest, loaded(e0=0, e2=0)) for digest in digests}
    # Without one of them the images of the others stay where they are.
    assert all(two[digest] == node for digest, node in three.items() if node is not None and node.node_id != "e1")
    busy = Counter(str(encoder_for(digest, loaded(e0=0, e1=MOST_MORE + 1))) for digest in digests)
    assert len(busy) == 1
    assert encoder_for("a", []) is None


def fleet_of(*encoders: NodeDescription, prefills: Sequence[str] = ("p1",)) -> Fleet:
    """Prefill nodes and a decode node that quantise their KV, and encode nodes."""
    able = {**CAN, "row_numerics": "rows", "numerics": "rows/kv-int8"}
    nodes = [*(big(prefill(name), **able) for name in prefills), big(decode(), **able)]
    fleet = Fleet(*nodes)
    fleet.view.registered([record_of(node) for node in (*nodes, *encoders)])
    fleet.attach(encoders, fleet.now)
    return fleet


def named(fleet: Fleet) -> tuple[str, str]:
    """The node that is said to have rows of IMAGE, and the one that makes them."""
    placed = fleet.place(512, contents=(IMAGE,)).placement
    held, made = dict(placed.holders), dict(placed.encoders)
    return tuple(peers[IMAGE.digest].node_id if peers else "" for peers in (held, made))  # type: ignore[return-value]


def test_rows_are_made_by_an_encode_node_that_is_ready_and_makes_the_same() -> None:
    fleet = fleet_of(encoder("e1"), encoder("e2", row_numerics="others"))
    assert named(fleet) == ("", "e1")
    fleet.view.desired(DesiredState(cordoned=frozenset(("e1",))))
    assert named(fleet) == ("", "")
    fleet.view.desired(DesiredState())
    fleet.report("e1", StepReport((), LoadReport(draining=True)))
    assert named(fleet) == ("", "")


def test_of_the_nodes_with_rows_an_encode_node_is_named_first() -> None:
    fleet = fleet_of(encoder("e1"), encoder("e2"), prefills=("p1", "p2"))
    stored = KVCacheUpdate(0, 0, [BlockStored([rows_key(IMAGE.digest)], tier="encoder")], restart=True)
    fleet.report("p1", StepReport((), LoadReport(), stored))
    found = {named(fleet) for _ in range(8)}
    # p1 has them, and another one hears of p1: nobody makes rows that are there.
    assert found <= {("", ""), ("p1", "")}
    for name in ("e1", "e2"):
        if encoder_for(IMAGE.digest, loaded(e1=0, e2=0)) != encoder(name):
            fleet.report(name, StepReport((), LoadReport(), stored))
            assert {named(fleet) for _ in range(8)} <= {("", ""), ("", name)}


def test_no_request_counts_on_an_encode_node() -> None:
    view = view_of(prefill(), decode(), encoder("e1", max_model_len=10_000, num_blocks=10_000))
    assert {candidate.node.node_id for candidate in view.candidates()} == {"p1", "d1"}
    assert {node.node_id for node in view.descriptions()} == {"p1", "d1"}
    assert {size.max_model_len for size in view.sizes(0.0)} == {64}
    assert view.abilities("demo") == {GENERATES}
    assert [each.node.node_id for each in view.encoders()] == ["e1"]
    assert view.num_attached == 3
    shown = {status.name: (status.role, status.status, status.detail) for status in view.statuses(0.0, 0.0)}
    assert shown["e1"] == ("encode", "Ready", "")
    assert not view_of(encoder("e1")).candidates()
