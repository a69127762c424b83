"""The prefix cache's host tier: evicted blocks are copied to the host, and copied back when a request needs them."""

from __future__ import annotations

from baton.engine.batch import SchedulerOutput
from baton.messages.node import Leg
from tests.support.engine_rig import EngineRig, prompt_of

FIRST, SECOND = prompt_of(16, 1), prompt_of(16, 2)


def rig_of(num_host_blocks: int = 16, num_blocks: int = 6) -> EngineRig:
    """An engine with five blocks on the device, enough for one prompt."""
    return EngineRig(num_blocks, num_host_blocks=num_host_blocks)


def admit(rig: EngineRig, name: str, prompt: list[int]) -> SchedulerOutput:
    """Run a request to its end, and return its first step."""
    rig.add(name, prompt, max_tokens=2)
    decided = rig.scheduler.schedule()
    rig.commit(decided)
    rig.run()
    assert rig.tokens[name] == rig.expected(name, 2)
    return decided


def test_an_evicted_prefix_is_copied_back() -> None:
    rig = rig_of()
    admit(rig, "first", FIRST)
    evicting = admit(rig, "second", SECOND)
    assert len(evicting.blocks_to_swap_out) == 3, "and the first block when the answer needs one"
    again = admit(rig, "again", FIRST)
    assert len(again.blocks_to_swap_in) == 3, "the last token is computed"
    assert again.num_scheduled_tokens == {"again": 4}
    assert rig.ends["again"].num_cached_tokens == 12
    stats = rig.scheduler.make_stats().prefix_cache
    assert stats.num_hit_tokens == {"device": 0, "host": 12, "remote": 0}
    assert stats.num_hits == {"device": 0, "host": 1, "remote": 0}


def test_a_prefix_may_begin_on_the_device_and_continue_in_the_host_tier() -> None:
    rig = rig_of()
    admit(rig, "first", FIRST)
    admit(rig, "shorter", prompt_of(12, 3))
    assert len(admit(rig, "again", FIRST).blocks_to_swap_in) == 2
    assert rig.scheduler.make_stats().prefix_cache.num_hit_tokens == {"device": 4, "host": 8, "remote": 0}


def test_blocks_in_the_host_tier_are_not_copied_out_again() -> None:
    rig = rig_of()
    for name, prompt in {"a": FIRST, "b": SECOND, "c": FIRST}.items():
        admit(rig, name, prompt)
    assert not admit(rig, "d", SECOND).blocks_to_swap_out


def test_the_least_recently_used_host_blocks_are_evicted() -> None:
    rig = rig_of(num_host_blocks=9)
    for number in range(4):
        admit(rig, f"r{number}", prompt_of(16, number + 1))
    assert not admit(rig, "oldest", prompt_of(16, 1)).blocks_to_swap_in
    assert admit(rig, "newer", prompt_of(16, 4)).blocks_to_swap_in


def test_host_hits_are_not_overwritten_by_blocks_evicted_for_them() -> None:
    """The host tier is full of the requested blocks, and the device has others that would be evicted to it."""
    rig = rig_of(num_host_blocks=5)
    admit(rig, "first", FIRST)
    admit(rig, "second", SECOND)
    again = admit(rig, "again", FIRST)
    read = {copy.source for copy in again.blocks_to_swap_in}
    assert len(read) == 3
    assert read.isdisjoint(copy.destination for copy in again.blocks_to_swap_out)


def test_blocks_evicted_for_a_transfer_are_not_copied_out() -> None:
    rig = rig_of()
    admit(rig, "first", FIRST)
    rig.add("pulled", SECOND, leg=Leg.DECODE, max_tokens=2)
    decided = rig.scheduler.schedule()
    assert rig.connector.loads
    assert not decided.blocks_to_swap_out
    rig.commit(decided)
    rig.complete_transfer("pulled")
    rig.run_right("pulled")


def test_copies_of_a_lost_step_are_never_found() -> None:
    rig = rig_of()
    admit(rig, "first", FIRST)
    rig.add("second", SECOND, max_tokens=2)
    rig.runner.raise_first = RuntimeError("broken")
    rig.step()
    assert rig.scheduler.make_stats().free_host_blocks == 15
    assert not admit(rig, "again", FIRST).blocks_to_swap_in


def test_a_reset_forgets_both_tiers_and_refuses_while_either_is_in_use() -> None:
    rig = rig_of()
    admit(rig, "first", FIRST)
    admit(rig, "second", SECOND)
    assert rig.scheduler.kv_cache_manager.reset_prefix_cache()
    assert not admit(rig, "again", FIRST).blocks_to_swap_in
    rig = EngineRig(6, preemption_mode="swap", num_host_blocks=8)
    rig.add("old", 8, max_tokens=8)
    rig.add("new", 7, max_tokens=8)
    while not rig.scheduler.make_stats().num_requests_waiting_by_reason["swapped"]:
        rig.step()
    rig.abort("old")
    assert rig.scheduler.make_stats().free_blocks == 5
    assert not rig.scheduler.kv_cache_manager.reset_prefix_cache(), "a swapped request's keys would be forgotten"


def test_without_prefix_caching_the_host_tier_keeps_nothing() -> None:
    rig = EngineRig(6, num_host_blocks=8, enable_prefix_caching=False)
    admit(rig, "first", FIRST)
    assert not admit(rig, "second", SECOND).blocks_to_swap_out
