"""Drafts in the scheduler: fewer steps for the same tokens, and no trace of a token that was not verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.batch import SchedulerOutput
from baton.messages.node import Leg, Outcome
from baton.messages.speculation import DraftCounts, SpeculationConfig
from tests.doubles.fake_grammar import FakeMatcher
from tests.support.engine_rig import EngineRig
from tests.support.executors import Ahead, executor_for


def to_come(rig: EngineRig, name: str, count: int) -> list[int]:
    known = rig.scheduler.requests[name].num_output_tokens
    return rig.expected(name, known + count)[known:]


def step_with(rig: EngineRig, drafts: Mapping[str, Sequence[int]]) -> None:
    rig.scheduler.update_draft_token_ids(drafts)
    rig.step()


def decided_with(rig: EngineRig, drafts: Mapping[str, Sequence[int]]) -> SchedulerOutput:
    rig.scheduler.update_draft_token_ids(drafts)
    return rig.scheduler.schedule()


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_drafts_up_to_the_first_wrong_one_are_tokens_of_one_step(rig: EngineRig, num_right: int) -> None:
    rig.begin("r", 6, max_tokens=20)
    right = to_come(rig, "r", 5)
    step_with(rig, {"r": [*right[:num_right], *(token_id + 1 for token_id in right[num_right:])]})
    assert rig.tokens["r"] == rig.expected("r", 1 + num_right + 1)
    rig.run_right("r")
    assert rig.reason("r") is Outcome.LENGTH


def test_drafts_count_by_position(rig: EngineRig) -> None:
    rig.begin("r", 6, max_tokens=20)
    step_with(rig, {"r": to_come(rig, "r", 2)})
    step_with(rig, {"r": [*to_come(rig, "r", 1), 1001, 1002]})
    step_with(rig, {"r": [1001]})
    stats = rig.scheduler.make_stats().spec_decoding
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 6, 3)
    assert stats.num_accepted_tokens_per_pos == {0: 2, 1: 1}


def test_outputs_count_the_drafts_of_their_request(rig: EngineRig) -> None:
    """In all, with each step that verified some; what is right behind the end is no part of the output."""
    rig.add("r", 6, max_tokens=20)
    rig.add("plain", 6, max_tokens=20)
    stop = rig.expected("r", 9)[8]
    rig.add("twin", rig.requests["r"].prompt_token_ids, max_tokens=20, stop_token_ids=frozenset({stop}))
    assert all(output.draft_counts is None for output in rig.step())
    reported: dict[str, list[DraftCounts | None]] = {name: [] for name in rig.requests}

    def step(drafts: Mapping[str, Sequence[int]]) -> None:
        rig.scheduler.update_draft_token_ids(drafts)
        for output in rig.step():
            reported[output.attempt.request_id].append(output.draft_counts)

    step({"r": to_come(rig, "r", 2), "twin": to_come(rig, "r", 3)})
    step({"r": [*to_come(rig, "r", 1), 1001, 1002]})
    step({})
    num_twin = len(rig.tokens["twin"])
    step({"twin": rig.expected("r", 20)[num_twin:][:6]})
    assert reported["plain"] == [None] * 4
    assert reported["r"] == [DraftCounts(2, 2), DraftCounts(5, 3), None, None]
    assert rig.reason("twin") is Outcome.STOP
    first, *between, last = reported["twin"]
    assert (first, between) == (DraftCounts(3, 3), [None, None])
    assert last is not None
    # The output ends on a drafted token.
    assert last == DraftCounts(9, 3 + len(rig.tokens["twin"]) - num_twin)


@pytest.mark.parametrize(("num_drafts", "accepted"), [(1, 1), (2, 2), (3, 3), (6, 3)])
def test_drafts_up_to_a_stop_token_are_accepted(rig: EngineRig, num_drafts: int, accepted: int) -> None:
    rig.add("r", 6, max_tokens=20)
    stop = rig.expected("r", 4)[3]
    rig.begin("twin", rig.requests["r"].prompt_token_ids, max_tokens=20, stop_token_ids=frozenset({stop}))
    step_with(rig, {"twin": to_come(rig, "r", num_drafts)})
    # Without an end among them, the token behind the drafts is the step's own.
    assert rig.tokens["twin"] == rig.expected("r", 4)[: 2 + num_drafts]
    rig.run()
    assert rig.tokens["twin"] == rig.expected("r", 4)
    assert rig.requests["twin"].draft_counts == DraftCounts(num_drafts, accepted)


def test_an_output_ends_within_right_drafts(rig: EngineRig) -> None:
    """At a stop token, and exactly at its length; the tokens behind are dropped."""
    rig.add("stops", 6, max_tokens=20)
    stop = rig.expected("stops", 4)[3]
    rig.add("twin", rig.requests["stops"].prompt_token_ids, max_tokens=20, stop_token_ids=frozenset({stop}))
    rig.begin("short", 7, max_tokens=4)
    step_with(rig, {name: to_come(rig, name, 8) for name in rig.requests})
    assert rig.tokens["twin"] == rig.expected("twin", 4)
    assert (rig.reason("twin"), rig.ends["twin"].stop_reason) == (Outcome.STOP, stop)
    assert rig.tokens["short"] == rig.expected("short", 4)
    assert rig.reason("short") is Outcome.LENGTH
    assert rig.tokens["stops"] == rig.expected("stops", 10)


def test_drafts_end_before_the_length_of_the_output_and_of_the_model() -> None:
    rig = EngineRig(max_model_len=16)
    rig.add("short", 6, max_tokens=4)
    rig.begin("long", 6, max_tokens=100)
    decided = decided_with(rig, {name: to_come(rig, name, 12) for name in rig.requests})
    assert {name: len(drafts) for name, drafts in decided.scheduled_spec_decode_tokens.items()} == {
        "short": 2,
        "long": 8,
    }
    rig.commit(decided)
    assert rig.tokens["short"] == rig.expected("short", 4)
    assert rig.tokens["long"] == rig.expected("long", 10)


def test_a_request_that_does_not_decode_gets_no_drafts() -> None:
    rig = EngineRig(max_num_seqs=1, max_num_batched_tokens=4)
    rig.add("filling", 12, max_tokens=4)
    rig.begin("waiting", 5, max_tokens=4)
    decided = decided_with(rig, {"filling": [1, 2], "waiting": [1, 2], "stranger": [1, 2]})
    assert not decided.scheduled_spec_decode_tokens
    rig.commit(decided)
    rig.run()
    assert all(rig.tokens[name] == rig.expected(name, 4) for name in rig.requests)


def test_drafts_leave_the_budget_to_others() -> None:
    rig = EngineRig(max_num_batched_tokens=8, max_num_seqs=4)
    for name in ("a", "b"):
        rig.add(name, 2, max_tokens=30)
    rig.step()
    rig.begin("prompt", 20, max_tokens=3)
    decided = decided_with(rig, {"a": to_come(rig, "a", 9), "b": to_come(rig, "b", 9)})
    assert decided.total_num_scheduled_tokens <= 8
    assert decided.num_scheduled_tokens["prompt"] >= 1
    assert decided.num_scheduled_tokens["b"] >= 1
    rig.commit(decided)
    rig.run()
    assert all(rig.tokens[name] == rig.expected(name, len(rig.tokens[name])) for name in rig.requests)


def test_drafts_leave_prompts_their_own_budget_beside_many_streams() -> None:
    rig = EngineRig(num_blocks=400, max_num_batched_tokens=8, max_num_seqs=16)
    for number in range(8):
        rig.add(f"r{number}", 4, max_tokens=40)
    rig.steps(8)
    rig.add("late", 12, max_tokens=2)
    for num_of_prompt in (8, 4):
        decided = decided_with(rig, {f"r{number}": to_come(rig, f"r{number}", 4) for number in range(8)})
        num_drafts = sum(map(len, decided.scheduled_spec_decode_tokens.values()))
        assert (decided.num_scheduled_tokens["late"], decided.num_prefill_tokens) == (num_of_prompt, num_of_prompt)
        assert num_drafts == rig.config.step_tokens - 8 - 1 - num_of_prompt, "what the prompt can't need"
        rig.commit(decided)
    rig.run_right(*rig.requests)


def test_no_request_is_preempted_for_a_draft() -> None:
    rig = EngineRig(num_blocks=1 + 5)
    rig.add("a", 8, max_tokens=9)
    rig.begin("b", 7, max_tokens=2)
    assert rig.scheduler.make_stats().free_blocks == 1
    decided = decided_with(rig, {"a": to_come(rig, "a", 8), "b": []})
    assert not decided.scheduled_spec_decode_tokens
    assert not decided.preempted_req_ids
    rig.commit(decided)
    rig.run_right("a")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_request_with_drafts_can_be_preempted(mode: str) -> None:
    rig = EngineRig(num_blocks=1 + 6, preemption_mode=mode, num_host_blocks=20)
    rig.add("old", 10, max_tokens=14)
    rig.add("new", 9, max_tokens=14)
    for _ in range(40):
        if not rig.core.has_work():
            break
        step_with(rig, {name: to_come(rig, name, 3) for name in rig.scheduler.requests})
    assert rig.scheduler.make_stats().num_preemptions > 0
    for name in ("old", "new"):
        assert rig.tokens[name] == rig.expected(name, 14)


def test_only_verified_tokens_enter_the_prefix_cache(rig: EngineRig) -> None:
    """A request whose prompt is another's tokens and wrong drafts finds the tokens alone."""
    request = rig.begin("r", 6, max_tokens=12)
    wrong = [token_id + 1 for token_id in to_come(rig, "r", 10)]
    known = request.token_ids(0, request.num_tokens)
    step_with(rig, {"r": wrong})
    rig.begin("guess", [*known, *wrong, 5], max_tokens=2)
    assert rig.requests["guess"].num_cached_tokens == 4
    rig.run_right("guess", "r")


