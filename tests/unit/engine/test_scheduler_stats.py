"""An engine's statistics: what requests wait for, and where prompts were found."""

from __future__ import annotations

from baton.engine.batch import ComputedStep, ModelRunnerOutput, SchedulerOutput
from baton.engine.request import RequestStatus
from baton.messages.node import Leg, StepFigures
from baton.node.reports.reports import load_of, load_report
from tests.support.engine_rig import EngineRig, prompt_of


def waiting(rig: EngineRig) -> dict[str, int]:
    """The reasons for which at least one request waits."""
    by_reason = rig.scheduler.make_stats().num_requests_waiting_by_reason
    return {reason: number for reason, number in by_reason.items() if number}


def test_every_waiting_request_has_exactly_one_reason() -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.connector.unknown.add("unsure")
    rig.add("runs", 8, max_tokens=9)
    rig.add("runs too", 8, max_tokens=9)
    rig.add("pulls", 8, leg=Leg.DECODE, max_tokens=3)
    rig.add("unsure", 8, leg=Leg.DECODE, max_tokens=3)
    assert waiting(rig) == {"capacity": 4}
    rig.step()
    rig.begin("queues", 8, max_tokens=3)
    assert waiting(rig) == {"remote_kv": 1, "deferred": 1, "capacity": 1}
    rig.complete_transfer("pulls")
    assert waiting(rig) == {"arrived": 1, "deferred": 1, "capacity": 1}
    rig.connector.unknown.clear()
    rig.abort("queues", "unsure")
    assert waiting(rig) == {"arrived": 1}
    rig.run()
    assert waiting(rig) == {}


def test_a_deferred_request_whose_prompt_has_begun_waits_for_another_reason(rig: EngineRig) -> None:
    rig.connector.unknown.add("unsure")
    rig.begin("unsure", 8, leg=Leg.DECODE, max_tokens=3)
    assert waiting(rig) == {"deferred": 1}
    assert rig.scheduler.make_stats().num_waiting_for_remote_kvs == 1, "no room here would help it"
    rig.connector.unknown.clear()
    rig.transfer()
    rig.step()
    assert waiting(rig) == {"remote_kv": 1}
    assert rig.scheduler.make_stats().num_waiting_for_remote_kvs == 1


def test_preempted_and_swapped_requests_have_different_reasons() -> None:
    for mode, reason, status in (
        ("recompute", "preempted", RequestStatus.PREEMPTED),
        ("swap", "swapped", RequestStatus.SWAPPED),
    ):
        rig = EngineRig(6, preemption_mode=mode, num_host_blocks=8)
        rig.add("old", 8, max_tokens=8)
        rig.add("new", 7, max_tokens=8)
        while rig.requests["new"].status is not status:
            rig.step()
        assert waiting(rig) == {reason: 1}
        stats = rig.scheduler.make_stats()
        assert stats.num_preemptions_by_mode[mode] == 1
        to_take = rig.requests["new"].num_tokens // rig.config.block_size + 1
        assert stats.promised_blocks == stats.total_blocks - stats.free_blocks + to_take
        rig.run()
        assert waiting(rig) == {}


def test_a_preempted_request_is_promised_all_of_its_blocks() -> None:
    rig = EngineRig(8, preemption_mode="swap", num_host_blocks=8)
    rig.add("old", prompt_of(17), max_tokens=12)
    rig.step()
    rig.add("new", prompt_of(17), max_tokens=12)

    def promised_for_new() -> int:
        stats = rig.scheduler.make_stats()
        return stats.promised_blocks - (stats.total_blocks - stats.free_blocks)

    assert promised_for_new() == 17 // 4 + 1, "it was not tried yet"
    while rig.requests["new"].status is not RequestStatus.SWAPPED:
        rig.step()
    assert promised_for_new() == rig.requests["new"].num_tokens // 4 + 1
    rig.run()


def test_hits_are_counted_by_source(rig: EngineRig) -> None:
    prompt = prompt_of(16)
    rig.begin("pulled", prompt, leg=Leg.DECODE, max_tokens=2)
    assert rig.scheduler.make_stats().prefix_cache.num_hits == {"device": 0, "host": 0, "remote": 0}, "not yet"
    rig.complete_transfer("pulled")
    rig.run()
    rig.complete("found", prompt, max_tokens=2)
    stats = rig.scheduler.make_stats().prefix_cache
    assert (stats.num_requests, stats.num_tokens) == (2, 32)
    assert stats.num_hits == {"device": 1, "host": 0, "remote": 1}
    assert stats.num_hit_tokens == {"device": 12, "host": 0, "remote": 16}


