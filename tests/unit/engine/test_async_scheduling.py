"""Asynchronous scheduling: steps that are decided while the step before them runs."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.runner import LazyExecutor
from baton.messages.node import Leg, Outcome
from tests.support.engine_rig import EngineRig
from tests.support.executors import EagerExecutor


def rig_with_one_in_flight(num_blocks: int = 65, **limits: Any) -> EngineRig:
    """An executor that runs a step when it is committed, as late as a device could."""
    return EngineRig(num_blocks, executor=LazyExecutor(), **limits)


def check_tokens(rig: EngineRig, *names: str) -> None:
    for name in names:
        assert rig.tokens[name] == rig.expected(name, rig.requests[name].sampling_params.max_tokens), name


def test_a_token_is_output_one_call_after_its_step_was_decided() -> None:
    rig = rig_with_one_in_flight()
    rig.add("r", 6, max_tokens=3)
    assert rig.step() == []
    assert [output.first_index for output in rig.step()] == [0]
    assert [output.first_index for output in rig.step()] == [1]
    (last,) = rig.step()
    assert (last.first_index, last.outcome) == (2, Outcome.LENGTH)
    assert not rig.core.has_work()
    check_tokens(rig, "r")


@pytest.mark.parametrize("limits", [{"max_model_len": 20}, {"max_num_batched_tokens": 8}], ids=["length", "chunks"])
def test_no_step_computes_beyond_a_requests_length(limits: dict[str, int]) -> None:
    """Not even when the last token would need a block that is not free."""
    rig = rig_with_one_in_flight(num_blocks=6, **limits)
    rig.add("r", 17, max_tokens=3)
    computed = 0
    while rig.core.has_work():
        rig.step()
        computed = max(computed, rig.requests["r"].num_computed_tokens)
    assert rig.scheduler.counters.num_skipped_results == 0
    assert computed == 19
    check_tokens(rig, "r")


def test_a_stop_token_makes_the_step_in_flight_stale_for_its_request_only() -> None:
    rig = rig_with_one_in_flight()
    rig.add("other", 5, max_tokens=9)
    stopped = rig.add("stopped", 6, max_tokens=9)
    stop = rig.expected("stopped", 3)[2]
    stopped.stop_ids = stopped.eos_token_ids = frozenset({stop})
    rig.run()
    assert rig.scheduler.counters.num_skipped_results == 1
    assert rig.tokens["stopped"] == rig.expected("stopped", 3)
    assert rig.reason("stopped") is Outcome.STOP
    check_tokens(rig, "other")


def test_an_id_can_be_used_again_while_its_old_step_is_in_flight() -> None:
    rig = rig_with_one_in_flight()
    rig.begin("r", 6, max_tokens=9)
    rig.step()
    rig.abort("r")
    del rig.ends["r"], rig.requests["r"]
    rig.complete("r", 9, max_tokens=4)
    check_tokens(rig, "r")


def test_blocks_freed_while_a_step_is_in_flight_are_not_allocated_until_its_commit() -> None:
    """A load writes as soon as it is decided, and the step in flight could overwrite what it wrote."""
    rig = rig_with_one_in_flight(num_blocks=5, enable_prefix_caching=False)
    rig.connector.on_load = lambda load: rig.write_kv("pulled")
    rig.begin("aborted", 14, max_tokens=9)
    rig.step()
    rig.abort("aborted")
    assert rig.scheduler.make_stats().free_blocks == 0
    rig.begin("pulled", 15, leg=Leg.DECODE, max_tokens=2)
    assert not rig.connector.loads, "the aborted request's last token was still to be written"
    rig.step()
    rig.transfer(arrived={"pulled": rig.expected("pulled", 1)})
    rig.run_right("pulled")


def test_a_lease_that_ends_while_a_step_is_in_flight_frees_its_blocks_at_its_commit() -> None:
    rig = rig_with_one_in_flight(num_blocks=6, max_num_batched_tokens=8)
    rig.begin("offered", 20, leg=Leg.PREFILL)
    rig.step()
    rig.abort("offered")
    rig.transfer(released=["offered"])
    assert rig.scheduler.make_stats().free_blocks == 0, "its second chunk is being computed"
    rig.step()
    assert rig.scheduler.make_stats().free_blocks == 5


def test_blocks_that_windows_pass_while_a_step_is_in_flight_are_freed_at_its_commit() -> None:
    """Windows follow the committed tokens, not the decided ones."""
    rig = rig_with_one_in_flight(windows=(5,), max_num_batched_tokens=8, enable_prefix_caching=False)
    rig.begin("r", 24, max_tokens=1)
    rig.step()
    assert rig.requests["r"].num_computed_tokens == 16
    assert rig.scheduler.kv_cache_manager.block_ids("r")[:2] == [0, 2], "8 tokens are computed, the next sees 4 of them"
    rig.run_right("r")


def test_only_committed_blocks_are_cached_and_offered() -> None:
    rig = rig_with_one_in_flight(max_num_batched_tokens=8)
    request = rig.begin("prompt", 24, leg=Leg.PREFILL)
    rig.step()
    assert request.num_computed_tokens == 16
    assert rig.connector.offers["prompt"][1] == 8
    assert rig.scheduler.kv_cache_manager.get_computed_blocks(request).num_tokens == 8


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_no_request_with_a_token_in_flight_is_preempted(mode: str) -> None:
    rig = rig_with_one_in_flight(num_blocks=8, preemption_mode=mode, num_host_blocks=16)
    for name in ("first", "second", "third"):
        rig.add(name, 6, max_tokens=12)
    num_preempted = 0
    while rig.core.has_work():
        may_run_ahead = rig.scheduler.may_run_ahead()
        rig.step()
        num_preemptions = rig.scheduler.make_stats().num_preemptions_by_mode[mode]
        assert num_preemptions == num_preempted or not may_run_ahead
        num_preempted = num_preemptions
    assert num_preempted > 0
    check_tokens(rig, "first", "second", "third")


def test_swapped_out_blocks_are_not_loaded_into_before_they_are_copied() -> None:
    rig = rig_with_one_in_flight(num_blocks=8, preemption_mode="swap", num_host_blocks=16)
    rig.connector.on_load = lambda load: rig.write_kv("pulled")
    rig.add("stays", 8, max_tokens=16)
    victim = rig.add("victim", 12, max_tokens=16)
    while not rig.scheduler.make_stats().num_preemptions:
        rig.step()
    rig.abort("victim")
    rig.add("pulled", 11, leg=Leg.DECODE, max_tokens=2)
    while not rig.connector.loads:
        rig.step()
    rig.transfer(arrived={"pulled": rig.expected("pulled", 1)})
    rig.run()
    rig.complete("again", victim.prompt_token_ids, max_tokens=3)
    assert rig.scheduler.make_stats().prefix_cache.num_hit_tokens["host"] > 0
    check_tokens(rig, "stays", "again")


def test_a_step_that_fails_does_not_fail_requests_that_came_later() -> None:
    rig = rig_with_one_in_flight()
    rig.add("broken", 6, max_tokens=5)
    rig.runner.raise_next = RuntimeError("broken")
    rig.step()
    rig.complete("later", 7, max_tokens=5)
    assert "broken" in str(rig.ends["broken"].error)
    check_tokens(rig, "later")


def test_a_request_that_fails_alone_ends_once() -> None:
    rig = rig_with_one_in_flight()
    for name in ("failed", "other"):
        rig.add(name, 6, max_tokens=5)
    rig.step()
    rig.runner.failures["failed"] = "non-finite logits"
    rig.run()
    assert rig.ends["failed"].error == "non-finite logits"
    check_tokens(rig, "other")


def test_a_refusal_does_not_wait_for_the_step_in_flight() -> None:
    rig = rig_with_one_in_flight(max_model_len=32)
    rig.begin("r", 6, max_tokens=3)
    rig.add("endless", 40)
    assert rig.reason("endless") is Outcome.IGNORED


def test_a_request_that_waits_for_fenced_blocks_is_tried_again_when_they_are_freed() -> None:
    rig = rig_with_one_in_flight(num_blocks=5)
    stopped = rig.add("stopped", 13, max_tokens=9)
    stopped.stop_ids = stopped.eos_token_ids = frozenset(rig.expected("stopped", 1))
    rig.complete("waits", 13, max_tokens=2)
    check_tokens(rig, "waits")


def test_no_step_is_decided_ahead_of_a_beam_search() -> None:
    rigs = [EngineRig(), rig_with_one_in_flight(), EngineRig(executor=EagerExecutor())]
    for rig in rigs:
        rig.add("other", 7, max_tokens=8)
        rig.add("search", 6, max_tokens=6, beam_width=3)
        while "search" in rig.scheduler.requests or "search" not in rig.ends:
            assert not rig.scheduler.may_run_ahead()
            rig.step()
        rig.run()
        check_tokens(rig, "other")
    assert rigs[0].tokens == rigs[1].tokens == rigs[2].tokens


def test_growth_of_several_groups_waits_for_blocks_that_a_step_in_flight_frees() -> None:
    # Four stripes for three groups, one of them leased: r's fourth stripe fits only when windows have freed blocks.
    rig = rig_with_one_in_flight(num_blocks=1 + 4 * 3, windows=(None, 2, 9), max_num_seqs=1)
    rig.complete("leased", 1, leg=Leg.PREFILL)
    rig.complete("r", 1, max_tokens=14)
    assert not rig.scheduler.make_stats().num_preemptions
    check_tokens(rig, "r")
