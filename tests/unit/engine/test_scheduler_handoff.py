"""The two legs of a hand-off, each in one engine with a fake connector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.connector import ArrivedKV, ExternalTokens, KVTransferOutput
from baton.engine.request import Request, RequestStatus
from baton.errors import DuplicateRequest, TransferCause
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from tests.doubles.fake_connector import FakeConnector
from tests.doubles.fake_runner import prompt_slots
from tests.support.engine_rig import EngineRig, prompt_of

# --- the prefill leg ---


def test_a_prefill_leg_offers_as_it_computes_and_hands_off_with_its_first_token() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add("p", 18, leg=Leg.PREFILL, max_tokens=50)
    offered = []
    while rig.core.has_work():
        rig.step()
        if "p" in rig.connector.offers:
            offered.append(rig.connector.offers["p"])
    assert offered == [((1, 2, 3, 4, 5), 8), ((1, 2, 3, 4, 5), 16)]
    assert rig.connector.leased["p"] == ((1, 2, 3, 4, 5), 18)
    assert rig.tokens["p"] == rig.expected("p", 1)
    assert rig.reason("p") is Outcome.HANDED_OFF
    assert rig.requests["p"].outcome is Outcome.HANDED_OFF


@pytest.mark.parametrize(("params", "reason"), [({"max_tokens": 1}, Outcome.LENGTH), ({}, Outcome.STOP)])
def test_a_prefill_leg_whose_first_token_stops_it_is_not_handed_off(
    rig: EngineRig, params: dict[str, Any], reason: Outcome
) -> None:
    first = EngineRig()
    first.add("p", prompt_of(10), max_tokens=1)
    rig.add("p", prompt_of(10), leg=Leg.PREFILL, eos=frozenset(first.expected("p", 1)), **params)
    if params:
        rig.requests["p"].eos_token_ids = frozenset()
    rig.run()
    assert rig.tokens["p"] == first.expected("p", 1)
    assert rig.reason("p") is reason


def test_leased_blocks_stay_until_released_and_can_be_found_meanwhile() -> None:
    rig = EngineRig(num_blocks=11)
    rig.complete("p", 18, leg=Leg.PREFILL)
    stats = rig.scheduler.make_stats()
    assert (stats.leased_blocks, stats.free_blocks) == (5, 5)
    with pytest.raises(DuplicateRequest):
        rig.scheduler.add_request(Request("p", RequestSpec([1], rig.requests["p"].sampling_params)))
    rig.begin("other", 30, max_tokens=1)
    assert rig.requests["other"].status is RequestStatus.WAITING, "leased blocks are not available"
    rig.complete("same", [*rig.requests["p"].prompt_token_ids, 1], max_tokens=1)
    assert rig.ends["same"].num_cached_tokens == 16
    block_ids, num_tokens = rig.connector.leased["p"]
    assert rig.runner.read_slots(block_ids, num_tokens) == prompt_slots(rig.requests["p"].prompt_token_ids)
    rig.transfer(released=["p"])
    assert rig.scheduler.make_stats().leased_blocks == 0
    rig.run_right("other")


def test_a_prefix_hit_is_offered_like_computed_blocks() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.complete("first", 18, leg=Leg.PREFILL)
    rig.complete("second", rig.requests["first"].prompt_token_ids, leg=Leg.PREFILL)
    block_ids, num_tokens = rig.connector.leased["second"]
    assert num_tokens == 18
    assert list(block_ids[:4]) == [1, 2, 3, 4]
    assert rig.ends["second"].num_cached_tokens == 16
    rig.transfer(released=["first"])
    assert rig.scheduler.make_stats().leased_blocks == 5
    rig.transfer(released=["second"])
    assert rig.scheduler.make_stats().leased_blocks == 0


def test_an_aborted_prefill_leg_keeps_what_a_peer_may_be_reading() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.begin("p", 18, leg=Leg.PREFILL)
    rig.abort("p")
    assert rig.scheduler.make_stats().leased_blocks == 5
    rig.transfer(released=["p"])
    assert rig.scheduler.make_stats().leased_blocks == 0


def test_a_prefill_leg_is_never_preempted() -> None:
    """A peer may be reading its blocks, so the request before it is preempted instead."""
    rig = EngineRig(num_blocks=11, max_num_batched_tokens=4, max_num_seqs=3)
    rig.begin("stream", 3, max_tokens=30)
    rig.add("p", 32, leg=Leg.PREFILL)
    preempted: list[str] = []
    while "p" not in rig.ends:
        rig.step()
        preempted += [name for kind, name, _ in rig.events() if kind == "preempted"]
    assert preempted == ["stream"]
    assert rig.reason("p") is Outcome.HANDED_OFF
    rig.transfer(released=["p"])
    rig.run_right("stream")


# --- the decode leg ---


def test_a_decode_leg_waits_for_its_kv_and_goes_on_with_the_second_token() -> None:
    rig = EngineRig()
    rig.begin("d", 10, leg=Leg.DECODE, max_tokens=5)
    load = rig.connector.loads["d"]
    assert (len(load.block_ids), load.num_local_tokens, load.num_external_tokens) == (3, 0, 10)
    assert rig.requests["d"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    stats = rig.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_remote_kvs) == (0, 1, 1)
    assert rig.complete_transfer("d") == [], (
        "the first token comes from the prefill node; here it goes with the second one"
    )
    output = rig.scheduler.schedule()
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, list(new.output_token_ids)) == (10, rig.expected("d", 1))
    assert output.num_scheduled_tokens == {"d": 1}, "the last prompt token is not computed again"
    (first,) = rig.commit(output)
    assert (first.first_index, first.new_token_ids, first.num_external_tokens) == (0, rig.expected("d", 2), 10)
    rig.run_right("d")
    assert rig.reason("d") is Outcome.LENGTH
    assert rig.events() == [
        ("queued", "d", 10),
        ("remote_kv_requested", "d", 10),
        ("remote_kv_arrived", "d", 10),
        ("scheduled", "d", 10),
        ("finished", "d", 5),
    ]


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "local"), [(16, 9, 8), (3, 3, 0), (4, 4, 0), (5, 5, 4), (8, 8, 4), (9, 9, 8)]
)
def test_only_blocks_that_are_not_cached_are_loaded_and_always_the_last(
    rig: EngineRig, num_tokens: int, num_cached: int, local: int
) -> None:
    prompt = prompt_of(num_tokens)
    rig.complete("before", prompt[:num_cached], max_tokens=1)
    rig.begin("d", prompt, leg=Leg.DECODE, max_tokens=3)
    load = rig.connector.loads["d"]
    assert (load.num_local_tokens, load.num_external_tokens) == (local, num_tokens - local)
    assert load.block_ids[: local // 4] == tuple(range(1, 1 + local // 4)), "the cached blocks come first"
    rig.complete_transfer("d")
    rig.run_right("d")
    assert (rig.ends["d"].num_cached_tokens, rig.ends["d"].num_external_tokens) == (local, num_tokens - local)


def test_nothing_is_found_in_blocks_whose_kv_has_not_arrived() -> None:
    rig = EngineRig()
    prompt = prompt_of(13)
    rig.begin("d", prompt, leg=Leg.DECODE, max_tokens=2)
    rig.complete("early", prompt, max_tokens=2)
    assert rig.ends["early"].num_cached_tokens == 0
    assert rig.tokens["early"] == rig.expected("early", 2)
    rig.abort("d")
    rig.transfer(released=["d"])
    rig.scheduler.kv_cache_manager.reset_prefix_cache()

    rig.begin("d2", prompt, leg=Leg.DECODE, max_tokens=2)
    rig.complete_transfer("d2")
    rig.complete("late", prompt, max_tokens=2)
    assert rig.ends["late"].num_cached_tokens == 12
    assert rig.tokens["late"] == rig.expected("late", 2)


def test_a_request_whose_kv_arrived_joins_the_next_step_before_new_requests() -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.add("stream", 4, max_tokens=30)
    rig.begin("d", 10, leg=Leg.DECODE, max_tokens=5)
    rig.add("newcomer", 4, max_tokens=5)
    rig.complete_transfer("d")
    output = rig.scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["stream", "d"]
    rig.commit(output)


def test_a_long_prompt_leaves_budget_for_requests_whose_kv_arrived() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add("d", 10, leg=Leg.DECODE, max_tokens=5)
    rig.begin("long", 60, max_tokens=1)
    rig.complete_transfer("d")
    assert rig.scheduler.schedule().num_scheduled_tokens == {"long": 7, "d": 1}


def test_loads_do_not_need_a_seat_but_are_bounded() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.begin("stream", 4, max_tokens=40)
    rig.add("d0", 8, leg=Leg.DECODE, max_tokens=3)
    rig.begin("d1", 8, leg=Leg.DECODE, max_tokens=3)
    assert list(rig.connector.loads) == ["d0"]
    rig.complete_transfer("d0")
    rig.step()
    assert list(rig.connector.loads) == ["d0"], "it still waits for the seat"
    rig.run_right("d0")
    assert rig.requests["d1"].status is RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.mark.parametrize("num_tokens", [7, 8])
def test_loads_whose_prompts_fill_the_pool_do_not_deadlock(num_tokens: int) -> None:
    """Each first token's slot is reserved with the prompt, so no request waits for a block of a waiting request."""
    rig = EngineRig(num_blocks=7)
    for number in range(4):
        rig.add(f"d{number}", num_tokens, leg=Leg.DECODE, max_tokens=4)
    for _ in range(20):
        rig.run()
        for name in [name for name in rig.connector.loads if name not in rig.ends]:
            if rig.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                rig.complete_transfer(name)
    for number in range(4):
        assert rig.tokens[f"d{number}"] == rig.expected(f"d{number}", 4)


