"""Preemption with a host tier: which blocks are copied when, which request is resumed first, and lost copies."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.batch import SchedulerOutput
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.errors import ConfigError
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, load
from tests.doubles.fake_clock import FakeClock
from tests.support.engine_rig import EngineRig, prompt_of
from tests.support.simulated_oracle import expected_tokens


def swapping(num_blocks: int = 6, num_host_blocks: int = 16, **limits: Any) -> EngineRig:
    return EngineRig(num_blocks, preemption_mode="swap", num_host_blocks=num_host_blocks, **limits)


def outputs_of(rig: EngineRig, limit: int = 100) -> list[SchedulerOutput]:
    """Run all requests to their ends, and return every step's decision."""
    decided: list[SchedulerOutput] = []
    for _ in range(limit):
        if not rig.core.has_work():
            return decided
        decided.append(rig.scheduler.schedule())
        rig.commit(decided[-1])
    raise AssertionError("still busy")


def until_swapped(rig: EngineRig, name: str) -> SchedulerOutput:
    """Run steps until one swaps this request out; that step is not committed yet."""
    while True:
        decided = rig.scheduler.schedule()
        if rig.requests[name].status is RequestStatus.SWAPPED:
            return decided
        rig.commit(decided)


def two_that_collide(rig: EngineRig) -> None:
    rig.add("old", 8, max_tokens=8)
    rig.add("new", 7, max_tokens=8)


def test_a_swapped_request_continues_where_it_was() -> None:
    rig = swapping(enable_prefix_caching=False)
    two_that_collide(rig)
    decided = outputs_of(rig)
    (out,) = [step for step in decided if step.blocks_to_swap_out]
    (back,) = [step for step in decided if step.blocks_to_swap_in]
    assert out.preempted_req_ids == {"new"}
    assert len(out.blocks_to_swap_out) == len(back.blocks_to_swap_in) == 2
    assert [c.destination for c in out.blocks_to_swap_out] == [c.source for c in back.blocks_to_swap_in]
    (known,) = back.scheduled_cached_reqs
    assert (known.request_id, known.resumed, back.num_scheduled_tokens["new"]) == ("new", True, 1)
    assert known.num_computed_tokens == 8, "nothing is computed twice"
    assert rig.tokens == {name: rig.expected(name, 8) for name in ("old", "new")}
    stats = rig.scheduler.make_stats()
    assert stats.num_preemptions_by_mode == {"recompute": 0, "swap": 1}
    assert (stats.num_preemptions, stats.free_host_blocks, stats.total_host_blocks) == (1, 15, 15)


def test_blocks_that_are_still_in_the_prefix_cache_are_not_copied_back() -> None:
    rig = swapping()
    two_that_collide(rig)
    decided = outputs_of(rig)
    num_out = sum(len(step.blocks_to_swap_out) for step in decided)
    num_back = sum(len(step.blocks_to_swap_in) for step in decided)
    assert num_out > 0
    assert num_back < num_out
    assert rig.tokens["new"] == rig.expected("new", 8)


def test_blocks_in_the_host_tier_are_not_copied_out_again() -> None:
    rig = swapping(num_blocks=11)
    for number in range(3):
        rig.add(f"r{number}", 8, max_tokens=24)
    copied: dict[str, list[int]] = {}
    for step in outputs_of(rig):
        for name in step.preempted_req_ids:
            copied.setdefault(name, []).append(len(step.blocks_to_swap_out))
    assert copied["r2"] == [3, 1], "what it computed since it came back"
    assert rig.tokens == {f"r{number}": rig.expected(f"r{number}", 24) for number in range(3)}


def test_without_room_in_the_host_tier_a_request_is_recomputed() -> None:
    rig = swapping(num_host_blocks=2, enable_prefix_caching=False)
    two_that_collide(rig)
    decided = outputs_of(rig)
    assert not any(step.blocks_to_swap_out for step in decided)
    assert rig.scheduler.make_stats().num_preemptions_by_mode == {"recompute": 1, "swap": 0}
    assert rig.tokens["new"] == rig.expected("new", 8)


def test_a_swapped_request_is_resumed_before_new_requests() -> None:
    rig = swapping()
    two_that_collide(rig)
    rig.commit(until_swapped(rig, "new"))
    rig.add("tiny", 1, max_tokens=1)
    while rig.requests["new"].status is RequestStatus.SWAPPED:
        assert rig.requests["tiny"].status is RequestStatus.WAITING, "though there is a block for it"
        rig.step()
    rig.run_right("new")
    assert rig.reason("tiny") is Outcome.LENGTH


def test_nothing_is_loaded_into_blocks_that_are_still_to_be_copied_out() -> None:
    rig = swapping()
    two_that_collide(rig)
    rig.add("pulled", 4, leg=Leg.DECODE, max_tokens=3)
    out = until_swapped(rig, "new")
    assert rig.scheduler.make_stats().free_blocks >= 2, "enough for it"
    assert not rig.connector.loads
    rig.commit(out)
    while "pulled" not in rig.connector.loads:
        rig.step()
    rig.complete_transfer("pulled")
    rig.run_right("pulled")


