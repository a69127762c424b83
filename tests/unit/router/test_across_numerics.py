"""Nodes that compute other bits serve together where the operator permits it: after those of equal bits, and named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.errors import NoCapacity
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import KVFormat
from baton.messages.node import Leg, LoadReport, MoveOut, Outcome, Submit
from baton.messages.sampling import SamplingDefaults
from router.cards import card_of_nodes
from router.flight.flight import Flight
from router.flight.flight_record import FlightRecord, placement_in_record
from router.flight.flight_table import (
    Finish,
    FlightEffect,
    MoveStream,
    MoveTo,
    NodeGone,
    Place,
    Placed,
    SubmitLeg,
)
from router.placement.placement import Demand, Origin, Placement, choose_move, kv_bits_of
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.reasons import ACROSS_NUMERICS, IN_TURN
from router.placement.view import ClusterView
from tests.support.router_parts import MODEL, decode, prefill, request, view_of
from tests.unit.router.test_flight import reported

ACROSS = {"kv_shape": "float32 1*1x(2+2)"}
P_GPU, D_GPU = prefill("pg", numerics="cuda", **ACROSS), decode("dg", numerics="cuda", **ACROSS)
P_CPU, D_CPU, D_CPU2 = prefill("pc", **ACROSS), decode("dc", **ACROSS), decode("dd", **ACROSS)


def statuses(view: ClusterView) -> dict[str, tuple[str, str]]:
    return {one.name: (one.status, one.detail) for one in view.statuses(0.0, 0.0)}


def place(
    view: ClusterView, policy: Policy = Policy.COST, origin: Origin | None = None, *, across: bool = True
) -> Placement:
    placer = Placer(PlacementSettings(policy, alone_tokens=0, across=across))
    for node in view.descriptions():
        placer.on_attached(node)
    return placer.choose(
        view.candidates(), request(), frozenset(), 1, 0.0, 0.0, with_room=True, origin=origin
    ).placement


def names(placement: Placement) -> tuple[str, str]:
    return placement.prefill.node_id if placement.prefill else "-", placement.decode.node_id


@pytest.mark.parametrize("policy", Policy)
def test_a_pair_of_equal_numerics_comes_first_and_one_across_only_with_the_setting(policy: Policy) -> None:
    view = view_of(P_GPU, D_CPU, D_GPU, across=True)
    assert {status for status, _ in statuses(view).values()} == {"Ready"}
    view.reported("dg.1", LoadReport(running=30, total_blocks=64, free_blocks=64))
    assert names(place(view, policy)) == ("pg", "dg"), "however idle the other one is"
    view.detached("dg.1", "it left", 1.0)
    assert "pairs across numerics alone" in statuses(view)["dc"][1]
    crossing = place(view, policy)
    assert (names(crossing), crossing.kv_bits, crossing.reason) == (("pg", "dc"), P_GPU.bits, ACROSS_NUMERICS)
    assert place(view, policy, across=False).prefill is None
    assert (
        Placer(PlacementSettings(require_disaggregation=True, across=True)).why_not_ready(view.candidates(), MODEL)
        == ""
    )


def test_nodes_serve_together_only_where_router_and_both_nodes_are_told_so() -> None:
    for pair in ((P_GPU, decode("dc")), (prefill("pg", numerics="cuda"), D_CPU)):
        view = view_of(*pair, across=True)
        assert sorted(status for status, _ in statuses(view).values()) == ["Incompatible", "Ready"]
    assert "Incompatible" in statuses(view_of(P_GPU, D_CPU))["dc"]
    other_shape = replace(D_CPU, kv_shape="int8 1*1x(2+2)")
    assert "Incompatible" in statuses(view_of(P_GPU, other_shape, across=True))["dc"]
    assert replace(D_CPU, bit_exact=False).family == "" != D_CPU.family == P_GPU.family
    # Nodes of equal numerics fit as before, whatever they are told.
    assert KVFormat.of(P_CPU).fits(KVFormat.of(decode("dc")))
    assert {status for status, _ in statuses(view_of(P_CPU, decode("dc"))).values()} == {"Ready"}


def test_a_router_with_nodes_of_several_numerics_promises_no_fingerprint() -> None:
    nodes = [P_GPU, D_CPU]
    assert card_of_nodes(nodes, 64, SamplingDefaults()).fingerprint == ""
    assert card_of_nodes([P_GPU, D_GPU], 64, SamplingDefaults()).fingerprint


@pytest.mark.parametrize("policy", Policy)
def test_a_stream_crosses_only_when_no_node_of_its_bits_is_left(policy: Policy) -> None:
    view = view_of(P_CPU, D_CPU, D_GPU, across=True)
    origin = Origin.of(D_GPU, across=True)
    view.reported("dg.1", LoadReport(running=30))
    assert place(view, policy, origin).decode is D_GPU
    view.detached("dg.1", "it left", 1.0)
    assert view.may_continue(origin)
    assert not view.may_continue(Origin.of(D_GPU))
    assert names(place(view, policy, origin)) == ("pc", "dc")
    with pytest.raises(NoCapacity, match="of which none takes work"):
        place(view, policy, Origin.of(D_GPU))


def test_a_move_crosses_only_when_no_node_of_equal_numerics_takes_streams() -> None:
    view = view_of(D_GPU, D_CPU, D_CPU2, across=True)
    exact = Demand(MODEL, 3, 8, origin=Origin.of(D_CPU, across=True))
    view.reported("dd.1", LoadReport(running=9))
    assert choose_move(view.candidates(), exact, D_CPU) is D_CPU2, "however idle the other one is"
    view.reported("dd.1", LoadReport(draining=True))
    assert choose_move(view.candidates(), exact, D_CPU) is D_GPU
    with pytest.raises(NoCapacity):
        choose_move(view.candidates(), replace(exact, origin=Origin.of(D_CPU)), D_CPU)
    # A node that does not know of KV of other numerics would cache it as its own.
    older = view_of(D_CPU, decode("older"))
    assert choose_move(older.candidates(), exact, D_CPU).node_id == "older"
    with pytest.raises(NoCapacity):
        choose_move(older.candidates(), exact, D_CPU, kv_bits=P_GPU.bits)


def test_kv_keeps_the_names_of_all_that_computed_it() -> None:
    assert kv_bits_of(P_CPU, D_CPU) == ""
    assert kv_bits_of(D_CPU, D_CPU2, P_GPU.bits) == kv_bits_of(P_GPU, D_CPU) == P_GPU.bits
    third = decode("dt", numerics="third", **ACROSS)
    assert kv_bits_of(D_CPU, third, P_GPU.bits) not in ("", P_GPU.bits, D_CPU.bits)


class FlightOf:
    """A flight that may cross, and the answers to its last event."""

    def __init__(self, first: Placement, *, n: int = 1) -> None:
        self.flight = Flight(request(max_tokens=8, n=n), may_cross=True)
        self.flight.start()
        self.effects: Sequence[FlightEffect] = ()
        self.placed(first)

    def placed(self, placement: Placement) -> list[Submit]:
        self.effects = self.flight.handle(Placed(placement))
        return [effect.submit for effect in self.effects if isinstance(effect, SubmitLeg)]

    def lose(self, name: str) -> Origin | None:
        """Lose a node; returns the origin for which nodes are wanted."""
        (wanted,) = (
            effect for effect in self.flight.handle(NodeGone(f"{name}.1", "died")) if isinstance(effect, Place)
        )
        return wanted.origin

    def tokens(self, name: str, attempt: int, at: int, *tokens: int, outcome: Outcome | None = None) -> bool | None:
        """Report tokens; returns what the client is told of bits if that is the end."""
        effects = self.flight.handle(reported(name, attempt, at, tokens, outcome=outcome))
        ends = [effect.bit_exact for effect in effects if isinstance(effect, Finish)]
        return ends[0] if ends else None


def test_the_decode_leg_of_a_pair_across_names_whose_kv_it_gets_and_its_client_hears_of_it() -> None:
    one = FlightOf(Placement(P_GPU, D_CPU, ACROSS_NUMERICS, kv_bits=P_GPU.bits))
    submits = [effect.submit for effect in one.effects if isinstance(effect, SubmitLeg)]
    assert {submit.leg: submit.kv_bits for submit in submits} == {Leg.PREFILL: "", Leg.DECODE: P_GPU.bits}
    one.tokens("pg", 1, 0, 5)
    assert one.tokens("dc", 1, 1, 6, outcome=Outcome.LENGTH) is False
    pure = FlightOf(Placement(P_CPU, D_CPU, IN_TURN))
    pure.tokens("pc", 1, 0, 5)
    assert pure.tokens("dc", 1, 1, 6, outcome=Outcome.LENGTH) is True


def test_a_stream_is_bit_exact_until_nodes_of_other_numerics_have_added_to_it() -> None:
    one = FlightOf(Placement(None, D_GPU, IN_TURN))
    one.tokens("dg", 1, 0, 5, 6)
    assert one.lose("dg") == (exact := Origin.of(D_GPU, across=True))
    assert not exact.is_mixed
    # An attempt at other nodes that brings nothing changes nothing.
    one.placed(Placement(None, D_CPU, IN_TURN))
    assert one.lose("dc") == exact
    one.placed(Placement(None, D_CPU2, IN_TURN))
    one.tokens("dd", 3, 2, 7)
    assert one.lose("dd") == replace(exact, is_mixed=True)
    # It stays so, back at nodes like its first one.
    one.placed(Placement(None, D_GPU, IN_TURN))
    assert one.tokens("dg", 4, 3, 8, outcome=Outcome.LENGTH) is False


def test_sequences_that_are_computed_again_and_compared_do_not_cross() -> None:
    several = FlightOf(Placement(None, D_GPU, IN_TURN), n=2)
    several.tokens("dg", 1, 0, 5)
    origin = several.lose("dg")
    assert origin is not None
    assert origin.widened is None


def test_a_moved_stream_takes_along_that_its_kv_is_of_other_numerics() -> None:
    one = FlightOf(Placement(P_GPU, D_CPU, ACROSS_NUMERICS, kv_bits=P_GPU.bits))
    one.tokens("pg", 1, 0, 5)
    one.tokens("dc", 1, 1, 6)
    effects = one.flight.handle(MoveTo(D_CPU2, 64))
    (submit,) = (effect.submit for effect in effects if isinstance(effect, SubmitLeg))
    assert submit.kv_bits == P_GPU.bits
    (move,) = (effect.move for effect in effects if isinstance(effect, MoveStream))
    assert isinstance(move, MoveOut)
    one.tokens("dc", 1, 2, 7, outcome=Outcome.HANDED_OFF)
    assert one.flight.kv_bits == P_GPU.bits
    assert one.tokens("dd", 2, 3, 8, outcome=Outcome.LENGTH) is False


def record(placement: Placement, origin: Origin) -> FlightRecord:
    prompt = placement.prefill.incarnation if placement.prefill else ""
    made = request().without_prompt(), 7, 1, prompt, placement.decode.incarnation, 0, "r0", 0.0
    return FlightRecord(*made, origin=origin, kv_bits=placement.kv_bits)


def test_another_router_learns_whether_the_stream_is_bit_exact() -> None:
    """With nothing to tell, the record is that of routers which know of no pairs across numerics."""
    plain = json.loads(record(Placement(None, D_CPU, IN_TURN), Origin.of(D_CPU)).to_json())
    assert "kv_bits" not in plain
    assert plain["origin"].keys() == {"bits", "incarnation"}
    crossing = Placement(P_GPU, D_CPU, ACROSS_NUMERICS, kv_bits=P_GPU.bits)
    first = Flight(request(), may_cross=True)
    first.start()
    first.handle(Placed(crossing))
    written = record(crossing, first.origin_with(crossing))
    assert json.loads(written.to_json())["origin"]["is_mixed"] is True
    # The prefill node is gone meanwhile, and the client has nothing yet.
    found = placement_in_record(written, [], {"dc.1": D_CPU})
    assert found is not None
    second = Flight(request(), may_cross=True)
    second.adopt(AttemptKey("r", 1, 7), found)
    assert not second.bit_exact
    assert second.kv_bits == P_GPU.bits