def test_two_loads_share_a_prefix_in_a_pool_that_fits_one() -> None:
    rig = EngineRig(num_blocks=6)
    prompt = prompt_of(16)
    rig.add("d0", prompt, leg=Leg.DECODE, max_tokens=3)
    rig.begin("d1", prompt, leg=Leg.DECODE, max_tokens=3)
    assert list(rig.connector.loads) == ["d0"]
    assert not rig.core.has_work()
    rig.complete_transfer("d0")
    rig.run()
    assert rig.connector.loads["d1"].num_local_tokens == 12
    rig.complete_transfer("d1")
    rig.run()
    assert rig.tokens["d0"] == rig.tokens["d1"] == rig.expected("d0", 3)


def test_a_preempted_decode_leg_is_recomputed_on_its_node() -> None:
    rig = EngineRig(num_blocks=8)
    rig.add("old", 8, max_tokens=16)
    rig.begin("d", 8, leg=Leg.DECODE, max_tokens=16)
    rig.complete_transfer("d")
    rig.run()
    assert rig.requests["d"].num_preemptions >= 1
    assert rig.connector.loads == {}
    assert rig.tokens["d"] == rig.expected("d", 16)
    assert rig.tokens["old"] == rig.expected("old", 16)


@pytest.mark.parametrize("how", ["max_tokens", "eos", "stop token"])
def test_a_first_token_that_arrives_with_the_kv_can_end_the_request(how: str) -> None:
    rig = EngineRig()
    rig.add("d", 10, leg=Leg.DECODE, max_tokens=1 if how == "max_tokens" else 9)
    (first,) = rig.expected("d", 1)
    if how == "eos":
        rig.requests["d"].eos_token_ids = frozenset({first})
    elif how == "stop token":
        rig.abort("d")
        rig.add("d2", prompt_of(10), leg=Leg.DECODE, max_tokens=9, stop_token_ids=frozenset({first}))
    name = "d2" if how == "stop token" else "d"
    rig.step()
    (end,) = rig.complete_transfer(name)
    assert (end.new_token_ids, end.first_index) == ([first], 0)
    assert end.outcome is (Outcome.LENGTH if how == "max_tokens" else Outcome.STOP)
    assert end.stop_reason == (first if how == "stop token" else None)
    assert not rig.core.has_work()
    assert rig.scheduler.kv_cache_manager.pool.accounts().owned == 0