def test_the_blocks_of_right_drafts_are_cached_also_by_the_last_step(rig: EngineRig) -> None:
    rig.begin("r", 6, max_tokens=11)
    step_with(rig, {"r": to_come(rig, "r", 10)})
    assert rig.reason("r") is Outcome.LENGTH
    rig.begin("again", [*rig.requests["r"].prompt_token_ids, *rig.tokens["r"]], max_tokens=1)
    assert rig.requests["again"].num_cached_tokens == 16


def test_each_sequence_has_its_own_drafts(rig: EngineRig) -> None:
    rig.begin("r", 6, max_tokens=12, n=3)
    rig.step()
    live = list(rig.scheduler.requests)
    assert len(live) == 3
    step_with(rig, {name: to_come(rig, name, 3 + place) for place, name in enumerate(live)})
    rig.run()
    for name in live:
        assert rig.tokens[name] == rig.expected(name, 12)
    assert rig.scheduler.make_stats().spec_decoding.num_accepted_tokens == 3 + 4 + 5


def test_a_beam_search_gets_no_drafts() -> None:
    rig = EngineRig(speculation=SpeculationConfig())
    rig.add("r", 6, max_tokens=5, beam_width=2, temperature=0.0)
    for _ in range(20):
        rig.scheduler.update_draft_token_ids({name: [1, 2] for name in rig.scheduler.requests})
        decided = rig.scheduler.schedule()
        assert not decided.scheduled_spec_decode_tokens
        rig.commit(decided)
    assert not rig.core.has_work()


