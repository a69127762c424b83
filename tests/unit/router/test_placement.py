"""The choice of nodes by load with its reason, and the view of nodes that it uses."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest, NoCapacity
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, LoadReport, NodeDescription, Submit
from baton.messages.node_model import GENERATES_AND_EMBEDS, Capability
from baton.messages.pooling import Pooling, PoolingParams
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from router.placement.placement import Candidate, Demand, Placement, choose, demand_of, disagreement, size_of
from router.placement.view import LOST_SHOWN_S, ClusterView
from tests.support.router_parts import MODEL, decode, key, prefill, record_of, request, view_of

DEMAND = Demand(MODEL, num_prompt_tokens=10, max_tokens=8)


def at(node: NodeDescription, load: float = 0.0, last_chosen: int = 0) -> Candidate:
    return Candidate(node, load, last_chosen)


def names(placement: Placement) -> tuple[str | None, str]:
    return (placement.prefill.node_id if placement.prefill else None, placement.decode.node_id)


def test_the_least_loaded_pair_is_chosen() -> None:
    nodes = [at(prefill("p1"), 3), at(prefill("p2"), 1), at(decode("d1"), 2), at(decode("d2"), 5)]
    placement = choose(nodes, DEMAND)
    assert names(placement) == ("p2", "d1")
    assert placement.reason.text == "least loaded pair"


def test_among_equal_nodes_the_longest_unused_is_chosen() -> None:
    nodes = [at(prefill("p1"), 0, 7), at(prefill("p2"), 0, 3), at(decode("d1"), 0, 2), at(decode("d2"), 0, 8)]
    assert names(choose(nodes, DEMAND)) == ("p2", "d1")


@pytest.mark.parametrize(
    "difference",
    [{"model_fingerprint": "other"}, {"numerics": "cuda"}, {"dtype": "bfloat16"}, {"block_size": 6}],
    ids=lambda d: next(iter(d)),
)
def test_both_nodes_of_a_pair_agree_on_their_kv(difference: dict[str, object]) -> None:
    odd, even = prefill("p1", **difference), prefill("p2")
    assert names(choose([at(odd), at(even, 9), at(decode())], DEMAND)) == ("p2", "d1")
    lonely = choose([at(odd), at(decode())], DEMAND)
    assert names(lonely) == (None, "d1")
    assert lonely.reason.text.startswith("no pair agrees on its KV")
    assert lonely.reason.code == "no_pair_agrees_on_its_KV"


def test_block_sizes_of_a_pair_may_differ_if_one_divides_the_other() -> None:
    large, odd = prefill("p1", block_size=8), prefill("p2", block_size=6)
    assert names(choose([at(large, 9), at(odd), at(decode())], DEMAND)) == ("p1", "d1")
    # 6 fits 12, 12 fits 4, and 6 does not fit 4.
    nodes = [at(odd), at(prefill("p3", block_size=12), 5), at(decode())]
    assert names(choose(nodes, DEMAND)) == ("p3", "d1")
    assert disagreement(odd, [odd, decode("d2", block_size=12)]) == ""


def test_nodes_of_one_role_serve_alone_with_the_reason() -> None:
    alone = choose([at(decode())], DEMAND)
    assert (names(alone), alone.reason.text) == ((None, "d1"), "no prefill node is left")
    failed = choose([at(decode()), at(prefill())], DEMAND, {"p1.1"})
    assert (names(failed), failed.reason.text) == ((None, "d1"), "no prefill node is left (1 failed this request)")
    assert failed.reason.code == alone.reason.code == "no_prefill_node_is_left"
    last = choose([at(prefill())], DEMAND)
    assert (names(last), last.reason.text) == ((None, "p1"), "no decode node is left")


def test_a_node_that_is_too_small_is_skipped() -> None:
    small, large = decode("d1", num_blocks=4), decode("d2", num_blocks=5)
    assert names(choose([at(small), at(large, 9)], DEMAND)) == (None, "d2")
    short = decode("d1", max_model_len=17)
    assert names(choose([at(short), at(large, 9)], DEMAND)) == (None, "d2")
    with pytest.raises(InvalidRequest, match="prompt: with max_tokens comes to 18 tokens"):
        choose([at(small)], DEMAND)
    # Of 17 tokens the last one's KV is never stored: 16 fill four blocks.
    assert names(choose([at(small)], Demand(MODEL, 10, 7))) == (None, "d1")


def test_without_a_fitting_node_the_reason_is_given() -> None:
    with pytest.raises(NoCapacity, match="no node that serves demo is up"):
        choose([], DEMAND)
    with pytest.raises(NoCapacity, match="no node that serves demo is up"):
        choose([at(decode(model="other"))], DEMAND)


def test_nodes_of_an_earlier_version_make_plain_vectors_alone() -> None:
    old, new = prefill("p1", embedding_size=4), prefill("p2", capabilities=GENERATES_AND_EMBEDS, embedding_size=4)
    for pooling, is_plain in (
        (PoolingParams(), True),
        (PoolingParams(Pooling.MEAN), False),
        (PoolingParams(normalize=False), False),
        (PoolingParams(dimensions=2), False),
    ):
        demand = demand_of(replace(request(), pooling=pooling))
        assert size_of(old).holds(demand) is is_plain
        assert names(choose([at(old), at(new, 9)], demand)) == (None, "p1" if is_plain else "p2")
    with pytest.raises(NoCapacity, match="those that are have an earlier version"):
        choose([at(old)], demand)


def test_only_nodes_that_can_do_what_is_needed_are_chosen() -> None:
    needs = frozenset((Capability.GENERATE, Capability.LORA))
    demand = replace(DEMAND, needs=needs)
    able = decode("d2", capabilities=needs | {Capability.EMBED})
    assert names(choose([at(decode("d1")), at(able, 9), at(prefill())], demand)) == (None, "d2")
    with pytest.raises(NoCapacity, match="no node that can generate and lora with demo is up"):
        choose([at(decode("d1"))], demand)


def test_a_failed_node_is_used_again_when_no_other_is_left() -> None:
    assert names(choose([at(decode("d1")), at(decode("d2"), 9)], DEMAND, {"d1.1"})) == (None, "d2")
    assert names(choose([at(decode("d1"))], DEMAND, {"d1.1"})) == (None, "d1")
    assert names(choose([at(prefill()), at(decode())], DEMAND, {"p1.1", "d1.1"})) == ("p1", "d1")
    # One that never failed but is too small is nobody.
    assert names(choose([at(decode("d1")), at(decode("d2", num_blocks=4))], DEMAND, {"d1.1"})) == (None, "d1")


def word(view: ClusterView, incarnation: str) -> str | None:
    state = view.state(incarnation)
    return None if state is None else state.value


def test_each_state_of_a_node_has_its_status() -> None:
    view, node = ClusterView(), decode(tp=2, pp=3)
    view.registered([record_of(node)])
    assert word(view, "d1.1") == "Starting"
    assert view.candidates() == ()
    view.attached(node, now=1)
    assert word(view, "d1.1") == "Ready"
    view.reported("d1.1", LoadReport(running=2, waiting=1, waiting_for_remote_kvs=1, total_blocks=4, free_blocks=1))
    (status,) = view.statuses(now=2, wall=5)
    assert (status.running, status.waiting, status.kv_usage, status.age_s) == (2, 2, 0.75, 4)
    assert str(status.shape) == "tp2 pp3"
    view.reported("d1.1", LoadReport(draining=True))
    assert word(view, "d1.1") == "Draining"
    assert view.candidates() == ()
    view.detached("d1.1", "reset", now=4)
    assert word(view, "d1.1") == "Suspect"
    view.registered([])
    assert word(view, "d1.1") == "Lost"
    assert [s.status for s in view.statuses(now=4 + LOST_SHOWN_S - 1, wall=0)] == ["Lost"]
    assert view.statuses(now=4 + LOST_SHOWN_S, wall=0) == ()


def test_a_node_whose_record_says_that_it_drains_is_no_candidate() -> None:
    node = decode()
    view = view_of(node)
    assert [c.node for c in view.candidates()] == [node]
    view.registered([replace(record_of(node), state="draining")])
    assert view.candidates() == ()
    view.registered([record_of(node)])
    assert [c.node for c in view.candidates()] == [node]


def test_an_attached_node_that_left_the_registry_is_shown_as_lost_for_a_while() -> None:
    node = decode()
    view = view_of(node)
    view.registered([])
    assert [s.status for s in view.statuses(now=100, wall=0)] == ["Ready"]
    assert [c.node for c in view.candidates()] == [node]
    view.detached("d1.1", "reset", now=100)
    assert [s.status for s in view.statuses(now=100 + LOST_SHOWN_S - 1, wall=0)] == ["Lost"]
    assert view.statuses(now=100 + LOST_SHOWN_S, wall=0) == ()


def test_a_node_that_was_never_attached_disappears_with_its_record() -> None:
    view = ClusterView()
    view.registered([record_of(decode())])
    assert [s.status for s in view.statuses(now=1, wall=0)] == ["Starting"]
    view.registered([])
    assert view.statuses(now=1, wall=0) == ()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_the_view_reports_which_candidates_have_changed(seed: int) -> None:
    rng, view = Random(seed), ClusterView()
    nodes = [prefill(), *(decode(f"d{number}") for number in range(5))]
    for now in range(40):
        before = view.candidates()
        for node in rng.sample(nodes, rng.randrange(3)):
            match rng.randrange(6):
                case 0:
                    view.registered([record_of(one) for one in nodes if one is not node])
                case 1:
                    view.registered([record_of(one) for one in nodes])
                case 2:
                    view.attached(node, now)
                case 3:
                    view.detached(node.incarnation, "reset", now)
                case 4:
                    view.reported(node.incarnation, LoadReport(running=rng.randrange(9), draining=rng.random() < 0.2))
                case _:
                    view.dispatched(node.incarnation, AttemptKey(f"r{now}", 1))
        seen = view.candidates()
        ready = {s.incarnation for s in view.statuses(now, 0) if s.status in ("Ready", "Incompatible")}
        assert {c.node.incarnation for c in seen} == ready
        changed = seen.changed_since(before)
        if changed is not None:
            renewed = {c.node.incarnation: c for c in changed}
            expected = [renewed.get(c.node.incarnation, c) for c in before]
            assert [*map(id, seen)] == [*map(id, expected)]
        assert seen is before or seen.changed_since(seen) is None
        assert seen.changed_since([*before]) is None


def test_a_nodes_notice_is_its_detail_until_it_is_lost_or_changes_it() -> None:
    node = decode()
    view = view_of(node)
    view.noticed("d1.1", "layouts differ")
    view.noticed("d9.1", "a stranger's")
    assert [s.detail for s in view.statuses(now=1, wall=0)] == ["layouts differ"]
    view.detached("d1.1", "reset", now=2)
    assert [s.detail for s in view.statuses(now=2, wall=0)] == ["reset"]
    view.attached(node, now=3)
    assert [s.detail for s in view.statuses(now=3, wall=0)] == [""]
    view.noticed("d1.1", "layouts differ")
    view.noticed("d1.1", "")
    assert [s.detail for s in view.statuses(now=3, wall=0)] == [""]


def test_a_node_that_can_exchange_kv_with_no_other_is_shown_with_the_reason() -> None:
    view = ClusterView()
    nodes = [prefill(), decode(), decode("d2", block_size=6)]
    view.registered([record_of(node) for node in nodes])
    for node in nodes[1:]:
        view.attached(node, now=1)
    assert [s.detail for s in view.statuses(now=1, wall=0)] == ["", "", ""]
    view.attached(nodes[0], now=1)
    why = "agrees with no prefill node on its KV: d2 [block_size=6], p1 [block_size=4]"
    told = {s.name: (s.status, s.detail) for s in view.statuses(now=1, wall=0)}
    assert told == {"d1": ("Ready", ""), "d2": ("Incompatible", why), "p1": ("Ready", "")}
    view.detached("p1.1", "reset", now=2)
    assert [s.detail for s in view.statuses(now=2, wall=0)] == ["", "", "reset"]


def test_nodes_whose_link_versions_differ_are_not_paired() -> None:
    old, new = prefill(link_protocol=4), decode(link_protocol=5)
    story = disagreement(old, [old, new])
    assert story == "agrees with no decode node on its KV: p1 [link_protocol=4], d1 [link_protocol=5]"
    assert disagreement(old, [old, new, decode("d2", link_protocol=4)]) == ""


def test_a_successor_replaces_the_lost_run() -> None:
    view, first, second = ClusterView(), decode(run=1), decode(run=2)
    view.registered([record_of(first)])
    view.attached(first, now=1)
    view.detached("d1.1", "reset", now=2)
    view.registered([record_of(second, started_at=3)])
    assert [s.incarnation for s in view.statuses(now=2, wall=9)] == ["d1.2"]


def test_lost_nodes_are_forgotten_without_being_asked_for() -> None:
    """Their names may never return, as with an orchestrator that makes new ones."""
    view = ClusterView()
    for number in range(10):
        now, node = number * LOST_SHOWN_S, decode(f"d{number}")
        view.registered([record_of(node)])
        view.attached(node, now)
        view.registered([])
        view.detached(node.incarnation, "gone", now)
    assert [word(view, f"d{number}.1") for number in range(10)] == [None] * 9 + ["Lost"]


def test_load_counts_requests_just_sent_and_those_of_other_routers() -> None:
    node = decode()
    view = view_of(node)

    def load() -> float:
        return view.candidates()[0].load

    for number in (1, 2):
        view.dispatched("d1.1", AttemptKey(f"r{number}", 1))
    assert load() == 2
    view.reported("d1.1", LoadReport(running=0))
    assert load() == 2, "the report is older than what was sent"
    view.reported("d1.1", LoadReport(running=5))
    assert load() == 5, "three of another router"
    view.dispatched("d1.1", key())
    view.released("d1.1", AttemptKey("r1", 1))
    view.released("d1.1", AttemptKey("r1", 1))
    assert load() == 5


def test_the_load_of_a_request_is_its_number_of_sequences() -> None:
    node = decode()
    view = view_of(node)

    def load() -> float:
        return view.candidates()[0].load

    view.dispatched("d1.1", key(), num_sequences=4)
    assert load() == 4
    view.reported("d1.1", LoadReport(running=1))
    assert load() == 4, "the others come when the prompt is computed"
    view.reported("d1.1", LoadReport(running=6))
    assert load() == 6, "two of another router"
    view.released("d1.1", key())
    assert load() == 2


@pytest.mark.parametrize(
    ("leg", "params", "num_sequences"),
    [
        (Leg.WHOLE, SamplingParams(), 1),
        (Leg.DECODE, SamplingParams(n=3), 3),
        (Leg.DECODE, SamplingParams(n=2, beam_width=5), 5),
        (Leg.PREFILL, SamplingParams(n=3), 1),
        (Leg.PREFILL, SamplingParams(n=2, beam_width=5), 1),
    ],
)
def test_a_leg_counts_the_sequences_that_it_runs(leg: Leg, params: SamplingParams, num_sequences: int) -> None:
    assert Submit(key(), leg, RequestSpec((1,), params)).num_sequences == num_sequences


def test_reports_of_unknown_nodes_change_nothing() -> None:
    view = ClusterView()
    view.attached(decode(), now=1)
    view.reported("d1.1", LoadReport(running=1))
    view.detached("d1.1", "reset", now=1)
    view.dispatched("d1.1", key())
    view.released("d1.1", key())
    assert (view.state("d1.1"), view.candidates(), view.statuses(1, 1)) == (None, (), ())