def tokens(rig: EngineRig) -> tuple[int, int]:
    """The numbers of tokens that are still to be computed, and of running requests' tokens in the cache."""
    stats = rig.scheduler.make_stats()
    return stats.num_uncomputed_tokens, stats.num_context_tokens


def test_the_load_in_tokens_follows_prompts_from_the_queue_to_the_cache() -> None:
    rig = EngineRig(max_num_batched_tokens=8, max_num_seqs=2)
    rig.add("long", 20, max_tokens=3)
    rig.add("short", 6, max_tokens=9)
    rig.add("pulls", 12, leg=Leg.DECODE, max_tokens=3)
    assert tokens(rig) == (26, 0), "what is pulled is not computed here"
    rig.step()
    assert tokens(rig) == (18, 8)
    rig.step()
    rig.step()
    assert tokens(rig) == (2, 24), "the second prompt had what was left of the step"
    rig.step()
    assert tokens(rig) == (0, 27), "one more token of the first, the last two of the second"
    rig.run()
    assert tokens(rig) == (0, 0)


def computed_step(rig: EngineRig, seconds: float) -> ComputedStep | None:
    """The computed step of a runner that took this long."""
    execute = rig.runner.execute_model

    def slowly(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        rig.clock.advance(seconds)
        return execute(scheduler_output)

    rig.runner.execute_model = slowly  # type: ignore[method-assign]
    try:
        rig.step()
    finally:
        rig.runner.execute_model = execute  # type: ignore[method-assign]
    return rig.core.take_computed_step()


def test_a_computed_step_has_its_size_and_duration(rig: EngineRig) -> None:
    began = rig.clock.monotonic()
    rig.add("a", 10, max_tokens=5)
    assert computed_step(rig, 0.25) == ComputedStep(StepFigures(250.0, 10, 0, 0), began + 0.25, True)
    rig.add("b", 7, max_tokens=5)
    assert computed_step(rig, 0.5) == ComputedStep(StepFigures(500.0, 7, 1, 10), began + 0.75, True)
    rig.begin("pulled", 8, leg=Leg.DECODE, max_tokens=5)
    rig.complete_transfer("pulled")
    rig.core.take_computed_step()
    assert computed_step(rig, 0.125) == ComputedStep(StepFigures(125.0, 0, 3, 12 + 8 + 8), began + 0.875, True), (
        "its first token was drawn elsewhere"
    )
    assert rig.core.take_computed_step() is None


def test_a_computed_step_counts_sequences_and_their_drafts_apart(rig: EngineRig) -> None:
    for name in ("right", "wrong", "alone"):
        rig.add(name, 10, max_tokens=9)
    rig.step()
    right, other = rig.expected("right", 4)[1:], rig.expected("wrong", 3)[1:]
    rig.scheduler.update_draft_token_ids({"right": right, "wrong": [other[0], other[1] + 1]})
    computed = computed_step(rig, 0.25)
    assert computed is not None
    assert computed.figures == StepFigures(250.0, 0, 3, 30, drafts=2, draft_tokens=5, accepted_tokens=4)
    assert computed.figures.decode_rows == 8
    computed = computed_step(rig, 0.25)
    assert computed is not None
    assert (computed.figures.decode_sequences, computed.figures.drafts, computed.figures.draft_tokens) == (3, 0, 0)


def test_a_lost_step_is_not_reported_as_computed(rig: EngineRig) -> None:
    rig.add("r", 10, max_tokens=5)
    rig.runner.raise_next = RuntimeError("broken")
    assert computed_step(rig, 0.25) is None


def test_token_counts_are_available_without_statistics() -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.connector.unknown.add("unsure")
    rig.add("pulls", 8, leg=Leg.DECODE, max_tokens=3)
    rig.add("unsure", 8, leg=Leg.DECODE, max_tokens=3)
    for number, name in enumerate(("runs", "runs too", "queues", "queues too")):
        rig.add(name, 8 + number, max_tokens=9)
    seen = set()
    for _ in range(4):
        load = load_of(rig.core.scheduler)
        assert load == load_report(rig.scheduler.make_stats())
        seen.add((load.running, load.waiting, load.waiting_for_remote_kvs, load.context_tokens > 0))
        rig.step()
    assert len(seen) > 1
    assert load_of(rig.core.scheduler, draining=True).draining


def test_stopped_events_are_not_recorded(rig: EngineRig) -> None:
    rig.scheduler.stop_events()
    rig.complete("runs", 8, max_tokens=2)
    assert rig.scheduler.take_events() == []