def test_a_decode_leg_drafts_and_a_prefill_leg_does_not(rig: EngineRig) -> None:
    rig.begin("decode", 9, leg=Leg.DECODE, max_tokens=10)
    rig.complete_transfer("decode")
    rig.step()
    step_with(rig, {"decode": to_come(rig, "decode", 4)})
    assert rig.tokens["decode"] == rig.expected("decode", 7)
    rig.add("prefill", 9, leg=Leg.PREFILL, max_tokens=10)
    decided = decided_with(rig, {"prefill": [1, 2]})
    assert "prefill" not in decided.scheduled_spec_decode_tokens
    rig.commit(decided)
    assert rig.reason("prefill") is Outcome.HANDED_OFF


@pytest.mark.parametrize("windows", [(6,), (2, 9, None), (None, 6)])
def test_windows_follow_verified_tokens(windows: tuple[int | None, ...]) -> None:
    """Wrong drafts longer than a window don't free blocks that the next token sees: others would overwrite them."""
    rig = EngineRig(num_blocks=1 + 10 * len(windows), windows=windows, enable_prefix_caching=False)
    rig.begin("r", 9, max_tokens=23)
    for number in range(7):
        right = to_come(rig, "r", 11)
        step_with(rig, {"r": [*right[: number % 3], *[token_id + 1 for token_id in right[number % 3 :]]]})
        rig.begin(f"mate {number}", 16, max_tokens=1)
    rig.run_right("r")