@pytest.mark.parametrize("committed", [False, True], ids=["before its copies", "after them"])
def test_an_abort_of_a_swapped_request_frees_its_host_blocks(committed: bool) -> None:
    rig = swapping()
    two_that_collide(rig)
    decided = until_swapped(rig, "new")
    if committed:
        rig.commit(decided)
        rig.abort("new")
    else:
        computed = rig.runner.execute_model(decided)
        rig.abort("new")
        rig.commit(decided, computed)
    assert rig.reason("new") is Outcome.ABORTED
    stats = rig.scheduler.make_stats()
    assert stats.num_requests_waiting_by_reason["swapped"] == 0
    assert stats.free_host_blocks == 15
    rig.run_right("old")


def test_a_request_whose_swap_out_was_lost_is_recomputed() -> None:
    rig = swapping()
    two_that_collide(rig)
    while rig.requests["new"].num_preemptions == 0:
        rig.runner.raise_first = None
        probe = rig.scheduler.kv_cache_manager.pool.num_free_blocks
        if probe == 0:
            rig.runner.raise_first = RuntimeError("broken")
        rig.step()
    rig.runner.raise_first = None
    assert rig.reason("old") is Outcome.ERROR
    assert rig.requests["new"].status is RequestStatus.PREEMPTED
    assert rig.scheduler.make_stats().free_host_blocks == 15
    rig.run_right("new")


def test_a_lost_swap_in_fails_its_request() -> None:
    rig = swapping(enable_prefix_caching=False)
    two_that_collide(rig)
    rig.commit(until_swapped(rig, "new"))
    while rig.requests["new"].status is RequestStatus.SWAPPED:
        rig.runner.raise_first = RuntimeError("broken") if "old" in rig.ends else None
        rig.step()
    assert rig.reason("new") is Outcome.ERROR
    assert rig.scheduler.make_stats().free_host_blocks == 15


@pytest.mark.parametrize(("seconds_per_copy", "swaps"), [(1e-6, True), (10.0, False)])
def test_preemption_mode_auto_takes_the_cheaper_way(seconds_per_copy: float, swaps: bool) -> None:
    rig = EngineRig(12, preemption_mode="auto", num_host_blocks=32, enable_prefix_caching=False)
    rig.runner.seconds_per_copy, rig.runner.seconds_per_token = seconds_per_copy, 1e-3
    for number in range(6):
        rig.add(f"r{number}", 8, max_tokens=24)
    rig.run()
    by_mode = rig.scheduler.make_stats().num_preemptions_by_mode
    assert by_mode["swap"] > 0, "the first guess"
    assert (by_mode["recompute"] == 0) == swaps
    assert rig.tokens == {f"r{number}": rig.expected(f"r{number}", 24) for number in range(6)}


def test_swapping_needs_a_host_tier() -> None:
    with pytest.raises(ConfigError, match="needs a host tier"):
        EngineRig(preemption_mode="swap")
    with pytest.raises(ConfigError, match="num_host_blocks must be 0 or at least 2"):
        EngineRig(num_host_blocks=1)


PROMPTS = {f"r{number}": prompt_of(20 + 3 * number, number) for number in range(5)}


def generate(core: EngineCore, params: SamplingParams) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        core.scheduler.add_request(Request(name, RequestSpec([token % 256 for token in prompt], params)))
    while core.has_work():
        for batch in core.step().values():
            for output in batch:
                tokens[output.attempt.request_id] += output.new_token_ids
    return tokens


def limits(mode: str) -> SchedulerConfig:
    num_blocks, num_host_blocks = (128, 0) if mode == "neither" else (28, 64)
    return SchedulerConfig(
        num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=4,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        max_model_len=96,
        watermark=0.0,
        enable_prefix_caching=False,
        preemption_mode="swap" if mode == "swap" else "recompute",
    )


@pytest.mark.parametrize("mode", ["neither", "recompute", "swap"])
def test_simulated_tokens_do_not_depend_on_preemption(mode: str) -> None:
    spec = SimulatedSpec(num_blocks=128, num_host_blocks=64, block_size=4, vocab_size=256, max_model_len=96)
    runner = load(spec)
    core = EngineCore(Scheduler(limits(mode), CacheKeyFields.of(runner.model, runner.layout), FakeClock()), runner)
    params = SamplingParams(max_tokens=16, seed=3)
    tokens = generate(core, params)
    assert (core.scheduler.make_stats().num_preemptions_by_mode.get(mode, 0) > 0) == (mode != "neither")
    for name, prompt in PROMPTS.items():
        assert tokens[name] == expected_tokens([token % 256 for token in prompt], params, spec)
