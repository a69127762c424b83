"""Which nodes get new requests where several versions of a model are up, and which of them may continue a stream."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import NoCapacity
from baton.messages.node import LoadReport, NodeDescription, Role
from baton.messages.node_model import Capability
from baton.messages.sampling import SamplingDefaults
from baton.registry import DesiredState
from router.cards import card_of_nodes
from router.placement.placement import Demand, Origin, choose
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.versions import PASSES_OVER_AFTER_S, Registered, left_out, serving_versions
from router.placement.view import ClusterView
from tests.doubles.fake_clock import FakeClock
from tests.support.router_parts import MODEL, decode, description, prefill, request, view_of

DEMAND = Demand(MODEL, num_prompt_tokens=10, max_tokens=8)


def names_left_out(*nodes: tuple[NodeDescription, int], needs_pairs: bool = False) -> set[str]:
    registered = [Registered(*one) for one in nodes]
    serving = serving_versions(registered, {}, 0.0, needs_pairs=needs_pairs)
    return {incarnation.partition(".")[0] for incarnation in left_out(registered, serving)}


def new(node: NodeDescription) -> NodeDescription:
    return replace(node, model_fingerprint="new")


def lose(view: ClusterView, *names: str, now: float = 1.0) -> None:
    for name in names:
        view.detached(f"{name}.1", "reset", now)


def left_out_in(view: ClusterView) -> set[str]:
    return {candidate.node.node_id for candidate in view.candidates() if candidate.is_left_out}


def statuses(view: ClusterView) -> dict[str, str]:
    return {status.name: status.status for status in view.statuses(0.0, 0.0)}


@pytest.mark.parametrize(
    "difference",
    [{"model_fingerprint": "other"}, {"numerics": "cpu/kv-int8"}, {"dtype": "bfloat16"}, {"bit_exact": False}],
    ids=lambda difference: next(iter(difference)),
)
def test_a_node_with_other_bits_than_most_gets_no_new_requests_and_is_shown_so(difference: dict[str, object]) -> None:
    odd = decode("d3", **difference)
    view = view_of(odd, prefill("p1"), decode("d1"), decode("d2"))
    assert statuses(view) == {"d3": "Incompatible", "p1": "Ready", "d1": "Ready", "d2": "Ready"}
    detail = next(status.detail for status in view.statuses(0.0, 0.0) if status.name == "d3")
    name, value = next(iter(difference.items()))
    assert f"computes other tokens than the 3 nodes that serve: d3 [{name}={value}], p1 [{name}=" in detail
    assert odd.bits != decode("d3").bits
    view.reported("d1.1", LoadReport(running=9))
    view.reported("d2.1", LoadReport(running=9))
    assert choose(view.candidates(), DEMAND).decode.node_id != "d3", "however idle it is"


def test_the_version_with_most_nodes_serves_and_of_equal_ones_one_with_a_pair_and_the_oldest() -> None:
    p1, d1, p2, d2 = prefill("p1"), decode("d1"), new(prefill("p2")), new(decode("d2"))
    assert names_left_out((p1, 1), (d1, 4), (p2, 2), (d2, 3)) == {"p2", "d2"}
    assert names_left_out((p1, 3), (d1, 4), (p2, 2), (d2, 5)) == {"p1", "d1"}
    assert names_left_out((p1, 1), (d1, 1), (p2, 2), (d2, 3), (new(decode("d3")), 4)) == {"p1", "d1"}
    assert names_left_out((p1, 1), (prefill("p3"), 1), (p2, 2), (d2, 3)) == {"p1", "p3"}
    # Many nodes that lack a prefill node serve more than a pair, unless requests are served by pairs alone.
    many = [(d1, 1), (decode("d3"), 1), (decode("d4"), 1), (p2, 2), (d2, 3)]
    assert names_left_out(*many) == {"p2", "d2"}
    assert names_left_out(*many, needs_pairs=True) == {"d1", "d3", "d4"}
    assert names_left_out((d1, 1), (decode("d3"), 1), (d2, 3), needs_pairs=True) == {"d2"}
    assert names_left_out((p1, 1), (p2, 2)) == {"p2"}
    assert names_left_out((p1, 1), (replace(p2, model="another"), 2)) == set()


def test_nodes_of_one_version_without_a_partner_get_requests_only_while_there_is_no_pair() -> None:
    old = decode("d2", link_protocol=6)
    assert names_left_out((prefill("p1"), 1), (decode("d1"), 1), (old, 1)) == {"d2"}
    assert names_left_out((prefill("p1"), 1), (old, 1)) == set()
    alone = view_of(prefill("p1"), old)
    assert statuses(alone) == {"p1": "Ready", "d2": "Ready"}
    assert all("on its KV" in status.detail for status in alone.statuses(0.0, 0.0))
    assert choose(alone.candidates(), DEMAND).decode.node_id == "d2"


def test_the_version_that_serves_changes_as_nodes_are_cordoned_drained_and_replaced() -> None:
    p1, d1, p2, d2 = prefill("p1"), decode("d1"), new(prefill("p2")), new(decode("d2"))
    view = view_of(p1, d1, p2, d2)
    assert left_out_in(view) == {"p2", "d2"}
    view.desired(DesiredState(cordoned=frozenset({"d1"})))
    assert statuses(view) == {"p1": "Incompatible", "d1": "Cordoned", "p2": "Ready", "d2": "Ready"}
    assert left_out_in(view) == {"p1"}
    view.desired(DesiredState())
    assert left_out_in(view) == {"p2", "d2"}
    view.reported("p1.1", LoadReport(draining=True))
    assert left_out_in(view) == {"d1"}
    view.detached("d2.1", "reset", now=1.0)
    assert left_out_in(view) == {"p2"}, "the older one"


def test_a_short_loss_of_nodes_changes_no_version_and_a_lasting_one_does() -> None:
    p1, d1, d3, p2, d2 = prefill("p1"), decode("d1"), decode("d3"), new(prefill("p2")), new(decode("d2"))
    clock = FakeClock()
    view = view_of(p1, d1, d3, p2, d2, clock=clock.monotonic)

    def serving() -> set[str]:
        # The description tells the card, the candidates tell placement.
        names = {one.node.node_id for one in view.candidates() if not one.is_left_out}
        assert names <= {node.node_id for node in view.served_by()}
        return names

    assert serving() == {"p1", "d1", "d3"}
    clock.advance(PASSES_OVER_AFTER_S)
    lose(view, "p1", "d1", now=clock.monotonic())
    assert serving() == {"d3"}
    clock.advance(PASSES_OVER_AFTER_S - 1.0)
    view.attached(d1, clock.monotonic())
    assert serving() == {"d1", "d3"}
    view.attached(p1, clock.monotonic())
    assert serving() == {"p1", "d1", "d3"}
    # The time begins anew.
    lose(view, "p1", "d1", now=clock.monotonic())
    assert serving() == {"d3"}
    clock.advance(PASSES_OVER_AFTER_S - 1.0)
    assert serving() == {"d3"}
    before = view.descriptions()
    clock.advance(1.0)
    assert {node.node_id for node in view.served_by()} == {"p2", "d2"}
    assert serving() == {"p2", "d2"}
    assert view.descriptions() is not before, "requests that wait for nodes look again"
    # It is passed over at once while nothing of the version that serves is left; when that is back, at once again.
    lose(view, "p2", "d2", now=clock.monotonic())
    assert serving() == {"d3"}
    for node in (d2, p2):
        view.attached(node, clock.monotonic())
    assert serving() == {"p2", "d2"}


def test_where_pairs_are_needed_a_version_without_one_gives_way_at_once() -> None:
    clock = FakeClock()
    nodes = prefill("p1"), decode("d1"), decode("d3"), new(prefill("p2")), new(decode("d2"))
    for needs_pairs, names in ((False, {"d1", "d3"}), (True, {"p2", "d2"})):
        view = view_of(*nodes, clock=clock.monotonic, needs_pairs=needs_pairs)
        assert len(view.served_by()) == 3
        clock.advance(PASSES_OVER_AFTER_S)
        view.detached("p1.1", "reset", clock.monotonic())
        assert {one.node.node_id for one in view.candidates() if not one.is_left_out} == names


def test_what_nodes_that_get_no_new_requests_can_do_makes_no_router_ready() -> None:
    embeds_only = {"capabilities": frozenset({Capability.EMBED}), "embedding_size": 2}
    view = view_of(prefill("p1", **embeds_only), prefill("p3", **embeds_only), new(decode("d2")))
    assert Placer().why_not_ready(view.candidates(), MODEL) == ""
    assert view.abilities(MODEL) == {frozenset({Capability.EMBED})}
    lose(view, "p1", "p3", now=0.0)
    assert view.abilities(MODEL) == {decode("d2").can}


def test_a_node_of_the_missing_role_that_gets_no_new_requests_is_named() -> None:
    view = view_of(prefill("p1"), prefill("p3"), new(decode("d2")))
    reason = choose(view.candidates(), DEMAND).reason
    assert reason.text == "no decode node is left but d2, which is Incompatible"
    assert reason.code == "no_decode_node_is_left"


def test_a_begun_stream_is_continued_by_nodes_of_its_version_alone_even_if_they_get_no_new_requests() -> None:
    p1, d1, p2, d2, d3 = prefill("p1"), decode("d1"), new(prefill("p2")), new(decode("d2")), new(decode("d3"))
    view = view_of(p2, d2, d3, p1, d1)
    begun = replace(DEMAND, origin=Origin.of(d1))
    placement = choose(view.candidates(), begun)
    assert placement.prefill is not None
    assert (placement.prefill.node_id, placement.decode.node_id) == ("p1", "d1")
    lose(view, "p1", "d1", now=1.0)
    assert not view.may_continue(Origin.of(d1))
    with pytest.raises(NoCapacity, match=f"only at nodes with the bits {d1.bits}, of which none takes work"):
        choose(view.candidates(), begun)


def test_a_stream_of_a_node_that_is_not_bit_exact_goes_on_at_that_node_alone() -> None:
    p1, d1, d2 = (replace(node, bit_exact=False) for node in (prefill("p1"), decode("d1"), decode("d2")))
    view = view_of(p1, d1, d2)
    assert set(statuses(view).values()) == {"Ready"}
    assert all("not bit-exact" in status.detail for status in view.statuses(0.0, 0.0))
    first = choose(view.candidates(), DEMAND)
    assert first.prefill is not None, "they serve as a pair"
    origin = Origin.of(d1)
    view.reported("d1.1", LoadReport(running=9))
    for policy in Policy:
        placer = Placer(PlacementSettings(policy, require_disaggregation=True))
        for with_room in (False, True):
            exclude = frozenset({"d1.1"})
            args = view.candidates(), request(), exclude, 2, 0.0, 0.0
            placement = placer.choose(*args, with_room=with_room, origin=origin).placement
            assert (placement.prefill, placement.decode) == (p1, d1), "another node may compute the prompt for it"
    view.detached("d1.1", "reset", 1.0)
    assert not view.may_continue(origin)
    with pytest.raises(NoCapacity, match="of which none takes work"):
        choose(view.candidates(), replace(DEMAND, origin=origin))
    first_alone = Origin.of(p1)
    assert choose(view.candidates(), replace(DEMAND, origin=first_alone)).decode is p1, "a stream that it decoded"
    assert [origin.allows(node) for node in (p1, d1, d2, decode("d1"))] == [False, True, False, False]
    assert card_of_nodes([p1, d1], 64, SamplingDefaults()).fingerprint == "", "equal names would promise equal tokens"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_policy_places_new_requests_on_nodes_that_are_ready_and_pairs_of_one_version(seed: int) -> None:
    rng = Random(seed)
    nodes = [
        description(
            f"n{number}",
            rng.choice([Role.PREFILL, Role.DECODE]),
            numerics=rng.choice(["cpu", "cpu", "cuda"]),
            bit_exact=rng.random() < 0.8,
            block_size=rng.choice([4, 4, 6]),
        )
        for number in range(rng.randint(1, 7))
    ]
    view = view_of(*nodes)
    for node in nodes:
        view.reported(node.incarnation, LoadReport(running=rng.randrange(20)))
    placers = [Placer(PlacementSettings(policy)) for policy in Policy]
    for placer in placers:
        for node in nodes:
            placer.on_attached(node)
    origin = rng.choice([None, *(Origin.of(node) for node in nodes)])
    shown = statuses(view)
    assert "Ready" in shown.values()
    exclude = frozenset(node.incarnation for node in nodes if rng.random() < 0.3)
    for placer in placers:
        for with_room in (False, True):
            placement = placer.choose(
                view.candidates(), request(), exclude, 1, 0.0, 0.0, with_room=with_room, origin=origin
            ).placement
            chosen = [node for node in (placement.prefill, placement.decode) if node is not None]
            assert len({node.bits for node in chosen}) == 1
            if origin is None:
                assert all(shown[node.node_id] == "Ready" for node in chosen)
            else:
                assert origin.allows(placement.decode)
                assert placement.decode.bits == origin.bits


def test_the_card_and_the_sizes_are_those_of_the_version_that_serves() -> None:
    large = new(decode("d2", max_model_len=4096))
    view = view_of(prefill("p1"), decode("d1"), large)
    assert [node.node_id for node in view.served_by()] == ["p1", "d1"]
    assert {size.max_model_len for size in view.sizes(0.0)} == {64}
    assert not view.could_hold(replace(DEMAND, max_tokens=1000), 0.0)
    lose(view, "p1", "d1", now=1.0)
    assert [node.node_id for node in view.served_by()] == ["d2"]
    assert 4096 in {size.max_model_len for size in view.sizes(1.0)}


@pytest.mark.parametrize("policy", Policy)
def test_room_on_a_node_that_gets_no_new_requests_is_no_room(policy: Policy) -> None:
    p1, d1, d2 = prefill("p1"), decode("d1", max_num_seqs=2), new(decode("d2", max_num_seqs=2))
    view = view_of(p1, d1, d2)
    view.reported("d1.1", LoadReport(running=9))
    choice = Placer(PlacementSettings(policy)).choose(
        view.candidates(), request(), frozenset(), 1, 0.0, 0.0, with_room=True
    )
    assert choice.placement.prefill is p1
    assert choice.placement.decode is d1, "all decode nodes that may serve it are full, so it waits for one of them"
