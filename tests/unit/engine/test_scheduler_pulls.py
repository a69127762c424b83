"""What another node has cached of a prompt is pulled, the rest is computed; and cached blocks are kept for readers."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.connector import KVTransferOutput, Pin
from baton.engine.request import RequestStatus
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, Outcome
from tests.doubles.fake_runner import prompt_slots
from tests.support.engine_rig import EngineRig, prompt_of

READER = AttemptKey("theirs", 1)


@pytest.mark.parametrize("limits", [{}, {"windows": (None, 6)}, {"windows": (5, 2), "keeps_states": True}])
@pytest.mark.parametrize("leg", [Leg.WHOLE, Leg.PREFILL])
def test_what_is_pulled_is_not_computed(leg: Leg, limits: dict[str, Any]) -> None:
    rig = EngineRig(**limits)
    prompt = prompt_of(22)
    rig.complete("before", prompt[:9], max_tokens=1)
    rig.begin("r", prompt, leg=leg, held=16, max_tokens=4)
    request, load = rig.requests["r"], rig.connector.loads["r"]
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert (load.num_local_tokens, load.num_external_tokens) == (8, 8)
    assert rig.scheduler.make_stats().num_waiting_for_remote_kvs == 1
    assert "r" not in rig.connector.begun, "a decode node could wait for blocks that it has not got"
    rig.complete_pull("r")
    rig.run()
    assert (request.num_cached_tokens, request.num_external_tokens) == (8, 8)
    assert rig.scheduler.make_stats().prefix_cache.num_hit_tokens["remote"] == 8
    if leg is Leg.WHOLE:
        rig.run_right("r")
    else:
        rig.check_offered("r", *rig.connector.leased["r"])
        assert rig.reason("r") is Outcome.HANDED_OFF


@pytest.mark.parametrize("policy", ["reroute", "recompute", "fail"])
def test_a_pull_that_fails_costs_a_recomputation(policy: str) -> None:
    rig = EngineRig(on_transfer_failure=policy)
    rig.begin("r", 22, held=20, max_tokens=4)
    rig.fail_transfer("r", num_valid_blocks=2 if policy == "recompute" else 0)
    assert rig.scheduler.make_stats().quarantined_blocks == (3 if policy == "recompute" else 5)
    rig.run_right("r")
    assert rig.requests["r"].num_external_tokens == (8 if policy == "recompute" else 0)
    rig.transfer(released=["r"])
    assert rig.scheduler.make_stats().quarantined_blocks == 0


def test_a_request_that_ends_while_it_pulls_keeps_the_blocks_from_others_until_nothing_writes_to_them() -> None:
    rig = EngineRig(num_blocks=9)
    rig.begin("r", 22, held=20, max_tokens=4)
    rig.abort("r")
    rig.begin("other", 20, max_tokens=1)
    assert rig.requests["other"].status is RequestStatus.WAITING
    rig.transfer(released=["r"])
    rig.run_right("other")


def test_a_pull_waits_for_room_and_what_is_here_is_not_pulled() -> None:
    rig = EngineRig(num_blocks=12)
    rig.begin("stream", 20, max_tokens=3)
    rig.begin("r", 30, held=28, max_tokens=1)
    assert "r" not in rig.connector.loads
    rig.run()
    rig.complete_pull("r")
    rig.run_right("stream", "r")
    rig.complete("known", rig.requests["r"].prompt_token_ids, held=28, max_tokens=1)
    assert "known" not in rig.connector.loads


def test_several_sequences_share_what_was_pulled() -> None:
    rig = EngineRig()
    rig.begin("r", 22, held=16, n=3, seed=4, temperature=1.0, max_tokens=3)
    rig.complete_pull("r")
    rig.run_right("r", "r~1", "r~2")


def test_a_request_preempted_after_its_pull_does_not_pull_again() -> None:
    rig = EngineRig(num_blocks=11, max_num_seqs=2)
    rig.begin("first", 8, max_tokens=20)
    rig.begin("r", 14, held=12, max_tokens=12)
    rig.complete_pull("r")
    rig.run_right("first", "r")
    assert rig.scheduler.make_stats().num_preemptions_by_mode["recompute"] > 0
    assert rig.requests["r"].held_prefix is None


@pytest.mark.parametrize("limits", [{}, {"windows": (None, 6)}])
def test_cached_blocks_are_kept_for_a_reader_until_it_has_read_them(limits: dict[str, Any]) -> None:
    rig = EngineRig(num_blocks=16 * (2 if limits else 1), **limits)
    request = rig.complete("r", 22, max_tokens=6)
    keys = request.block_hashes[:6]
    pin = Pin(READER, tuple(keys))
    rig.scheduler.update_from_kv_transfer(KVTransferOutput(pins=[pin]))
    blocks = rig.connector.pinned_blocks[READER]
    tokens = request.token_ids(0, 24)
    right, there = prompt_slots(tokens), rig.runner.read_slots(blocks, 24)
    assert there == right
    kept = len([block for block in blocks if block])
    assert rig.scheduler.make_stats().leased_blocks == kept
    rig.complete("other", 30, max_tokens=1)
    assert rig.scheduler.kv_cache_manager.pool.num_leased_blocks == kept
    rig.transfer(released=[pin.holder])
    assert rig.scheduler.make_stats().leased_blocks == 0
    longer, unknown = (Pin(AttemptKey(name, 1), (*first, bytes(32))) for name, first in (("a", keys), ("b", ())))
    rig.scheduler.update_from_kv_transfer(KVTransferOutput(pins=[longer, unknown]))
    assert rig.connector.pinned_blocks[longer.attempt] == blocks
    assert rig.connector.pinned_blocks[unknown.attempt] == ()
    assert rig.scheduler.make_stats().leased_blocks == kept
    rig.transfer(released=[longer.holder])


@pytest.mark.parametrize("method", ["get_num_new_matched_tokens", "update_state_after_alloc"])
def test_a_fault_of_the_connector_hurts_one_request_at_most(method: str) -> None:
    rig = EngineRig()
    rig.connector.raise_in = method
    rig.begin("r", 22, held=16, max_tokens=2)
    rig.begin("other", 9, max_tokens=2)
    rig.transfer(released=["r"])
    rig.run_right("other")
    if method == "get_num_new_matched_tokens":
        rig.run_right("r")
    else:
        assert rig.reason("r") is Outcome.ERROR