def test_kv_that_arrives_without_a_first_token_fails_the_request() -> None:
    rig = EngineRig()
    rig.begin("d", 10, leg=Leg.DECODE)
    (end,) = rig.transfer(arrived={"d": []})
    assert end.outcome is Outcome.KV_LOST


@pytest.mark.parametrize(("policy", "outcome"), [("reroute", Outcome.KV_LOST), ("fail", Outcome.ERROR)])
@pytest.mark.parametrize(
    ("quarantine", "cause", "why"),
    [(True, TransferCause.PEER_GONE, "peer gone"), (False, TransferCause.DIGEST_MISMATCH, "block 3")],
)
def test_a_failed_transfer_ends_its_request_with_the_reason_and_keeps_nothing_that_arrived(
    policy: str, outcome: Outcome, quarantine: bool, cause: TransferCause, why: str
) -> None:
    rig = EngineRig(connector=FakeConnector(quarantine=quarantine), on_transfer_failure=policy)
    rig.begin("d", 20, leg=Leg.DECODE)
    (end,) = rig.fail_transfer("d", 3, cause, why)
    assert (end.outcome, end.error, end.transfer_cause) == (outcome, why, cause)
    assert rig.scheduler.make_stats().quarantined_blocks == (5 if quarantine else 0)
    assert not rig.scheduler.kv_cache_manager.pool.num_cached_blocks
    assert not rig.core.has_work()
    rig.transfer(released=["d"])
    assert rig.scheduler.make_stats().free_blocks == 64


