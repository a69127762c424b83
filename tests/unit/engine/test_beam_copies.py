"""The cost of a beam search step does not depend on the length: only real forks copy, and only what they write to."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from baton.engine.batch import CachedRequestData, SchedulerOutput
from baton.engine.sequences.beams import BeamSearch
from baton.messages.node import Outcome
from baton.messages.sampling import TokenLogprobs
from tests.doubles.fake_runner import expected_beams, prompt_slots
from tests.support.engine_rig import EngineRig, prompt_of

WIDTH = 4


def num_values(value: Any) -> int:
    """The number of numbers and texts in a nested value."""
    if is_dataclass(value):
        return sum(num_values(getattr(value, one.name)) for one in fields(value))
    if isinstance(value, Mapping):
        return sum(num_values(item) for item in value.values()) + len(value)
    if isinstance(value, (list, tuple, Set)):
        return sum(num_values(item) for item in value)
    return 1


def each_beam_continues_itself(output: SchedulerOutput, step: int) -> Mapping[str, list[TokenLogprobs]]:
    """Log-probabilities: equal for all beams behind the prompt; later the next token of each is nearly certain."""
    near = -1.0 if step == 0 else -0.01
    top = [(100 * step + place, near if place < (WIDTH if step == 0 else 1) else -50.0) for place in range(2 * WIDTH)]
    return {name: [TokenLogprobs(*top[0], 1, top)] for name in output.num_scheduled_tokens}


def steady_search(rig: EngineRig, num_steps: int, num_prompt_tokens: int) -> list[SchedulerOutput]:
    """Decide and compute steps of a search in which each beam continues itself; the real runner follows."""
    rig.add("r", num_prompt_tokens, beam_width=WIDTH, n=WIDTH, max_tokens=1000)
    outputs = []
    for step in range(num_steps):
        output = rig.scheduler.schedule()
        computed = rig.runner.execute_model(output)
        assert not computed.failed
        rig.commit(output, replace(computed, logprobs=each_beam_continues_itself(output, step)))
        outputs.append(output)
    return outputs


def test_beams_that_continue_themselves_copy_nothing() -> None:
    rig = EngineRig(num_blocks=400, max_model_len=1024, enable_prefix_caching=False)
    _, forking, *steady = steady_search(rig, 300, 50)
    assert len(forking.scheduled_forked_reqs) == len(forking.blocks_to_copy) == WIDTH
    for output in steady:
        assert output.num_scheduled_tokens.keys() == forking.num_scheduled_tokens.keys()
        assert not output.scheduled_new_reqs
        assert not output.scheduled_forked_reqs
        assert not output.blocks_to_copy
        assert not output.finished_req_ids
        assert all(len(known.new_block_ids) <= 1 for known in output.scheduled_cached_reqs)
    # Eight values for each beam, and the step itself.
    assert max(num_values(output) for output in steady) <= 8 * WIDTH + 4
    assert rig.runner.num_requests == WIDTH


def test_beams_that_continue_themselves_have_the_right_kv() -> None:
    rig = EngineRig(num_blocks=200, max_model_len=512)
    steady_search(rig, 61, 30)
    beams = list(rig.scheduler.requests.values())
    assert len(beams) == WIDTH
    prompt = rig.requests["r"].prompt_token_ids
    for request in beams:
        assert request.num_output_tokens == 61
        history = [*prompt, *request.output_token_ids[:-1]]
        block_ids = rig.scheduler.kv_cache_manager.block_ids(request.request_id)
        assert rig.runner.read_slots(block_ids, len(history)) == prompt_slots(history)
    assert len({tuple(request.output_token_ids) for request in beams}) == WIDTH


def test_an_heir_keeps_the_blocks_and_state_of_its_request() -> None:
    rig = EngineRig(num_blocks=200, max_model_len=512)
    steady_search(rig, 20, 30)
    before = {name: (one.output_token_ids, one.block_hashes) for name, one in rig.scheduler.requests.items()}
    output = rig.scheduler.schedule()
    computed = rig.runner.execute_model(output)
    rig.commit(output, replace(computed, logprobs=each_beam_continues_itself(output, 20)))
    after = {name: (one.output_token_ids, one.block_hashes) for name, one in rig.scheduler.requests.items()}
    assert before.keys() == after.keys()
    assert all(before[name][0] is after[name][0] and before[name][1] is after[name][1] for name in before)


@pytest.mark.parametrize("caching", [True, False])
def test_only_the_second_child_of_a_beam_and_further_ones_fork(caching: bool) -> None:
    rig = EngineRig(num_blocks=200, max_model_len=512, enable_prefix_caching=caching)
    rig.begin("r", prompt_of(30, 1), beam_width=WIDTH, n=WIDTH, max_tokens=40)
    num_heirs = num_forks = 0
    before: set[str] = set()
    while rig.core.has_work():
        output = rig.scheduler.schedule()
        heirs, forked = output.scheduled_cached_reqs, output.scheduled_forked_reqs
        assert not output.scheduled_new_reqs, "the runner knows the tokens of all of them"
        assert {known.request_id for known in heirs} <= before
        assert {fork.parent_id for fork in forked} <= before | {"r"}
        assert len(output.blocks_to_copy) == sum(fork.num_computed_tokens % 4 > 0 for fork in forked)
        num_heirs += len(heirs)
        num_forks += len(forked)
        before = set(output.num_scheduled_tokens)
        rig.commit(output)
    assert rig.reason("r") is Outcome.LENGTH
    assert num_heirs > num_forks > WIDTH
    assert rig.runner.num_requests <= WIDTH


def assert_finds_all(rig: EngineRig, width: int, max_tokens: int) -> None:
    search = BeamSearch(width, frozenset(), max_tokens)
    expected = expected_beams(rig.requests["r"].prompt_token_ids, search, vocab_size=1000)
    assert [rig.tokens[name] for name in ("r", *(f"r~{index}" for index in range(1, width)))] == expected
    assert not rig.scheduler.has_requests()
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1


@pytest.mark.parametrize("caching", [True, False])
def test_an_heir_that_waits_for_a_seat_gives_up_its_blocks_and_keeps_its_tokens(caching: bool) -> None:
    rig = EngineRig(max_num_seqs=2, enable_prefix_caching=caching)
    rig.add("r", prompt_of(9, 2), beam_width=6, n=6, max_tokens=14)
    again: list[CachedRequestData] = []
    while rig.core.has_work():
        output = rig.scheduler.schedule()
        again += [known for known in output.scheduled_cached_reqs if known.resumed]
        rig.commit(output)
        pool = rig.scheduler.kv_cache_manager.pool
        assert pool.accounts().owned <= 2 * 6, "two beams of at most 23 tokens"
    assert again
    assert all(known.last_token_id is not None for known in again), "nobody says the other tokens again"
    assert_finds_all(rig, 6, 14)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("num_blocks", "seats", "chunk"), [(10, 3, 2), (11, 6, 2), (12, 6, 3)])
def test_preempted_beams_are_resumed_with_their_tokens(mode: str, num_blocks: int, seats: int, chunk: int) -> None:
    rig = EngineRig(
        num_blocks,
        max_num_seqs=seats,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=False,
        preemption_mode=mode,
        num_host_blocks=30 if mode == "swap" else 0,
    )
    rig.add("other", 5, max_tokens=24)
    rig.add("r", prompt_of(9, 2), beam_width=6, n=6, max_tokens=14)
    preempted: list[str] = []
    while rig.core.has_work():
        decided = rig.scheduler.schedule()
        preempted += decided.preempted_req_ids
        rig.commit(decided)
    assert [name for name in preempted if name.startswith("r~0^")], "it is a beam that gave way"
    assert rig.scheduler.make_stats().num_preemptions_by_mode[mode] == len(preempted)
    assert rig.tokens["other"] == rig.expected("other", 24)
    assert_finds_all(rig, 6, 14)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("num_blocks", "width", "caching"), [(12, 4, False), (14, 4, True), (16, 8, True)])
def test_a_beam_search_is_preempted_before_earlier_requests(
    policy: str, num_blocks: int, width: int, caching: bool
) -> None:
    rig = EngineRig(num_blocks, policy=policy, enable_prefix_caching=caching)
    rig.add("first", 5, max_tokens=38)
    rig.add("r", prompt_of(9, 2), beam_width=width, n=width, max_tokens=20)
    rig.run(3000)
    assert not rig.scheduler.make_stats().num_preemptions
    assert rig.tokens["first"] == rig.expected("first", 38)
    assert_finds_all(rig, width, 20)


def test_a_beam_search_of_a_better_priority_is_not_preempted() -> None:
    rig = EngineRig(12, policy="priority", enable_prefix_caching=False)
    rig.add("first", 5, max_tokens=20, priority=1)
    rig.add("r", prompt_of(9, 2), beam_width=4, n=4, max_tokens=14)
    rig.run(3000)
    assert {name for kind, name, _ in rig.events() if kind == "preempted"} == {"first"}
    assert rig.tokens["first"] == rig.expected("first", 20)
    assert_finds_all(rig, 4, 14)


@pytest.mark.parametrize("num_searches", [2, 3])
def test_concurrent_beam_searches_do_not_take_each_others_blocks(num_searches: int) -> None:
    rig = EngineRig(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=200)
    for index in range(num_searches):
        rig.add(f"s{index}", prompt_of(10, index), beam_width=WIDTH, n=WIDTH, max_tokens=30)
    rig.steps(6)
    rig.abort("s0")
    output = rig.scheduler.schedule()
    assert not any(known.resumed for known in output.scheduled_cached_reqs)
    assert set(output.num_scheduled_tokens.values()) == {1}
    assert rig.runner.num_requests == num_searches * WIDTH
    rig.commit(output)
    assert rig.runner.num_requests == (num_searches - 1) * WIDTH
    rig.run()
    for index in range(1, num_searches):
        name = f"s{index}"
        search = BeamSearch(WIDTH, frozenset(), 30)
        expected = expected_beams(rig.requests[name].prompt_token_ids, search, vocab_size=1000)
        assert [rig.tokens[one] for one in (name, *(f"{name}~{i}" for i in range(1, WIDTH)))] == expected
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
def test_a_beam_search_aborted_in_the_middle_of_a_step_leaves_no_state(steps: int) -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.add("bystander", 6, max_tokens=40)
    rig.add("r", 6, beam_width=4, n=3, max_tokens=50)
    rig.steps(steps)
    rig.abort("r")
    rig.step()
    assert rig.runner.num_requests == 1
    rig.run_right("bystander")
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1


def test_a_beam_search_is_queued_scheduled_and_looked_up_once(rig: EngineRig) -> None:
    rig.complete("r", 6, beam_width=4, n=3, max_tokens=20)
    assert [kind for kind, _, _ in rig.events()] == ["queued", "scheduled", "chunk_computed", "first_token", "finished"]
    assert rig.scheduler.make_stats().prefix_cache.num_requests == 1


@pytest.mark.parametrize("where", ["raise_first", "raise_next"])
@pytest.mark.parametrize("seats", [2, 8])
def test_a_beam_search_ended_by_a_lost_step_leaves_no_state(where: str, seats: int) -> None:
    rig = EngineRig(max_num_seqs=seats)
    rig.add("r", 6, beam_width=4, n=3, max_tokens=50)
    rig.steps(7)
    setattr(rig.runner, where, RuntimeError("broken"))
    rig.run()
    assert rig.reason("r") is Outcome.ERROR
    rig.begin("after", 6, beam_width=4, n=4, max_tokens=9)
    assert rig.runner.num_requests == 1
    rig.run()
    expected = expected_beams(rig.requests["after"].prompt_token_ids, BeamSearch(4, frozenset(), 9), vocab_size=1000)
    assert [rig.tokens[one] for one in ("after", "after~1", "after~2", "after~3")] == expected
