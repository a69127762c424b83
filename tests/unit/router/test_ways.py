"""Which way serves a request with a target: a pair, a decode node alone, or the prefill node of its prompt."""

from __future__ import annotations

import math

import pytest

from baton.messages.node import LoadReport, StageTimings, StepFigures, StepReport
from router.placement.cost_model import ServiceLevel
from router.placement.fleet_rates import FleetRates, stream_ms
from router.placement.placement import Origin
from router.placement.placer import PlacementSettings
from router.placement.reasons import STAYS
from tests.support.placement_fleet import RATES, Fleet, big, decodes, names, prefills
from tests.support.router_parts import decode


def fleet_with(ttft_ms: float = math.inf, tpot_ms: float = math.inf, **settings: object) -> Fleet:
    """A pair of idle nodes, whose router has these targets."""
    target = ServiceLevel(ttft_ms, tpot_ms)
    return Fleet(*prefills("p1"), *decodes("d1"), settings=PlacementSettings(target=target, **settings))  # type: ignore[arg-type]


def test_a_decode_node_computes_a_long_prompt_if_the_prefill_node_would_be_late() -> None:
    # Of 1,500 tokens, which take 0.3 s, behind 5,000 others.
    for targets, way in (
        ((math.inf, math.inf), ("p1", "d1")),
        ((1000.0, math.inf), ("p1", "d1")),
        ((1000.0, 50.0), (None, "d1")),
        ((3000.0, 50.0), ("p1", "d1")),
    ):
        fleet = fleet_with(*targets)
        fleet.load("p1", running=4, uncomputed=5000)
        fleet.load("d1", running=6, context=1000)
        assert names(fleet.choose(1500)) == way, targets
    named = fleet_with()
    named.load("p1", running=4, uncomputed=5000)
    named.load("d1", running=4, context=1000)
    assert names(named.choose(1500, ttft_slo_ms=1000.0, tpot_slo_ms=50.0)) == (None, "d1"), "the client's own targets"
    for settings in ({"require_disaggregation": True}, {"alone_tokens": 512}):
        bound = fleet_with(1000.0, 50.0, **settings)
        bound.load("p1", running=4, uncomputed=5000)
        assert names(bound.choose(1500)) == ("p1", "d1")


def test_a_decode_node_computes_no_prompt_that_makes_its_streams_too_slow() -> None:
    # A stream of 128 tokens takes 0.78 s, of which a prompt of 2,000 tokens takes a half, and one of 600 a seventh.
    fleet = fleet_with(500.0, 13.0)
    fleet.load("p1", running=4, uncomputed=5000)
    fleet.load("d1", running=4, context=1000)
    assert names(fleet.choose(2000)) == ("p1", "d1")
    assert names(fleet.choose(600)) == (None, "d1")
    fleet.step("d1", tokens=700, sequences=4)
    fleet.load("d1", running=4, context=1000)
    assert names(fleet.choose(600)) == ("p1", "d1"), "prompts of other routers count"
    fleet.now += 2.0
    assert names(fleet.choose(600)) == (None, "d1"), "not for ever"


@pytest.mark.parametrize("num_decoding", [0, 8])
def test_prompts_of_a_prefill_node_that_decodes_spare_its_streams(num_decoding: int) -> None:
    fleet = Fleet(
        *prefills("p1", "p2"), *decodes("d1"), settings=PlacementSettings(target=ServiceLevel(math.inf, 15.0))
    )
    fleet.step("p1", tokens=512, sequences=num_decoding)
    fleet.load("p1", running=num_decoding)
    # The longer queue costs more than what the streams lose, but does not miss their target.
    fleet.load("p2", running=1, uncomputed=40_000)
    assert names(fleet.choose(4000)) == ("p2" if num_decoding else "p1", "d1")


def test_a_stream_stays_with_its_prompt_while_no_decode_node_has_room_or_is_quick_enough() -> None:
    full = LoadReport(running=9, total_blocks=4096, promised_blocks=4096)
    for targets, load, stays in (
        ((math.inf, 50.0), full, True),
        ((1000.0, math.inf), full, False),
        ((math.inf, 50.0), LoadReport(running=9, uncomputed_tokens=512 * 4), False),
        ((math.inf, 50.0), LoadReport(running=40), False),
        ((math.inf, 28.0), LoadReport(running=40), True),
    ):
        fleet = fleet_with(*targets)
        fleet.report("d1", StepReport((), load))
        choice = fleet.choose(1000)
        assert names(choice) == ((None, "p1") if stays else ("p1", "d1")), (targets, load)
        assert (choice.placement.reason is STAYS) == stays
        fleet.placer.placed(choice, fleet.now)
        (explained,) = fleet.placer.explain(choice.request.request_id, fleet.now)
        ways = [(way.prefill_node, way.decode_node) for way in explained.ways]
        assert (("p1", "d1") in ways, ("", "p1") in ways) == (True, stays)


def test_no_stream_stays_that_must_not() -> None:
    full = LoadReport(running=9, total_blocks=4096, promised_blocks=4096)
    strict = fleet_with(math.inf, 50.0, require_disaggregation=True)
    strict.report("d1", StepReport((), full))
    assert names(strict.choose(1000)) == ("p1", "d1")
    begun = fleet_with(math.inf, 50.0)
    begun.report("d1", StepReport((), full))
    assert names(begun.choose(1000, origin=Origin.of(decodes("d1")[0]))) == ("p1", "d1")
    busy = fleet_with(math.inf, 50.0)
    busy.report("d1", StepReport((), full))
    busy.report("p1", StepReport((), full))
    assert names(busy.choose(1000)) == ("p1", "d1"), "the prefill node has no room either"
    halved = fleet_with(math.inf, 50.0)
    halved.report("d1", StepReport((), full))
    halved.load("p1", running=32)
    assert names(halved.choose(1000)) == ("p1", "d1"), "half of its seats are for prompts"


def test_a_decision_is_judged_by_the_prompts_of_then() -> None:
    fleet = fleet_with(500.0, 13.0)
    fleet.load("p1", running=4, uncomputed=5000)
    fleet.load("d1", running=4, context=1000)
    choice = fleet.place(600)
    assert names(choice) == (None, "d1")
    fleet.now += 3600.0
    # So many tokens that the streams there had been too slow with this prompt.
    fleet.step("d1", tokens=1500, sequences=4)
    fleet.placer.note_times(choice.request.request_id, StageTimings(), 100.0, fleet.now)
    (explained,) = fleet.placer.explain(choice.request.request_id, fleet.now)
    assert explained.best is not None
    assert (explained.best.prefill_node, explained.best.decode_node) == ("", "d1")


def test_work_on_prompts_is_forgotten_as_streams_end() -> None:
    rates = FleetRates()
    node = big(decode("d1"))
    rates.attach(node)
    for number in range(200):
        tokens = 200 * (number % 2)
        step_ms = RATES.overhead_ms(4, 400) + tokens * RATES.token_ms
        rates.add_step(node.incarnation, StepFigures(step_ms, tokens, 4, 400), 0.1 * number)
    # Prompts take 40 ms of each 200 ms, and the last step had one.
    usual_ms = stream_ms(RATES.overhead_ms(4, 400), RATES)
    _, work = rates.steps_and_work(node.incarnation, 20.0)
    assert work.prompt_ms / usual_ms == pytest.approx(0.22, rel=0.1)
    assert (work.sequences, work.context_tokens, work.at) == (4, 400, pytest.approx(19.9))