def test_quarantined_blocks_are_not_allocated_until_released() -> None:
    rig = EngineRig(num_blocks=8)
    rig.begin("d", 12, leg=Leg.DECODE)
    load = rig.connector.loads["d"]
    rig.abort("d")
    assert rig.scheduler.make_stats().quarantined_blocks == 3
    with pytest.raises(DuplicateRequest):
        rig.scheduler.add_request(Request("d", RequestSpec([1], rig.requests["d"].sampling_params)))
    rig.add("other", 15, max_tokens=2)
    rig.begin("too big", 20, max_tokens=2)
    rig.runner.write_slots(load.block_ids, [0xDEAD] * 12)
    rig.run()
    assert rig.tokens["other"] == rig.expected("other", 2), "a late write hurt nobody"
    assert rig.requests["too big"].status is RequestStatus.WAITING
    rig.transfer(released=["d"])
    rig.run_right("too big")


@pytest.mark.parametrize("when", ["before the load", "during it", "after it"])
def test_an_abort_quarantines_the_prompts_blocks_while_they_are_loaded(rig: EngineRig, when: str) -> None:
    """Three blocks are for the prompt. The fourth is reserved for the first generated token; nobody writes to it."""
    rig.add("d", 12, leg=Leg.DECODE)
    blocks: Sequence[int] = ()
    if when != "before the load":
        rig.step()
        assert rig.scheduler.make_stats().free_blocks == 60
        blocks = rig.connector.loads["d"].block_ids
    if when == "after it":
        rig.complete_transfer("d")
    rig.abort("d")
    held = 3 if when == "during it" else 0
    if held or when == "before the load":
        assert rig.connector.finished == {"d": (blocks, bool(held))}
    stats = rig.scheduler.make_stats()
    assert (stats.quarantined_blocks, stats.free_blocks) == (held, 64 - held)
    assert not rig.core.has_work()


def test_late_unknown_and_repeated_reports_change_nothing_and_are_counted(rig: EngineRig) -> None:
    rig.add("d", 10, leg=Leg.DECODE, max_tokens=3)
    rig.begin("w", 10, max_tokens=3)
    rig.complete_transfer("d")
    before = rig.scheduler.counters.num_unknown_transfers
    rig.transfer(arrived={"d": [1], "w": [1], "nobody": [1]}, failed={"d": "late", "w": "?"}, released=["d", "nobody"])
    assert rig.scheduler.counters.num_unknown_transfers == before + 7
    rig.run_right("d", "w")
    rig.transfer(arrived={"d": [1]}, failed={"w": "later still"})
    assert len(rig.ends) == 2