@pytest.mark.parametrize("ahead", ["no", "late", "early"])
def test_an_abort_while_drafts_are_in_flight(ahead: Ahead) -> None:
    rig = EngineRig(executor=executor_for(ahead))
    rig.add("r", 6, max_tokens=20)
    rig.add("mate", 6, max_tokens=20)
    rig.steps(3)
    decided = decided_with(rig, {"r": to_come(rig, "r", 4)}) if ahead == "no" else None
    rig.abort("r", outcome=Outcome.ABORTED)
    if decided is not None:
        rig.commit(decided)
    rig.run_right("mate")
    stats = rig.scheduler.make_stats()
    assert stats.free_blocks == stats.total_blocks


def test_a_runner_that_breaks_ends_the_drafted_request_alone(rig: EngineRig) -> None:
    rig.begin("r", 6, max_tokens=20)
    rig.runner.failures["r"] = "non-finite logits"
    step_with(rig, {"r": to_come(rig, "r", 4)})
    assert rig.reason("r") is Outcome.ERROR
    stats = rig.scheduler.make_stats()
    assert stats.free_blocks == stats.total_blocks


# --- drafts of the engine's own ---


class Loop(EngineRig):
    """An engine whose vocabulary has one token, so that every output repeats itself."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(speculation=SpeculationConfig(num_speculative_tokens=6, prompt_lookup_min=2), **limits)
        self.runner.model = replace(self.runner.model, vocab_size=1)


@pytest.mark.parametrize("ahead", ["no", "late", "early"])
def test_a_text_that_repeats_itself_takes_few_steps(ahead: Ahead) -> None:
    """Also a very long one, of which every draft is right."""
    rig = Loop(num_blocks=600, executor=executor_for(ahead))
    rig.add("r", 6, max_tokens=2000)
    steps = 0
    while rig.core.has_work():
        rig.step()
        steps += 1
    assert rig.tokens["r"] == [0] * 2000
    assert steps < 400
    assert rig.scheduler.make_stats().spec_decoding.num_accepted_tokens > 1600


@pytest.mark.parametrize("num_blocks", range(9, 27))
def test_a_step_with_the_last_token_of_a_drafted_request_is_not_run_ahead_of(num_blocks: int) -> None:
    """Otherwise the token after the last one got a block, for which others with tokens in flight were preempted."""
    for length in range(5, 30):
        rig = Loop(num_blocks=num_blocks, executor=executor_for("early"), enable_prefix_caching=False)
        rig.add("other", 6, max_tokens=12, speculation=False)
        rig.add("drafted", 6, max_tokens=length)
        rig.complete("last", 6, max_tokens=15, speculation=False)
        assert not [end.error for end in rig.ends.values() if end.error]


@pytest.mark.parametrize("num_blocks", range(10, 21))
def test_a_whole_prompt_is_not_preempted_for_drafts_that_wait(num_blocks: int) -> None:
    """A prompt that takes a whole step leaves drafts to the next one, which is not decided ahead."""
    for length in range(8, 40, 5):
        for late in range(3, 10):
            rig = Loop(
                num_blocks=num_blocks,
                executor=executor_for("early"),
                enable_prefix_caching=False,
                enable_chunked_prefill=False,
                max_num_batched_tokens=32,
                max_model_len=32,
            )
            rig.add("a", 6, max_tokens=length)
            rig.add("b", 7, max_tokens=length)
            rig.steps(late)
            rig.complete("whole", 29 + length % 3, max_tokens=1)
            assert not [end.error for end in rig.ends.values() if "no token" in str(end.error)]


def test_a_request_can_do_without_drafts() -> None:
    rig = Loop()
    rig.complete("r", 6, max_tokens=20, speculation=False)
    assert rig.scheduler.make_stats().spec_decoding.num_drafts == 0
    assert rig.tokens["r"] == [0] * 20


@pytest.mark.parametrize("ahead", ["no", "late", "early"])
def test_what_a_grammar_forces_is_drafted(ahead: Ahead) -> None:
    rig = EngineRig(speculation=SpeculationConfig("grammar"), executor=executor_for(ahead))
    rig.add("r", 6, max_tokens=12, json_schema="{}")
    forced = rig.expected("r", 12)
    rig.scheduler.grammar_compiled("r", [FakeMatcher([{token_id} for token_id in forced], ())])
    rig.run()
    assert rig.tokens["r"] == forced
    stats = rig.scheduler.make_stats().spec_decoding
    assert stats.num_accepted_tokens >= 9
    assert stats.num_drafts <= 2


def test_without_a_configuration_nothing_is_drafted(rig: EngineRig) -> None:
    rig.complete("r", [1, 2, 3] * 5, max_tokens=12)
    assert rig.scheduler.make_stats().spec_decoding.num_drafts == 0
