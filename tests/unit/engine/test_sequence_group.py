"""Several sequences of one request: the prompt is computed once, and each has the tokens that it would have alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.batch import BlockCopy, SchedulerOutput
from baton.engine.request import RequestStatus
from baton.engine.sequences.sequence_group import sequence_id, sequence_seed
from baton.errors import DuplicateRequest, InvalidRequest
from baton.messages.node import Leg, Outcome
from tests.support.engine_rig import EngineRig, name_of, prompt_of

BLOCK_SIZE = 4


def names(count: int, request_id: str = "r") -> list[str]:
    return [sequence_id(request_id, index) for index in range(count)]


def assert_all_right(rig: EngineRig, count: int, max_tokens: int, request_id: str = "r") -> None:
    for name in names(count, request_id):
        assert rig.tokens[name] == rig.expected(name, max_tokens), name
        assert rig.reason(name) is Outcome.LENGTH


def step(rig: EngineRig) -> SchedulerOutput:
    output = rig.scheduler.schedule()
    rig.commit(output)
    return output


def test_each_sequence_has_its_own_id_and_seed() -> None:
    assert names(3, "a#1@f") == ["a#1@f", "a#1@f~1", "a#1@f~2"]
    seeds = [sequence_seed(7, index) for index in range(8)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**64 for seed in [*seeds, sequence_seed(2**64 - 1, 7)])
    # Part of what a client may rely on: these may never change.
    assert sequence_seed(0, 1) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_each_sequence_has_the_tokens_that_it_has_alone(num_prompt_tokens: int, caching: bool) -> None:
    rig = EngineRig(enable_prefix_caching=caching)
    rig.complete("r", num_prompt_tokens, n=4, max_tokens=9, seed=3)
    assert_all_right(rig, 4, 9)
    assert len({tuple(rig.tokens[name]) for name in names(4)}) == 4
    assert not rig.scheduler.has_requests()
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1


def test_forks_share_full_blocks_and_copy_the_one_they_write_to() -> None:
    rig = EngineRig(enable_prefix_caching=False)
    rig.add("r", 10, n=3, max_tokens=6)
    first = step(rig)
    assert (first.num_scheduled_tokens, list(first.blocks_to_copy)) == ({"r": 10}, [])
    manager = rig.scheduler.kv_cache_manager
    prompt = manager.block_ids("r")
    assert len(prompt) == 3
    second = step(rig)
    assert second.num_scheduled_tokens == {"r": 1, "r~1": 1, "r~2": 1}, "the last prompt token is computed again"
    tables = [manager.block_ids(name) for name in names(3)]
    assert [table[:2] for table in tables] == [prompt[:2]] * 3
    assert len({table[2] for table in tables}) == 3
    assert list(second.blocks_to_copy) == [BlockCopy(prompt[2], tables[1][2]), BlockCopy(prompt[2], tables[2][2])]
    assert [manager.pool.blocks[block].owner_cnt for block in prompt] == [3, 3, 1]
    assert manager.pool.accounts().owned == 5
    rig.run()
    assert_all_right(rig, 3, 6)


def test_a_prompt_of_whole_blocks_is_not_written_to(rig: EngineRig) -> None:
    rig.add("r", 2 * BLOCK_SIZE, n=2, max_tokens=6)
    step(rig)
    prompt = rig.scheduler.kv_cache_manager.block_ids("r")
    second = step(rig)
    theirs = rig.scheduler.kv_cache_manager.block_ids("r~1")
    assert theirs[0] == prompt[0]
    assert list(second.blocks_to_copy) == [BlockCopy(prompt[1], theirs[1])], "the fork computes its last slot again"
    rig.run()
    assert_all_right(rig, 2, 6)


def test_nothing_to_copy_when_the_fork_begins_a_block(rig: EngineRig) -> None:
    rig.add("r", 2 * BLOCK_SIZE + 1, n=2, max_tokens=6)
    step(rig)
    assert list(step(rig).blocks_to_copy) == []
    rig.run()
    assert_all_right(rig, 2, 6)


def test_more_sequences_than_seats_run_one_after_the_other() -> None:
    rig = EngineRig(max_num_seqs=2, enable_prefix_caching=False)
    rig.add("r", 6, n=8, max_tokens=5)
    rig.complete("later", 6, max_tokens=5)
    assert_all_right(rig, 8, 5)
    assert rig.tokens["later"] == rig.expected("later", 5)


def test_further_sequences_are_admitted_before_later_requests() -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.add("r", 6, n=3, max_tokens=3)
    rig.add("other", 6, max_tokens=3)
    order: list[str] = []
    while rig.core.has_work():
        order += [new.request_id for new in step(rig).scheduled_new_reqs]
    assert order == ["r", "other", "r~1", "r~2"]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_many_sequences_leave_half_of_the_seats_to_others(caching: bool, policy: str) -> None:
    rig = EngineRig(num_blocks=257, max_num_seqs=8, enable_prefix_caching=caching, policy=policy)
    rig.add("r", 6, n=128, max_tokens=5)
    rig.steps(3)
    load = rig.scheduler.make_stats()
    assert (load.num_running, load.num_waiting) == (4, 0), "the others are held back, and are no load"
    rig.begin("later", 6, max_tokens=5)
    assert rig.requests["later"].status is RequestStatus.RUNNING
    most = 0
    while rig.core.has_work():
        rig.step()
        running = (one for one in rig.scheduler.requests.values() if one.status is RequestStatus.RUNNING)
        most = max(most, sum(one.request_id.startswith("r") for one in running))
    assert most == 4
    assert_all_right(rig, 128, 5)
    assert rig.tokens["later"] == rig.expected("later", 5)
    assert not rig.scheduler.has_requests()


def test_sequences_of_two_large_requests_take_turns_with_others() -> None:
    rig = EngineRig(num_blocks=257, max_num_seqs=4)
    rig.add("r", 6, n=20, max_tokens=4)
    rig.add("s", 6, n=20, max_tokens=4)
    rig.steps(3)
    rig.add("later", 6, max_tokens=4)
    order = []
    while rig.core.has_work():
        order += [new.request_id for new in step(rig).scheduled_new_reqs]
    assert order.index("later") <= 1, "it gets one of the next seats, although 18 sequences of each are left"
    assert_all_right(rig, 20, 4, "r")
    assert_all_right(rig, 20, 4, "s")


def test_a_prompt_of_128_sequences_is_computed_once() -> None:
    rig = EngineRig(num_blocks=257, max_num_seqs=8)
    rig.add("r", 41, n=128, max_tokens=5)
    computed = 0
    while rig.core.has_work():
        computed += sum(step(rig).num_scheduled_tokens.values())
    # The last prompt token is computed by each sequence, since its first token depends on it.
    assert computed == 41 + 4 + 127 * 5
    assert_all_right(rig, 128, 5)


def test_sequences_that_are_held_back_can_be_aborted() -> None:
    rig = EngineRig(num_blocks=257, max_num_seqs=4)
    rig.add("r", 6, n=100, max_tokens=50)
    rig.steps(4)
    (ended,) = rig.abort_sequence("r", 99)
    assert (name_of(ended), ended.outcome) == ("r~99", Outcome.ABORTED)
    assert len(rig.abort("r")) == 99
    assert not rig.scheduler.has_requests()
    assert not rig.core.has_work()
    rig.add("next", 6, max_tokens=4)
    rig.run_right("next")


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_are_resumed_with_the_same_tokens(caching: bool) -> None:
    rig = EngineRig(num_blocks=9, enable_prefix_caching=caching)
    rig.complete("r", 6, n=4, max_tokens=20)
    assert rig.scheduler.make_stats().num_preemptions > 0
    assert_all_right(rig, 4, 20)


def test_a_prompt_being_computed_is_waited_for_not_computed_twice() -> None:
    rig = EngineRig(enable_prefix_caching=False, max_num_batched_tokens=8)
    rig.add("r", 20, n=3, max_tokens=4)
    counts: list[dict[str, int]] = []
    while rig.core.has_work():
        counts.append(dict(step(rig).num_scheduled_tokens))
    assert sum(count for per_step in counts for count in per_step.values()) == 20 + 3 + 2 + 3 * 2
    assert_all_right(rig, 3, 4)


def test_the_request_id_ends_all_sequences_and_a_lone_id_one(rig: EngineRig) -> None:
    rig.add("r", 6, n=3, max_tokens=50)
    rig.steps(4)
    (ended,) = rig.abort_sequence("r", 0)
    assert (name_of(ended), ended.outcome) == ("r", Outcome.ABORTED)
    (ended,) = rig.abort_sequence("r", 2)
    assert name_of(ended) == "r~2"
    rig.step()
    assert set(rig.scheduler.requests) == {"r~1"}
    with pytest.raises(DuplicateRequest):
        rig.add("r", 6)
    assert [name_of(output) for output in rig.abort("r")] == ["r~1"]
    assert rig.abort("r") == []
    assert not rig.scheduler.has_requests()
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1
    rig.ends.clear()
    rig.add("r", 6, max_tokens=2)


def test_an_abort_ends_waiting_sequences() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.begin("r", 6, n=3, max_tokens=50)
    assert len(rig.abort("r")) == 3
    rig.run()
    assert not rig.scheduler.has_requests()


@pytest.mark.parametrize("broken", ["r", "r~1"])
def test_one_failed_sequence_fails_the_request(broken: str) -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.add("r", 6, n=3, max_tokens=50)
    rig.add("bystander", 5, max_tokens=4)
    rig.steps(3)
    rig.runner.failures[broken] = "non-finite logits"
    rig.run()
    assert {rig.reason(name) for name in names(3)} == {Outcome.ERROR}
    assert rig.ends[broken].error == "non-finite logits"
    assert rig.tokens["bystander"] == rig.expected("bystander", 4)


def test_an_invalid_sequence_makes_the_whole_request_invalid(rig: EngineRig) -> None:
    rig.begin("r", 6, n=3, max_tokens=50)
    rig.step()
    decided = rig.scheduler.schedule()
    failed = {"r~1": InvalidRequest("json_schema", "too complex")}
    result = replace(rig.runner.execute_model(decided), failed=failed)
    told = rig.scheduler.update_from_output(decided, result)
    ends = {name_of(end): end for outputs in told.values() for end in outputs if end.outcome}
    assert {name: ends[name].outcome for name in names(3)} == dict.fromkeys(names(3), Outcome.INVALID)
    assert {str(end.error) for end in ends.values()} == {"json_schema: too complex"}


def test_a_transferred_prompt_serves_all_sequences() -> None:
    rig = EngineRig(enable_prefix_caching=False)
    rig.begin("r", 10, leg=Leg.DECODE, n=4, max_tokens=7)
    assert set(rig.scheduler.requests) == {"r"}
    rig.complete_transfer("r")
    counts = [dict(step(rig).num_scheduled_tokens), dict(step(rig).num_scheduled_tokens)]
    assert counts == [{"r": 1}, dict.fromkeys(names(4), 1)]
    rig.run()
    assert_all_right(rig, 4, 7)


def test_the_prefill_leg_hands_off_even_if_its_own_sequence_stopped(rig: EngineRig) -> None:
    rig.complete("p", 10, leg=Leg.PREFILL, n=2, max_tokens=1)
    assert rig.reason("p") is Outcome.HANDED_OFF
    assert rig.tokens["p"] == rig.expected("p", 1)
    rig.begin("d", 10, leg=Leg.DECODE, n=2, max_tokens=1)
    rig.complete_transfer("d")
    assert rig.reason("d") is Outcome.LENGTH
    rig.run_right("d~1")


def test_a_transfer_that_fails_ends_the_request_once(rig: EngineRig) -> None:
    rig.begin("r", 10, leg=Leg.DECODE, n=4, max_tokens=7)
    assert rig.abort_sequence("r", 0) == [], "there are no sequences yet, and the others need the prompt"
    (ended,) = rig.transfer(failed={"r": "peer gone"})
    assert ended.outcome is Outcome.KV_LOST
    rig.run()
    assert not rig.scheduler.has_requests()


@pytest.mark.parametrize("n", [0, -1, 129])
def test_n_and_best_of_out_of_bounds_are_refused(rig: EngineRig, n: int) -> None:
    with pytest.raises(InvalidRequest, match="n: must be 1 to 128"):
        rig.add("r", 4, n=n)
    assert not rig.scheduler.has_requests()


def test_the_other_sequences_continue_when_one_ends_at_once() -> None:
    rig = EngineRig(enable_prefix_caching=False)
    prompt = prompt_of(6)
    rig.complete("other", prompt, max_tokens=1)
    (first,) = rig.tokens["other"]
    rig.complete("s", prompt, n=3, max_tokens=5, stop_token_ids=frozenset({first}))
    assert rig.reason("s") is Outcome.STOP
    for name in names(3, "s")[1:]:
        expected = rig.expected(name, 5)
        assert rig.tokens[name] == expected[: expected.index(first) + 1] if first in expected else expected
    assert rig.requests["s"].outcome is Outcome.STOP
