"""Where the cost model sends requests, what it learns, and how it explains its choices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baton.errors import InvalidRequest, NoCapacity, TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import BlockStored, KVCacheUpdate
from baton.messages.node import (
    LoadReport,
    NodeDescription,
    Outcome,
    RequestDelta,
    StageTimings,
    StepFigures,
    StepReport,
)
from baton.messages.node_model import GENERATES, Capability
from baton.messages.operator import QueuePlace, RequestExplanation
from baton.messages.sampling import SamplingParams
from baton.messages.spans import EncoderContent, rows_key
from baton.observe.metrics import Distribution, Figure
from baton.wire.codec.operator import REQUEST_EXPLANATION
from router.operations.operator_handler import explained
from router.placement.placer import PlacementSettings, Placer, Policy
from tests.support.placement_fleet import RATES, Fleet, big, decodes, names, pairs_of, prefills
from tests.support.router_parts import decode, prefill, record_of

REGRET = "router_placement_regret_seconds"


def test_the_shortest_queue_and_the_smallest_batch_are_chosen() -> None:
    fleet = Fleet(*prefills("p1", "p2"), *decodes("d1", "d2"))
    fleet.load("p1", running=2, uncomputed=2000)
    fleet.load("p2", running=9, uncomputed=100)
    fleet.load("d1", running=20, context=20_000)
    fleet.load("d2", running=5, context=50_000)
    choice = fleet.choose(1024)
    assert names(choice) == ("p2", "d2")
    assert choice.placement.reason.text == "cheapest pair"


def test_a_cached_prefix_weighs_as_much_as_the_time_to_compute_it() -> None:
    prompt = range(1024)
    fleet = pairs_of("p1 p2", "d1")
    for _ in range(8):
        fleet.has_moved(StageTimings(transfer_ms=1000.0, kv_bytes=1_000_000))  # too slow to pull anything
    fleet.has_cached("p1", prompt)
    # 1,023 tokens take 208 ms, which others pay for, too: 1,000 in its queue weigh less and 1,500 more.
    fleet.load("p1", uncomputed=1000)
    assert names(fleet.choose(prompt)) == ("p1", "d1")
    fleet.load("p1", uncomputed=1500)
    assert names(fleet.choose(prompt)) == ("p2", "d1")
    assert names(fleet.choose(range(7, 1031))) == ("p2", "d1"), "another prompt"
    salted = fleet.choose(prompt, cache_salt="tenant")
    assert names(salted) == ("p2", "d1"), "another tenant"


def test_a_prefix_is_pulled_from_any_node_that_has_it_where_that_is_quicker_than_to_compute_it() -> None:
    prompt = range(1024)
    fleet = pairs_of("p1 p2", "d1")
    fleet.has_cached("d1", prompt[:512])
    fleet.has_cached("p1", prompt[:1008])
    fleet.load("p1", uncomputed=1000)
    choice = fleet.choose(prompt)
    assert names(choice) == ("p2", "d1")
    assert choice.way is not None
    assert (choice.way.terms.cached_tokens, choice.way.terms.pulled_tokens) == (0, 1008)
    held = choice.placement.held_prefix
    assert held is not None
    assert (held.peer.node_id, held.num_tokens) == ("p1", 1008)
    fleet.load("p1")
    assert fleet.choose(prompt).placement.held_prefix is None, "it has it itself"
    assert fleet.choose(prompt, cache_salt="tenant").placement.held_prefix is None, "another tenant"


def test_a_decode_node_that_has_the_prefix_saves_its_transfer() -> None:
    prompt = range(2048)
    slow = StageTimings(transfer_ms=1000.0, kv_bytes=1_000_000)
    fleet = pairs_of("p1", "d1 d2")
    fleet.has_moved(slow)
    fleet.has_cached("d2", prompt)
    fleet.load("d2", running=8, context=4000)
    choice = fleet.choose(prompt)
    assert names(choice) == ("p1", "d2")
    assert choice.way is not None
    assert choice.way.terms.decode_cached_tokens == 2048


def test_a_short_prompt_stays_on_the_decode_node_until_its_streams_would_pay() -> None:
    fleet = Fleet(*prefills("p1"), *decodes("d1"))
    assert names(fleet.choose(64)) == (None, "d1")
    assert fleet.choose(64).placement.reason.text == "cheaper on one node"
    assert names(fleet.choose(600)) == ("p1", "d1"), "more than a decode node may compute"
    fleet.load("d1", running=30, context=3000)
    choice = fleet.choose(64)
    assert names(choice) == ("p1", "d1")
    assert choice.way is not None
    assert choice.query is not None
    alone = choice.query.alone_terms(choice.way.decode)
    assert alone.stall_ms == pytest.approx(30 * 64 * RATES.token_ms, rel=0.1)


def test_a_long_prompt_that_a_decode_node_has_cached_stays_there() -> None:
    prompt = range(2000)
    fleet = Fleet(*prefills("p1"), *decodes("d1", "d2"))
    assert names(fleet.choose(prompt))[0] == "p1"
    fleet.has_cached("d2", prompt)
    assert names(fleet.choose(prompt)) == (None, "d2")
    whole = SamplingParams(max_tokens=64, prompt_logprobs=0)
    assert names(fleet.choose(prompt, sampling_params=whole))[0] == "p1", "its cache is of no use"


def test_a_decode_node_whose_drafts_are_right_is_cheaper() -> None:
    """Its steps take longer, but each yields more tokens; a node whose drafts are wrong only takes longer."""
    fleet = pairs_of("p1", "right wrong plain")
    for name, accepted in (("right", 24), ("wrong", 0)):
        for sequences in (4, 8, 16) * 1000:
            time_ms = RATES.overhead_ms(5 * sequences, 100 * sequences)
            drafted, right = 4 * sequences, accepted * sequences // 8
            figures = StepFigures(time_ms, 0, sequences, 100 * sequences, sequences, drafted, right)
            fleet.report(name, StepReport((), LoadReport(), step=figures))
    for name in ("right", "wrong", "plain"):
        fleet.load(name, running=8, context=800)
    choice = fleet.choose(1024)
    assert names(choice) == ("p1", "right")
    assert choice.query is not None
    assert choice.way is not None
    assert choice.way.prefill is not None
    by_name = {cost.node.node_id: choice.query.pair_terms(choice.way.prefill, cost) for cost in choice.query.costs[1:]}
    one_more_ms = RATES.overhead_ms(5 * 9, 800)
    assert by_name["right"].tokens_per_step == pytest.approx(4.0, rel=0.02)
    assert by_name["right"].token_ms == pytest.approx(one_more_ms / 4.0, rel=0.05)
    assert by_name["wrong"].tokens_per_step == pytest.approx(1.0, abs=0.01)
    assert by_name["wrong"].token_ms == pytest.approx(one_more_ms, rel=0.05)
    assert by_name["plain"].tokens_per_step == 1.0
    assert by_name["plain"].token_ms == pytest.approx(RATES.overhead_ms(9, 800), rel=0.05)


def test_a_burst_is_spread_before_any_node_reports() -> None:
    fleet = Fleet(*prefills("p1", "p2", "p3"), *decodes("d1", "d2"))
    chosen = [names(fleet.place(1024)) for _ in range(12)]
    assert Counter(p for p, _ in chosen) == {"p1": 4, "p2": 4, "p3": 4}
    assert Counter(d for _, d in chosen) == {"d1": 6, "d2": 6}


def test_a_sent_prompt_counts_by_its_tokens_until_its_node_reports_it() -> None:
    fleet = pairs_of("p1 p2", "d1")
    long = fleet.place(4000)
    first = names(long)[0]
    assert first is not None
    other = {"p1": "p2", "p2": "p1"}[first]
    assert [names(fleet.place(600))[0] for _ in range(4)] == [other] * 4
    # It has it, and all but the last of it is computed.
    taken = RequestDelta(AttemptKey(long.request.request_id, 1))
    fleet.report(first, StepReport([taken], LoadReport(running=1, uncomputed_tokens=10)))
    assert names(fleet.place(600))[0] == first


def test_requests_with_the_same_prefix_follow_while_it_is_computed() -> None:
    fleet = pairs_of("p1 p2 p3", "d1")
    prompt = tuple(range(1024))
    first = fleet.place(prompt + (1, 2, 3) * 5)
    second = fleet.choose(prompt + (9, 8, 7) * 5)
    assert names(second)[0] == names(first)[0]
    fleet.placer.end(first.request.request_id)
    assert names(fleet.choose((*prompt, 5, 5)))[0] != names(first)[0], "it is over, and nothing of it was cached"


def test_a_service_level_outweighs_the_cost() -> None:
    fleet = Fleet(*prefills("p1"), *decodes("d1"))
    fleet.load("d1", running=20, context=2000)
    fleet.load("p1", running=3, uncomputed=2800)
    # Alone: nothing is queued but 20 streams lose 20 x 0.2 x 200 = 800 ms. The pair: 600 ms in the queue.
    assert names(fleet.choose(200)) == ("p1", "d1")
    assert names(fleet.choose(200, ttft_slo_ms=100.0)) == (None, "d1")
    assert names(fleet.choose(200, ttft_slo_ms=1.0)) == ("p1", "d1"), "nobody meets it: the cheapest"
    two = pairs_of("p1", "d1 d2")
    two.has_moved(StageTimings(transfer_ms=3000.0, kv_bytes=1_000_000))
    two.has_cached("d1", range(4096))
    two.load("d1", running=40, context=0)
    two.load("d2")
    assert names(two.choose(range(4096)))[1] == "d1"
    assert names(two.choose(range(4096), tpot_slo_ms=10.0))[1] == "d2"


def test_nodes_of_one_role_serve_alone_unless_disaggregation_is_required() -> None:
    lonely = Fleet(*decodes("d1"))
    assert (names(lonely.choose()), lonely.choose().placement.reason.text) == ((None, "d1"), "no prefill node is left")
    strict = PlacementSettings(require_disaggregation=True)
    forbidden = Fleet(*decodes("d1"), settings=strict)
    with pytest.raises(NoCapacity, match="no prefill node is left, and disaggregation is required"):
        forbidden.choose()
    assert names(Fleet(*prefills("p1"), *decodes("d1"), settings=strict).choose(16)) == ("p1", "d1")
    for policy in (Policy.LEAST_LOADED, Policy.ROUND_ROBIN):
        with pytest.raises(NoCapacity, match="disaggregation is required"):
            Fleet(*decodes("d1"), settings=PlacementSettings(policy, True)).choose()
    for policy in (Policy.COST, Policy.LEAST_LOADED):
        one = Fleet(*prefills("p1"), *decodes("d1"), settings=PlacementSettings(policy, True))
        assert names(one.choose(exclude={"p1.1"})) == ("p1", "d1"), "nobody would come for whom to wait"
    with pytest.raises(InvalidRequest, match="more than any node's KV cache holds"):
        lonely.choose(8190)
    with pytest.raises(NoCapacity, match="no node that serves demo is up"):
        Fleet().choose()


def test_a_failing_node_is_skipped_until_a_probe_succeeds() -> None:
    fleet = pairs_of("p1 p2", "d1")
    fleet.load("p2", uncomputed=4000)
    fleet.fails("p1", Outcome.REFUSED, times=3)
    assert names(fleet.choose()) == ("p2", "d1")
    fleet.now += 1.0
    probe = fleet.place()
    assert names(probe) == ("p1", "d1")
    assert names(fleet.choose()) == ("p2", "d1"), "one probe at a time"
    fleet.ended("p1", probe, Outcome.HANDED_OFF)
    assert names(fleet.choose()) == ("p1", "d1")


def test_a_failed_request_of_many_sequences_counts_as_one_failure() -> None:
    fleet = Fleet(*prefills("p1"), *decodes("d1", "d2"))
    choice = fleet.place(1024)
    taken = choice.placement.decode.node_id
    key = AttemptKey(choice.request.request_id, choice.attempt)
    ends = [RequestDelta(key, outcome=Outcome.ERROR, sequence_index=index) for index in range(8)]
    fleet.report(taken, StepReport(ends, LoadReport()))
    assert fleet.open_breakers() == {"node": 0, "pair": 0}


def test_a_pair_that_loses_kv_is_separated_and_both_serve_others() -> None:
    fleet = pairs_of("p1 p2", "d1 d2")
    fleet.load("p2", uncomputed=4000)
    fleet.load("d2", running=30, context=3000)
    fleet.fails("d1", Outcome.KV_LOST, times=2)
    assert names(fleet.choose()) == ("p1", "d2")
    fleet.load("p1", uncomputed=9000)
    assert names(fleet.choose()) == ("p2", "d1")
    assert "router_breakers_open" in {figure.name for figure in fleet.placer.figures(fleet.now)}


def test_a_prefill_node_whose_kv_reaches_no_decode_node_is_skipped_while_there_is_another() -> None:
    fleet = pairs_of("p1 p2", "d1")
    fleet.load("p2", uncomputed=4000)
    fleet.fails("d1", Outcome.KV_LOST, times=2)
    assert names(fleet.choose()) == ("p2", "d1")


def test_a_failed_kv_transfer_counts_against_no_node() -> None:
    fleet = pairs_of("p1", "d1")
    for _ in range(5):
        choice = fleet.place()
        key = AttemptKey(choice.request.request_id, choice.attempt)
        lost = RequestDelta(key, outcome=Outcome.ERROR, error="lost", transfer_cause=TransferCause.LEASE_LOST)
        fleet.report("d1", StepReport([lost], LoadReport()))
        fleet.placer.end(choice.request.request_id)
    assert fleet.open_breakers() == {"node": 0, "pair": 1}


def test_a_node_that_dies_repeatedly_is_skipped_over_its_incarnations() -> None:
    fleet = pairs_of("p1 p2", "d1")
    fleet.load("p2", uncomputed=4000)
    for run in range(1, 4):
        choice = fleet.place()
        assert names(choice)[0] == "p1"
        fleet.view.detached(f"p1.{run}", "died", fleet.now)
        fleet.placer.on_lost(f"p1.{run}", fleet.now)
        fleet.placer.end(choice.request.request_id)
        successor = big(prefill("p1", run=run + 1))
        fleet.view.registered([record_of(node) for node in (successor, *prefills("p2"), *decodes("d1"))])
        fleet.attach([successor], fleet.now - 100)
    assert names(fleet.choose())[0] == "p2"


def test_the_share_of_a_new_node_grows() -> None:
    fleet = pairs_of("p1 p2", "d1")
    late = big(prefill("p3"))
    fleet.view.registered([record_of(node) for node in (*prefills("p1", "p2"), *decodes("d1"), late)])
    fleet.attach([late], fleet.now)
    early = Counter(names(fleet.place())[0] for _ in range(12))
    assert 1 <= early["p3"] <= 2
    fleet.now += 10
    later = Counter(names(fleet.place())[0] for _ in range(24))
    assert later["p3"] > 8, "it catches up"


def test_round_robin_takes_turns_and_least_loaded_follows_the_load() -> None:
    turns = Fleet(*prefills("p1", "p2"), *decodes("d1"), settings=PlacementSettings(Policy.ROUND_ROBIN))
    turns.load("p1", running=50)
    assert [names(turns.place())[0] for _ in range(4)] == ["p1", "p2", "p1", "p2"]
    least = Fleet(*prefills("p1", "p2"), *decodes("d1"), settings=PlacementSettings(Policy.LEAST_LOADED))
    least.load("p1", running=50)
    assert [names(least.place(4))[0] for _ in range(3)] == ["p2"] * 3
    assert least.placer.on_attached(big(prefill("p9"))) is False, "nobody asks for what is not used"


def test_a_decision_is_explained_and_compared_with_its_outcome() -> None:
    fleet = Fleet(*prefills("p1", "p2"), *decodes("d1", "d2"))
    choice = fleet.place(1024)
    (before,) = fleet.placer.explain(choice.request.request_id, fleet.now)
    assert (before.decision.decision, before.decision.attempt, before.best) == ("pair", 1, None)
    ways = {(way.prefill_node, way.decode_node) for way in before.ways}
    assert names(choice) in ways
    assert {("", "d1"), ("", "d2")} < ways
    assert [way.total_ms for way in before.ways] == sorted(way.total_ms for way in before.ways)
    # It took as long as if the prefill node were five times as slow as it is; the other one was free.
    taken, decode_node = names(choice)
    slow = StageTimings(queue_ms=3.0, prefill_ms=1000.0, transfer_ms=5.0, kv_bytes=6_400_000)
    for _ in range(200):
        fleet.report(str(taken), StepReport((), LoadReport(), step=StepFigures(500.0, 512, 0, 0)))
    fleet.placer.note_times(choice.request.request_id, slow, 1010.0, fleet.now)
    (after,) = fleet.placer.explain(choice.request.request_id, fleet.now)
    assert after.best is not None
    assert after.best.prefill_node not in (taken, "")
    assert 600 < after.regret_ms < 1000
    told = explained(after, fleet.now + 2)
    for place in (None, QueuePlace("no node is up", 1.5, 2, 3, 400.0, 300.0)):
        whole = RequestExplanation((replace(told, tenant_counter=5.0, virtual_time=4.0), told), place)
        assert REQUEST_EXPLANATION.from_pb(REQUEST_EXPLANATION.to_pb(whole)) == whole
    assert (told.age_s, told.prefill_node, told.decode_node) == (2, taken, decode_node)
    figures = {(figure.name, *figure.labels.values()): figure for figure in fleet.placer.figures(fleet.now)}
    decisions, regret = figures["router_decisions_total", "pair", "cheapest_pair"], figures[REGRET,]
    assert isinstance(decisions, Figure)
    assert isinstance(regret, Distribution)
    assert decisions.value == 1
    assert regret.total == pytest.approx(after.regret_ms / 1e3)
    assert [count for _, count in regret.buckets][-5:] == [0, 1, 1, 1, 1]
    fleet.placer.end(choice.request.request_id)
    assert fleet.placer.explain("nobody", fleet.now) == []


def test_a_wrong_prediction_for_the_best_choice_is_no_regret() -> None:
    fleet = Fleet(*prefills("p1"), *decodes("d1"))
    choice = fleet.place(1024)
    fleet.placer.note_times(choice.request.request_id, StageTimings(prefill_ms=250.0), 900.0, fleet.now)
    (after,) = fleet.placer.explain(choice.request.request_id, fleet.now)
    assert after.regret_ms == 0.0


def test_adopted_requests_count_like_own_ones() -> None:
    fleet = pairs_of("p1 p2", "d1")
    fleet.load("p2", uncomputed=4000)
    for number in range(3):
        theirs = fleet.choose()
        assert names(theirs) == ("p1", "d1")
        fleet.placer.adopted(theirs.request, number, theirs.placement, fleet.now)
        fleet.ended("p1", replace(theirs, attempt=number), Outcome.ERROR)
        (told,) = fleet.placer.explain(theirs.request.request_id, fleet.now)
        assert (told.decision.reason.code, told.decision.prefill) == ("adopted", "p1")
        fleet.placer.note_times(theirs.request.request_id, StageTimings(transfer_ms=3.0), 20.0, fleet.now)
        (told,) = fleet.placer.explain(theirs.request.request_id, fleet.now)
        outcome = explained(told, fleet.now).outcome
        assert outcome is not None
        assert (outcome.transfer_ms, outcome.best) == (3.0, None)
        fleet.placer.end(theirs.request.request_id)
    last = fleet.choose()
    assert names(last) == ("p2", "d1"), "it failed too often, whoever had asked it"
    fleet.placer.end(last.request.request_id)
    assert fleet.placer.is_idle


def test_a_router_is_ready_if_its_nodes_can_serve_as_required() -> None:
    def why(*nodes: NodeDescription, required: bool = True, model: str = "demo") -> str:
        fleet = Fleet(*nodes, settings=PlacementSettings(require_disaggregation=required))
        return fleet.placer.why_not_ready(fleet.view.candidates(), model)

    assert why(*prefills("p1"), *decodes("d1")) == why(*decodes("d1"), required=False) == ""
    assert why() == "no node can serve"
    assert why(*decodes("d1")) == "no prefill node is left, and disaggregation is required"
    assert why(*prefills("p1")) == "no decode node is left, and disaggregation is required"
    assert why(*decodes("d1"), model="another") == "no node that serves another is up"
    speech = frozenset((Capability.TRANSCRIBE,))
    assert why(prefill(capabilities=speech), decode(capabilities=speech)) == ""
    assert why(prefill(capabilities=speech)) == "no decode node is left, and disaggregation is required"
    assert why(prefill(capabilities=frozenset((Capability.SCORE,)))) == "", "vectors need no decode node"


def test_nothing_is_kept_of_ended_requests() -> None:
    fleet = Fleet(*prefills("p1", "p2"), *decodes("d1"))
    for number in range(20):
        choice = fleet.place(512)
        again = fleet.placer.choose(fleet.view.candidates(), choice.request, frozenset(), 2, 0.0, fleet.now)
        fleet.placer.placed(again, fleet.now)
        if number % 2:
            fleet.placer.end(choice.request.request_id)
        fleet.placer.end(choice.request.request_id)
    assert fleet.placer.is_idle


@pytest.mark.parametrize("policy", [Policy.COST, Policy.ROUND_ROBIN])
def test_a_node_without_rows_of_an_image_hears_who_has_them(policy: Policy) -> None:
    image = EncoderContent.of(b"an image")
    can = {"capabilities": GENERATES | {Capability.IMAGE}}
    nodes = [big(prefill(name), **can) for name in ("p1", "p2", "p3")]
    # The encoder of p0 makes other rows of the image, so no other node hears of p0.
    nodes.append(big(prefill("p0"), **can, numerics="others"))
    settings = PlacementSettings(policy, require_disaggregation=True)
    fleet = Fleet(*nodes, *[big(node, **can) for node in decodes("d1")], settings=settings)

    def told() -> dict[str, str]:
        """For each prefill node that was chosen the one that it hears of; empty: none."""
        found = {}
        for _ in range(8):
            placement = fleet.place(512, contents=(image,)).placement
            assert placement.prefill is not None
            holders = {digest: peer.node_id for digest, peer in placement.holders}
            assert holders.keys() <= {image.digest}
            found[placement.prefill.node_id] = holders.get(image.digest, "")
        return found

    assert set(told().values()) == {""}
    for name in ("p0", "p1"):
        update = KVCacheUpdate(0, 0, [BlockStored([rows_key(image.digest)], tier="encoder")], restart=True)
        assert not fleet.report(name, StepReport((), LoadReport(), update))
    assert told() == {"p1": "", "p2": "p1", "p3": "p1"}
    fleet.placer.on_lost("p1.1", fleet.now)
    assert told() == {"p1": "", "p2": "", "p3": ""}


def test_caches_of_nodes_that_encode_are_watched_under_each_policy() -> None:
    placer = Placer(PlacementSettings(Policy.ROUND_ROBIN))
    assert not placer.on_attached(big(prefill("p1")))
    assert placer.on_attached(big(prefill("p2"), capabilities=GENERATES | {Capability.IMAGE}))