def test_a_decode_leg_that_never_fits_is_refused() -> None:
    rig = EngineRig(num_blocks=3)
    rig.add("d", 9, leg=Leg.DECODE)
    assert rig.reason("d") is Outcome.IGNORED
    assert rig.connector.loads == {}


def test_a_prompt_as_long_as_the_pool_is_loaded_whole() -> None:
    rig = EngineRig(num_blocks=3)
    rig.begin("d", 8, leg=Leg.DECODE, max_tokens=9)
    (end,) = rig.complete_transfer("d")
    assert end.outcome is Outcome.LENGTH


# --- faults of the connector, and what it reports by itself ---


def test_a_connector_that_does_not_know_yet_is_asked_again_and_delays_no_other_request(rig: EngineRig) -> None:
    rig.connector.unknown.add("d")
    rig.add("d", 10, leg=Leg.DECODE, max_tokens=3)
    rig.add("behind", 6, max_tokens=3)
    rig.run_right("behind")
    assert rig.requests["d"].status is RequestStatus.WAITING
    assert not rig.core.has_work(), "it sleeps until something happens"
    rig.connector.unknown.clear()
    rig.transfer()
    assert rig.core.has_work()
    rig.step()
    rig.complete_transfer("d")
    rig.run_right("d")


def test_a_decode_leg_with_nothing_to_load_computes_its_prompt_here(rig: EngineRig) -> None:
    rig.connector.unavailable.add("d")
    rig.add("d", 10, leg=Leg.DECODE, max_tokens=3)
    rig.run_right("d")
    assert rig.ends["d"].num_external_tokens == 0


class HalfConnector(FakeConnector):
    """A connector that has fewer external tokens than the prompt needs."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        return ExternalTokens(4, load_async=True)


def test_external_tokens_that_do_not_complete_the_prompt_fail_the_request() -> None:
    rig = EngineRig(connector=HalfConnector())
    rig.add("d", 10, leg=Leg.DECODE)
    (end,) = rig.step()
    assert end.outcome is Outcome.KV_LOST
    assert "does not complete a prompt" in str(end.error)
    assert rig.scheduler.make_stats().free_blocks == 64


@pytest.mark.parametrize(
    ("method", "leg", "held"),
    [
        ("request_added", Leg.DECODE, 0),
        ("get_num_new_matched_tokens", Leg.DECODE, 0),
        ("update_state_after_alloc", Leg.DECODE, 3),
        ("blocks_computed", Leg.PREFILL, 0),
    ],
)
def test_a_connector_that_raises_fails_its_request_and_not_the_engine(
    rig: EngineRig, method: str, leg: Leg, held: int
) -> None:
    rig.connector.raise_in = method
    rig.add("bad", 10, leg=leg, max_tokens=3)
    rig.complete("good", 6, max_tokens=3)
    assert rig.reason("bad") is (Outcome.KV_LOST if leg is Leg.DECODE else Outcome.ERROR)
    assert f"the test made {method} fail" in str(rig.ends["bad"].error)
    assert rig.tokens["good"] == rig.expected("good", 3)
    assert rig.scheduler.make_stats().quarantined_blocks == held, "a load may have begun before it raised"
    assert rig.scheduler.counters.num_connector_errors == 1


@pytest.mark.parametrize(("leg", "leased", "quarantined"), [(Leg.PREFILL, 3, 0), (Leg.DECODE, 0, 3), (Leg.WHOLE, 0, 0)])
def test_blocks_are_kept_when_the_connector_raises_at_a_requests_end(leg: Leg, leased: int, quarantined: int) -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.begin("r", 10, leg=leg)
    rig.connector.raise_in = "request_finished"
    assert rig.abort("r")[0].outcome is Outcome.ABORTED
    stats = rig.scheduler.make_stats()
    assert (stats.leased_blocks, stats.quarantined_blocks) == (leased, quarantined)
    assert rig.scheduler.counters.num_connector_errors == 1


def test_a_failed_load_of_kv_of_other_numerics_is_never_computed_here() -> None:
    """Its first token may have gone out, and would not be this node's."""
    rig = EngineRig(on_transfer_failure="recompute")
    rig.begin("d", prompt_of(21, 9), leg=Leg.DECODE, kv_bits="theirs")
    (output,) = rig.transfer(failed={"d": "peer gone"})
    assert output.outcome is Outcome.KV_LOST


