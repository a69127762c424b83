"""The scheduler step by step: budgets, chunks, preemption, what the runner and the clients get."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.batch import ModelRunnerOutput
from baton.engine.request import Request, RequestStatus
from baton.errors import ConfigError, DuplicateRequest
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from tests.support.engine_rig import EngineRig, prompt_of


def test_tokens_do_not_depend_on_batch_chunks_or_cache() -> None:
    rig = EngineRig(max_num_batched_tokens=9, long_prefill_token_threshold=5)
    shared = prompt_of(17)
    for number in range(6):
        rig.begin(f"r{number}", [*shared, *range(number)], max_tokens=7, seed=number)
    rig.run()
    for name, tokens in rig.tokens.items():
        assert tokens == rig.expected(name, 7)
    assert rig.scheduler.make_stats().prefix_cache.num_hit_tokens["device"] > 0


def test_a_prompt_is_cut_by_budget_and_threshold() -> None:
    rig = EngineRig(max_num_batched_tokens=16, long_prefill_token_threshold=12)
    rig.add("long", 30, max_tokens=1)
    rig.add("short", 3, max_tokens=9)
    first = rig.scheduler.schedule()
    assert first.num_scheduled_tokens == {"long": 12, "short": 3}
    rig.commit(first)
    assert rig.scheduler.schedule().num_scheduled_tokens == {"long": 12, "short": 1}


def test_a_step_with_few_tokens_of_prompts_computes_one_of_each_stream_beside_them() -> None:
    rig = EngineRig(max_num_batched_tokens=4, max_num_seqs=8)
    for number in range(6):
        rig.begin(f"r{number}", 4 + number, max_tokens=12, seed=number)
    rig.add("late", 10, max_tokens=2)
    most = 0
    while rig.scheduler.has_requests():
        output = rig.scheduler.schedule()
        decoding = output.total_num_scheduled_tokens - output.num_prefill_tokens
        running = [each for each in rig.requests.values() if each.status is RequestStatus.RUNNING]
        assert decoding == sum(each.num_output_tokens > 0 for each in running)
        assert output.num_prefill_tokens <= 4
        most = max(most, decoding if output.num_prefill_tokens == 4 else 0)
        rig.commit(output)
    assert most >= 6, "as many streams as the step has tokens of prompts, and more"
    for name, tokens in rig.tokens.items():
        assert tokens == rig.expected(name, 2 if name == "late" else 12)


@pytest.mark.parametrize("num_per_step", [1, 2, 3])
def test_beams_and_arrived_streams_get_their_tokens_beside_the_whole_budget_of_a_prompt(num_per_step: int) -> None:
    rig = EngineRig(num_blocks=400, max_num_batched_tokens=num_per_step, max_num_seqs=8)
    rig.add("search", 4, beam_width=4, max_tokens=9)
    rig.steps(6)
    rig.add("long", 60, max_tokens=1)
    rig.begin("arrived", 8, leg=Leg.DECODE, max_tokens=9)
    rig.complete_transfer("arrived")
    for number in range(1, 9):
        output = rig.scheduler.schedule()
        assert output.num_prefill_tokens == num_per_step
        rig.commit(output)
        assert len(rig.tokens["arrived"]) == 1 + number
    assert "search" in rig.ends
    rig.run_right("long", "arrived")


def test_a_long_prompt_leaves_a_token_to_each_stream_behind_it() -> None:
    """The threshold lets `late` run beside the first chunk; later chunks of the long prompt could use it all."""
    rig = EngineRig(max_num_batched_tokens=8, max_num_seqs=8, long_prefill_token_threshold=8)
    rig.add("holder", 6, max_tokens=3)
    rig.begin("long", 60, max_tokens=1)
    rig.add("late", 1, max_tokens=20)
    while "long" not in rig.ends:
        output = rig.scheduler.schedule()
        for name in ("holder", "late"):
            if rig.requests[name].status is RequestStatus.RUNNING:
                assert output.num_scheduled_tokens[name] == 1
        assert output.total_num_scheduled_tokens <= 8
        rig.commit(output)


def test_a_chunk_never_takes_the_tokens_of_requests_behind_it() -> None:
    """Preempted and resumed requests are last, and those with long histories come before those with short ones."""
    rig = EngineRig(num_blocks=40, max_num_batched_tokens=6, max_num_seqs=4)
    for number in range(4):
        rig.add(f"r{number}", 20, max_tokens=20)
    for _ in range(200):
        output = rig.scheduler.schedule()
        if output.is_empty:
            break
        running = set(rig.scheduler.requests) - output.preempted_req_ids
        decoding = {name for name in running if rig.requests[name].status is RequestStatus.RUNNING}
        assert decoding <= output.num_scheduled_tokens.keys()
        assert output.total_num_scheduled_tokens <= 6
        rig.commit(output)


def test_seats_are_limited() -> None:
    rig = EngineRig(max_num_seqs=2)
    for number in range(5):
        rig.add(f"r{number}", 4, max_tokens=3)
    rig.step()
    assert rig.scheduler.get_request_counts() == (2, 3)
    rig.run()
    assert [rig.reason(f"r{number}") for number in range(5)] == [Outcome.LENGTH] * 5
    assert list(rig.ends) == ["r0", "r1", "r2", "r3", "r4"]


def test_the_runner_gets_each_new_block_and_token_once() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add("r", 12, max_tokens=3, seed=5)
    first = rig.scheduler.schedule()
    (new,) = first.scheduled_new_reqs
    assert (new.prompt_token_ids, new.output_token_ids, new.num_computed_tokens) == (prompt_of(12), (), 0)
    assert list(new.block_ids) == [1, 2, 3]
    assert new.sampling_params.seed == 5
    rig.commit(first)
    second = rig.scheduler.schedule()
    assert not second.scheduled_new_reqs
    (known,) = second.scheduled_cached_reqs
    assert (known.num_computed_tokens, list(known.new_block_ids), known.resumed) == (8, [], False)
    rig.commit(second)
    third = rig.scheduler.schedule()
    (known,) = third.scheduled_cached_reqs
    assert (known.num_computed_tokens, list(known.new_block_ids), known.resumed) == (12, [4], False)
    rig.commit(third)
    rig.run()
    assert rig.scheduler.schedule().finished_req_ids == {"r"}
    assert rig.scheduler.schedule().finished_req_ids == frozenset()


def test_outputs_are_grouped_by_client(rig: EngineRig) -> None:
    rig.add("a", 4, client_index=1, max_tokens=2)
    rig.add("b", 4, client_index=2, max_tokens=2)
    rig.add("c", 4, client_index=1, max_tokens=2)
    outputs = rig.core.step()
    assert {client: [one.attempt.request_id for one in batch] for client, batch in outputs.items()} == {
        1: ["a", "c"],
        2: ["b"],
    }


def test_without_free_blocks_the_newest_request_is_preempted_and_no_token_changes() -> None:
    rig = EngineRig(num_blocks=11)
    for number in range(3):
        rig.add(f"r{number}", 8, max_tokens=20)
    preempted: list[str] = []
    for _ in range(100):
        if not rig.core.has_work():
            break
        rig.step()
        preempted += [name for kind, name, _ in rig.events() if kind == "preempted"]
    assert preempted[0] == "r2", "the newest"
    assert "r0" not in preempted, "the oldest always progresses"
    for name, tokens in rig.tokens.items():
        assert tokens == rig.expected(name, 20)
    stats = rig.scheduler.make_stats()
    assert stats.num_preemptions == len(preempted)


def test_a_resumed_request_gets_its_whole_table_and_finds_its_old_blocks() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add("old", 8, max_tokens=8)
    rig.add("new", 7, max_tokens=8)
    resumed = []
    for _ in range(40):
        output = rig.scheduler.schedule()
        resumed += [(known, output.preempted_req_ids) for known in output.scheduled_cached_reqs if known.resumed]
        rig.commit(output)
    (known, _), *_ = resumed
    assert known.request_id == "new"
    assert known.num_computed_tokens % 4 == 0
    assert len(known.new_block_ids) * 4 >= 8
    assert rig.tokens["new"] == rig.expected("new", 8)
    assert rig.tokens["old"] == rig.expected("old", 8)
    assert rig.requests["new"].num_preemptions >= 1


def test_kv_of_generated_tokens_is_found_after_preemption() -> None:
    """Keys cover prompt and output, so only evicted blocks are computed again."""
    rig = EngineRig(num_blocks=8)
    rig.add("old", 4, max_tokens=17)
    rig.add("new", 4, max_tokens=12)
    found = 0
    for _ in range(60):
        output = rig.scheduler.schedule()
        for known in output.scheduled_cached_reqs:
            if known.resumed:
                found = max(found, known.num_computed_tokens)
        rig.commit(output)
    assert found > 4, "more than the prompt"
    assert rig.tokens["new"] == rig.expected("new", 12)


def test_prefix_hits_are_reported(rig: EngineRig) -> None:
    prompt = prompt_of(16)
    rig.complete("first", prompt, max_tokens=1)
    rig.complete("second", prompt, max_tokens=1)
    assert rig.ends["first"].num_cached_tokens == 0
    assert rig.ends["second"].num_cached_tokens == 12
    stats = rig.scheduler.make_stats().prefix_cache
    assert (stats.num_requests, stats.num_tokens) == (2, 32)
    assert stats.num_hits == {"device": 1, "host": 0, "remote": 0}
    assert stats.num_hit_tokens == {"device": 12, "host": 0, "remote": 0}


def test_prefix_cache_can_be_reset_when_idle_only(rig: EngineRig) -> None:
    rig.begin("r", 16, max_tokens=2)
    assert not rig.scheduler.kv_cache_manager.reset_prefix_cache()
    rig.run()
    assert rig.scheduler.kv_cache_manager.reset_prefix_cache()
    rig.complete("again", rig.requests["r"].prompt_token_ids, max_tokens=1)
    assert rig.ends["again"].num_cached_tokens == 0


def test_a_live_id_can_not_be_used_again(rig: EngineRig) -> None:
    rig.add("r", 4, max_tokens=1)
    with pytest.raises(DuplicateRequest, match="request r is here already"):
        rig.scheduler.add_request(Request("r", RequestSpec([1], SamplingParams())))
    rig.run()
    rig.scheduler.add_request(Request("r", RequestSpec([1], SamplingParams())))
    assert rig.scheduler.get_request_counts() == (0, 1)


@pytest.mark.parametrize("steps", [0, 1, 2, 6], ids=["waiting", "half a prompt", "more of it", "running"])
def test_an_abort_ends_a_request_once_in_any_state(steps: int) -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add("r", 20, max_tokens=50)
    rig.steps(steps)
    (output,) = rig.abort("r", "r", "nobody")
    assert (output.outcome, output.new_token_ids) == (Outcome.ABORTED, [])
    assert rig.abort("r") == []
    assert not rig.scheduler.has_requests()
    assert rig.scheduler.kv_cache_manager.pool.accounts().owned == 0
    assert rig.scheduler.schedule().finished_req_ids == {"r"}


def test_a_preempted_request_can_be_aborted() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add("old", 8, max_tokens=12)
    rig.add("new", 7, max_tokens=12)
    while rig.requests["new"].status is not RequestStatus.PREEMPTED:
        rig.step()
    assert rig.abort("new")[0].outcome is Outcome.ABORTED
    rig.run_right("old")


def test_results_for_requests_that_ended_meanwhile_are_skipped_and_counted(rig: EngineRig) -> None:
    rig.add("gone", 4, max_tokens=5)
    rig.add("stays", 4, max_tokens=5)
    output = rig.scheduler.schedule()
    computed = rig.runner.execute_model(output)
    rig.abort("gone")
    rig.scheduler.add_request(Request("gone", RequestSpec([1, 2], SamplingParams())))
    sampled = {**computed.sampled_token_ids, "stranger": [1]}
    outputs = rig.commit(output, ModelRunnerOutput(sampled))
    assert [one.attempt.request_id for one in outputs] == ["stays"]
    assert rig.scheduler.counters.num_skipped_results == 2
    assert rig.scheduler.requests["gone"].num_output_tokens == 0, "its successor of the same name got nothing"


def test_the_same_step_commits_once(rig: EngineRig) -> None:
    rig.add("r", 4, max_tokens=5)
    output = rig.scheduler.schedule()
    computed = rig.runner.execute_model(output)
    assert rig.commit(output, computed)
    assert rig.scheduler.update_from_output(output, computed) == {}
    assert rig.requests["r"].num_output_tokens == 1


def test_events_of_a_request_are_in_order() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.clock.advance(5.0)
    rig.complete("r", 12, max_tokens=2)
    assert rig.events() == [
        ("queued", "r", 12),
        ("scheduled", "r", 0),
        ("chunk_computed", "r", 8),
        ("chunk_computed", "r", 12),
        ("first_token", "r", 0),
        ("finished", "r", 2),
    ]
    rig.add("s", 1)
    assert [event.time for event in rig.scheduler.take_events()] == [5.0]


def test_cache_usage_counts_the_blocks_that_are_held() -> None:
    rig = EngineRig(num_blocks=11)
    assert rig.scheduler.make_stats().kv_cache_usage == 0.0
    rig.begin("r", 20, max_tokens=5)
    assert rig.scheduler.make_stats().kv_cache_usage == 0.5
    rig.run()
    assert rig.scheduler.make_stats().kv_cache_usage == 0.0


@pytest.mark.parametrize(
    ("limits", "story"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be positive"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "without chunked prefill"),
        ({"watermark": 1.0}, "watermark"),
        ({"block_size": 0}, "block_size"),
        ({"long_prefill_token_threshold": -1}, "negative"),
    ],
)
def test_contradicting_limits_are_refused(limits: dict[str, Any], story: str) -> None:
    with pytest.raises(ConfigError, match=story):
        EngineRig(**limits)