def test_a_failed_load_is_computed_here_under_the_policy_recompute() -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    prompt = prompt_of(21, 9)
    rig.complete("warm", prompt[:12], max_tokens=1)
    rig.begin("d", prompt, leg=Leg.DECODE, max_tokens=6)
    filling = set(rig.connector.loads["d"].block_ids[3:])
    rig.transfer(failed={"d": "peer gone"})
    assert rig.scheduler.make_stats().quarantined_blocks == len(filling) == 3, "the read may go on for ever"
    rig.step()
    assert not filling & set(rig.scheduler.kv_cache_manager.block_ids("d"))
    rig.run()
    assert rig.tokens["d"] == rig.expected("d", 6), "the first token, too: nobody else may have it"
    assert rig.requests["d"].num_cached_tokens == 12, "what was here is valid"
    assert rig.scheduler.make_stats().quarantined_blocks == 3
    rig.transfer(released=["d"])
    assert rig.scheduler.make_stats().free_blocks == rig.scheduler.make_stats().total_blocks
    assert ("remote_kv_lost", "d", 12) in rig.events()


def computed_tokens(rig: EngineRig, request_id: str) -> int:
    """The number of a request's tokens that the next steps compute until its first new token."""
    count = 0
    while not rig.tokens[request_id]:
        output = rig.scheduler.schedule()
        count += output.num_scheduled_tokens.get(request_id, 0)
        rig.commit(output)
    return count


@pytest.mark.parametrize(
    ("num_tokens", "num_valid", "kept"),
    [
        pytest.param(20, 0, 0, id="nothing"),
        pytest.param(20, 3, 12, id="three of five"),
        pytest.param(22, 3, 12, id="unaligned prompt"),
        pytest.param(22, 5, 20, id="all full blocks"),
        pytest.param(22, 6, 20, id="the last one is not full"),
        pytest.param(20, 5, 16, id="all: one token is computed for the first output"),
        pytest.param(3, 1, 0, id="shorter than a block"),
    ],
)
@pytest.mark.parametrize("quarantine", [True, False])
def test_blocks_that_arrived_before_a_load_failed_are_not_recomputed(
    num_tokens: int, num_valid: int, kept: int, quarantine: bool
) -> None:
    rig = EngineRig(on_transfer_failure="recompute", connector=FakeConnector(quarantine=quarantine))
    rig.begin("d", num_tokens, leg=Leg.DECODE, max_tokens=6)
    blocks = rig.connector.loads["d"].block_ids
    rig.fail_transfer("d", num_valid)
    num_full = min(num_valid, num_tokens // 4)
    assert rig.scheduler.make_stats().quarantined_blocks == (len(blocks) - num_full if quarantine else 0)
    cached = [block for block in rig.scheduler.kv_cache_manager.pool.blocks if block.block_hash is not None]
    assert [block.block_id for block in cached] == sorted(blocks[:num_full]), "what is not proven is not found"
    assert computed_tokens(rig, "d") == num_tokens - kept
    rig.run_right("d")
    assert ("remote_kv_lost", "d", kept) in rig.events()
    request, stats = rig.requests["d"], rig.scheduler.make_stats().prefix_cache
    assert (request.num_cached_tokens, request.num_external_tokens) == (0, kept)
    assert (stats.num_hit_tokens["remote"], stats.num_hit_tokens["device"]) == (kept, 0)


@pytest.mark.parametrize(("num_valid", "kept"), [(3, 12), (4, 16), (5, 20)])
def test_cached_blocks_before_a_failed_load_are_kept_with_those_that_arrived(num_valid: int, kept: int) -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    prompt = prompt_of(25, 9)
    rig.complete("warm", prompt[:12], max_tokens=1)
    rig.begin("d", prompt, leg=Leg.DECODE, max_tokens=6)
    assert rig.connector.loads["d"].num_local_tokens == 12
    rig.fail_transfer("d", num_valid)
    assert computed_tokens(rig, "d") == 25 - kept
    rig.run_right("d")
    assert (rig.requests["d"].num_cached_tokens, rig.requests["d"].num_external_tokens) == (12, kept - 12)


@pytest.mark.parametrize(
    ("windows", "num_valid", "kept"),
    [
        pytest.param((None, None), 5, 8, id="the least of the groups"),
        pytest.param((None, None), 6, 12, id="equally much of each"),
        pytest.param((None, 24), 6, 12, id="a window as long as the prompt"),
        pytest.param((None, 6), 6, 0, id="a window that was not asked for"),
        pytest.param((None, 5), 10, 20, id="a window that was"),
        pytest.param((6,), 3, 0, id="windows alone"),
    ],
)
def test_with_windows_a_prefix_is_kept_where_every_group_has_what_the_next_query_sees(
    windows: tuple[int | None, ...], num_valid: int, kept: int
) -> None:
    rig = EngineRig(on_transfer_failure="recompute", windows=windows)
    rig.begin("d", 22, leg=Leg.DECODE, max_tokens=6)
    rig.fail_transfer("d", num_valid)
    assert computed_tokens(rig, "d") == 22 - kept
    rig.run_right("d")


def test_kept_blocks_are_idle_and_recomputed_if_they_were_evicted() -> None:
    """If two waiting requests held blocks that the other one needs, both would wait for ever."""
    rig = EngineRig(num_blocks=8, on_transfer_failure="recompute", max_num_seqs=2)
    rig.begin("d", 20, leg=Leg.DECODE, max_tokens=4)
    rig.fail_transfer("d", 3)
    accounts = rig.scheduler.kv_cache_manager.pool.accounts()
    assert (accounts.owned, accounts.cached_idle, accounts.quarantined) == (0, 3, 2)
    rig.abort("d")
    rig.complete("other", 16, max_tokens=2)
    rig.transfer(released=["d"])
    assert rig.tokens["other"] == rig.expected("other", 2)
    assert rig.scheduler.make_stats().free_blocks == 7


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    rig = EngineRig(on_transfer_failure="recompute", enable_prefix_caching=False)
    rig.begin("d", 20, leg=Leg.DECODE, max_tokens=6)
    rig.fail_transfer("d", 3)
    assert computed_tokens(rig, "d") == 20
    rig.run_right("d")


def test_no_block_of_a_failed_load_is_kept_if_the_connector_raises() -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    rig.begin("d", 20, leg=Leg.DECODE, max_tokens=3)
    rig.connector.raise_in = "load_failed"
    rig.fail_transfer("d", 3)
    assert (rig.scheduler.counters.num_connector_errors, rig.scheduler.make_stats().quarantined_blocks) == (1, 5)
    assert computed_tokens(rig, "d") == 20
    rig.run_right("d")


@pytest.mark.parametrize("many", [{"n": 3}, {"n": 2, "beam_width": 4}], ids=["siblings", "beams"])
def test_several_sequences_of_a_failed_load_are_computed_here(many: dict[str, Any]) -> None:
    rigs = [EngineRig(on_transfer_failure="recompute"), EngineRig()]
    for rig, leg in zip(rigs, (Leg.DECODE, Leg.WHOLE), strict=True):
        rig.begin("r", 18, leg=leg, max_tokens=5, **many)
    rigs[0].transfer(failed={"r": "peer gone"}, released=["r"])
    for rig in rigs:
        rig.run()
    assert rigs[0].tokens == rigs[1].tokens
    assert rigs[0].scheduler.kv_cache_manager.pool.num_quarantined_blocks == 0


def test_a_request_recomputed_here_may_be_aborted_while_its_read_continues() -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    rig.begin("d", 18, leg=Leg.DECODE, max_tokens=6)
    rig.transfer(failed={"d": "peer gone"})
    rig.step()
    rig.abort("d")
    assert rig.reason("d") is Outcome.ABORTED
    assert rig.scheduler.make_stats().quarantined_blocks == 5
    rig.transfer(released=["d"])
    assert rig.scheduler.make_stats().free_blocks == rig.scheduler.make_stats().total_blocks


def test_a_load_lost_before_it_had_blocks_is_computed_here() -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    rig.connector.unknown.add("d")
    rig.add("d", 18, leg=Leg.DECODE, max_tokens=6)
    rig.begin("other", 6, max_tokens=3)
    rig.transfer(failed={"d": "peer gone"})
    rig.run_right("d", "other")
    assert rig.scheduler.make_stats().free_blocks == rig.scheduler.make_stats().total_blocks
    assert ("remote_kv_lost", "d", 0) in rig.events()


@pytest.mark.parametrize("many", [{}, {"n": 3}, {"n": 2, "beam_width": 4}], ids=["one", "siblings", "beams"])
def test_a_load_lost_before_it_had_blocks_ends_its_request(rig: EngineRig, many: dict[str, Any]) -> None:
    rig.connector.unknown.add("d")
    rig.begin("d", 18, leg=Leg.DECODE, max_tokens=6, **many)
    rig.transfer(failed={"d": "peer gone", "nobody": "peer gone"})
    assert (rig.reason("d"), rig.ends["d"].error) == (Outcome.KV_LOST, "peer gone")
    assert rig.scheduler.counters.num_unknown_transfers == 1
    assert not rig.core.has_work()
    assert rig.scheduler.make_stats().free_blocks == rig.scheduler.make_stats().total_blocks


def test_a_failure_that_comes_after_the_arrival_changes_nothing(rig: EngineRig) -> None:
    rig.begin("d", 18, leg=Leg.DECODE, max_tokens=3)
    rig.transfer(arrived={"d": [5]})
    rig.transfer(failed={"d": "too late"})
    assert rig.scheduler.counters.num_unknown_transfers == 1
    rig.run()
    assert (rig.tokens["d"][0], rig.reason("d")) == (5, Outcome.LENGTH)


def test_a_prefill_leg_reports_its_begin_when_it_has_its_blocks() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add("first", 17, leg=Leg.PREFILL)
    rig.begin("second", 17, leg=Leg.PREFILL)
    assert rig.connector.added == ["first", "second"]
    assert rig.connector.begun == {"first"}
    rig.run()
    rig.transfer(released=["first"])
    rig.run()
    assert rig.connector.begun == {"first", "second"}


def test_a_prefill_leg_runs_even_if_its_begin_can_not_be_reported(rig: EngineRig) -> None:
    rig.connector.raise_in = "update_state_after_alloc"
    rig.complete("p", 17, leg=Leg.PREFILL)
    assert rig.reason("p") is Outcome.HANDED_OFF
    assert rig.scheduler.counters.num_connector_errors == 1


def test_a_prefill_legs_first_token_is_handed_off_with_its_logprobs(rig: EngineRig) -> None:
    rig.begin("p", 10, leg=Leg.PREFILL, logprobs=1, max_tokens=5)
    (drawn,) = rig.ends["p"].new_logprobs
    assert rig.requests["p"].last_logprobs == [drawn]
    rig.begin("d", rig.requests["p"].prompt_token_ids, leg=Leg.DECODE, logprobs=1, max_tokens=5)
    rig.write_kv("d")
    arrived = ArrivedKV((drawn.token_id,), (drawn,))
    rig.scheduler.update_from_kv_transfer(KVTransferOutput(arrived={"d": arrived}))
    (first,) = rig.step()
    assert [position.token_id for position in first.new_logprobs] == first.new_token_ids == rig.expected("d", 2)
    assert first.new_logprobs[0] == drawn


def test_a_first_token_without_its_logprobs_is_reported_only_by_the_prefill_node(rig: EngineRig) -> None:
    rig.begin("d", 10, leg=Leg.DECODE, logprobs=1, max_tokens=5)
    rig.write_kv("d")
    rig.scheduler.update_from_kv_transfer(KVTransferOutput(arrived={"d": ArrivedKV(rig.expected("d", 1))}))
    (first,) = rig.core.step()[0]
    assert (first.first_index, first.new_token_ids) == (1, rig.expected("d", 2)[1:])
