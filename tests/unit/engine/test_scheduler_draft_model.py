"""Drafts of a runner's draft model: asked for with one step, verified in the next one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.request import RequestStatus
from baton.engine.sequences.sequence_group import sequence_id
from baton.messages.node import Leg, Outcome
from baton.messages.speculation import SpeculationConfig
from tests.support.engine_rig import EngineRig
from tests.support.executors import Ahead, executor_for

CONFIG = SpeculationConfig("draft_model", num_speculative_tokens=6, model="small")

pytestmark = pytest.mark.parametrize("ahead", ["no", "late", "early"])


def make_rig(
    ahead: Ahead, draft: Callable[[Sequence[int]], Sequence[int]] = lambda right: right, **limits: Any
) -> EngineRig:
    """An engine whose draft model drafts from the right tokens. A step takes 1 second, a round of drafts 0.1."""
    rig = EngineRig(executor=executor_for(ahead), speculation=CONFIG, **limits)
    rig.runner.draft = draft
    rig.runner.seconds_per_step = 1.0
    rig.runner.seconds_per_round = 0.1
    return rig


def count_steps(rig: EngineRig) -> int:
    steps = 0
    while rig.core.has_work():
        rig.step()
        steps += 1
    return steps


def test_right_drafts_save_steps(ahead: Ahead) -> None:
    rig = make_rig(ahead)
    rig.add("r", 6, max_tokens=100)
    rig.add("other", 7, max_tokens=100, seed=5)
    assert count_steps(rig) < 50
    for name in rig.requests:
        assert rig.tokens[name] == rig.expected(name, 100)
    assert rig.scheduler.make_stats().spec_decoding.num_accepted_tokens > 100


def test_wrong_drafts_are_given_up(ahead: Ahead) -> None:
    rig = make_rig(ahead, lambda right: [(token_id + 1) % 1000 for token_id in right])
    rig.add("r", 6, max_tokens=150)
    count_steps(rig)
    assert rig.tokens["r"] == rig.expected("r", 150)
    stats = rig.scheduler.make_stats().spec_decoding
    assert stats.num_accepted_tokens == 0
    assert 0 < stats.num_draft_tokens < 20


def test_a_slow_draft_model_is_asked_seldom_and_tried_again(ahead: Ahead) -> None:
    rig = make_rig(ahead, num_blocks=500)
    rig.runner.seconds_per_round = 1.5
    rig.add("r", 6, max_tokens=700)
    count_steps(rig)
    assert rig.tokens["r"] == rig.expected("r", 700)
    assert rig.scheduler.make_stats().spec_decoding.num_drafts <= 2
    rig.runner.seconds_per_round = 0.05
    rig.add("again", 6, max_tokens=700)
    count_steps(rig)
    assert rig.tokens["again"] == rig.expected("again", 700)
    assert rig.scheduler.make_stats().spec_decoding.num_drafts > 40


def test_requests_that_want_no_drafts_get_none(ahead: Ahead) -> None:
    asked: list[Sequence[int]] = []

    def draft(right: Sequence[int]) -> Sequence[int]:
        asked.append(right)
        return right

    rig = make_rig(ahead, draft)
    rig.add("plain", 6, max_tokens=20, speculation=False)
    rig.add("beams", 5, max_tokens=6, beam_width=2, logprobs=0)
    count_steps(rig)
    assert not asked
    assert rig.tokens["plain"] == rig.expected("plain", 20)


def test_no_drafts_are_wanted_behind_the_end_of_an_output(ahead: Ahead) -> None:
    rig = make_rig(ahead)
    wanted: list[int] = []
    execute = rig.runner.execute_model

    def watched(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        wanted.extend(scheduler_output.num_drafts_wanted.values())
        return execute(scheduler_output)

    rig.runner.execute_model = watched  # type: ignore[method-assign]
    for length in (1, 2, 3, 4, 5):
        rig.add(f"r{length}", 6, max_tokens=length)
        count_steps(rig)
        assert rig.tokens[f"r{length}"] == rig.expected(f"r{length}", length)
        # The step with the second token is the first that is asked, and one token more must follow its draft.
        assert bool(wanted) == (length >= 4)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_draft_does_not_outlive_its_step(ahead: Ahead, preemption_mode: str) -> None:
    """A request that is preempted while its draft waits goes on without it."""
    rig = make_rig(
        ahead, num_blocks=14, num_host_blocks=40, preemption_mode=preemption_mode, enable_prefix_caching=False
    )
    execute = rig.runner.execute_model
    drafted: set[str] = set()
    """Requests of which the step before had a draft."""
    lost_draft: set[str] = set()
    waiting: set[str] = set()
    """Requests that were preempted and had no step since."""
    outlived: set[str] = set()

    def watched(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal drafted
        lost_draft.update(drafted & scheduler_output.preempted_req_ids)
        waiting.update(scheduler_output.preempted_req_ids)
        outlived.update(waiting & scheduler_output.scheduled_spec_decode_tokens.keys())
        waiting.difference_update(scheduler_output.num_scheduled_tokens)
        runner_output = execute(scheduler_output)
        drafted = {name for name, token_ids in runner_output.draft_token_ids.items() if token_ids}
        return runner_output

    rig.runner.execute_model = watched  # type: ignore[method-assign]
    for name in ("a", "b", "c", "d"):
        rig.add(name, 6, max_tokens=24)
    count_steps(rig)
    assert lost_draft
    assert not outlived
    assert rig.scheduler.make_stats().num_preemptions_by_mode[preemption_mode] > 0
    assert not waiting
    for name in rig.requests:
        assert rig.tokens[name] == rig.expected(name, 24)


def loading(rig: EngineRig) -> list[str]:
    """The requests whose KV is on its way."""
    requests = rig.scheduler.requests
    return [name for name in rig.connector.loads if requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS]


def release_quarantined(rig: EngineRig) -> None:
    """Nothing writes to the blocks of lost loads any more."""
    released = list(rig.connector.quarantined)
    rig.connector.quarantined.clear()
    rig.transfer(released=released)


@pytest.mark.parametrize("on_transfer_failure", ["recompute", "reroute", "fail"])
@pytest.mark.parametrize("seed", range(9))
def test_whatever_is_drafted_tokens_stay(ahead: Ahead, on_transfer_failure: str, seed: int) -> None:
    """Drafts that are right in part, too long, or no tokens at all, while all else happens, too.

    Requests end and are aborted, have several sequences, are preempted and swapped, and their KV arrives or fails.
    """
    chance = random.Random(seed)

    def draft(right: Sequence[int]) -> Sequence[int]:
        kept = list(right[: chance.randint(0, len(right))])
        return kept + chance.choice([[], [1001, -1], [chance.randrange(1000)] * 40])

    rig = make_rig(
        ahead,
        draft,
        num_blocks=chance.choice([20, 40, 80]),
        num_host_blocks=chance.choice([6, 30]),
        preemption_mode=chance.choice(["recompute", "swap"]),
        max_num_batched_tokens=chance.choice([8, 16, 64]),
        on_transfer_failure=on_transfer_failure,
    )
    aborted: set[str] = set()
    failed: set[str] = set()

    def abort(name: str) -> None:
        aborted.add(name)
        rig.abort(name, outcome=Outcome.ABORTED)

    def add(name: str, number: int) -> None:
        leg = chance.choice([Leg.WHOLE, Leg.DECODE])
        num_sequences, speculates = chance.choice([1, 1, 2, 3]), chance.random() < 0.9
        length = chance.randint(1, 30)
        rig.add(
            name,
            chance.randint(1, 20),
            leg=leg,
            max_tokens=length,
            seed=number,
            n=num_sequences,
            speculation=speculates,
        )

    for turn in range(120):
        if turn < 70 and chance.random() < 0.2:
            add(f"r{turn}", turn)
        for name in loading(rig):
            luck = chance.random()
            if luck < 0.2:
                rig.complete_transfer(name)
            elif luck < 0.3:
                failed.add(name)
                rig.fail_transfer(name, chance.randint(0, len(rig.connector.loads[name].block_ids)))
            elif luck < 0.33:
                abort(name)
        if chance.random() < 0.1:
            release_quarantined(rig)
        live = [name for name in rig.requests if name in rig.scheduler.requests]
        if live and chance.random() < 0.03:
            abort(chance.choice(live))
        if rig.core.has_work():
            rig.step()
    while rig.core.has_work() or loading(rig) or rig.connector.quarantined:
        for name in loading(rig):
            rig.complete_transfer(name)
        release_quarantined(rig)
        rig.run()
    if on_transfer_failure == "recompute":
        failed.clear()
    for name, request in rig.requests.items():
        sequences = [sequence_id(name, index) for index in range(request.sampling_params.n)]
        for sequence in sequences:
            tokens = rig.tokens.get(sequence, [])
            assert tokens == rig.expected(sequence, len(tokens))
            assert name in aborted | failed or len(tokens) == request.sampling_params.max_tokens
    assert not rig.scheduler.requests
    assert not any(rig.runner.ahead.values())
    stats = rig.scheduler.make_stats()
    assert stats.free_blocks == stats.total_blocks


def test_the_draft_model_computes_a_prompt_while_its_kv_comes(ahead: Ahead) -> None:
    rig = make_rig(ahead, max_num_batched_tokens=16)
    rig.add("d", 40, leg=Leg.DECODE, max_tokens=20)
    rig.add("plain", 12, leg=Leg.DECODE, max_tokens=20, speculation=False)
    while not rig.runner.ahead:  # a step may be computed later than it is decided
        rig.step()
    assert list(rig.runner.ahead) == ["d"]
    assert count_steps(rig) <= 5
    assert rig.runner.ahead == {"d": 0}
    assert not rig.core.has_work()  # both wait for their KV
    for name in rig.requests:
        rig.complete_transfer(name)
    count_steps(rig)
    assert not rig.runner.ahead
    assert rig.scheduler.make_stats().spec_decoding.num_accepted_tokens > 0
    for name in rig.requests:
        assert rig.tokens[name] == rig.expected(name, 20)


def test_a_request_that_is_aborted_while_its_kv_comes_is_computed_no_further(ahead: Ahead) -> None:
    rig = make_rig(ahead, max_num_batched_tokens=8)
    rig.begin("d", 40, leg=Leg.DECODE, max_tokens=20)
    rig.abort("d", outcome=Outcome.ABORTED)
    assert count_steps(rig) <= 3
    assert not rig.runner.ahead


def test_a_load_that_fails_ends_what_is_computed_ahead(ahead: Ahead) -> None:
    rig = make_rig(ahead, max_num_batched_tokens=8, on_transfer_failure="recompute")
    rig.add("d", 60, leg=Leg.DECODE, max_tokens=12)
    while not rig.runner.ahead:
        rig.step()
    rig.fail_transfer("d", 0)
    while "d" not in rig.scheduler.decoding:
        rig.step()
        assert rig.runner.ahead.get("d", 0) <= 60
    assert not rig.runner.ahead
    count_steps(rig)
    assert rig.tokens["d"] == rig.expected("d", 12)


def test_nothing_is_computed_ahead_where_drafts_do_not_pay_or_can_not_come(ahead: Ahead) -> None:
    rig = make_rig(ahead)
    for name, length in (("one", 1), ("two", 2), ("three", 3)):
        rig.add(name, 20, leg=Leg.DECODE, max_tokens=length)
    count_steps(rig)
    assert not rig.runner.ahead
    rig.runner.seconds_per_round = 5.0
    rig.add("measures", 6, max_tokens=30)
    while "measures" in rig.scheduler.requests:
        rig.step()
    rig.add("d", 20, leg=Leg.DECODE, max_tokens=30)
    count_steps(rig)
    assert not rig.runner.ahead


def test_a_draft_model_that_can_not_draft_is_asked_seldom(ahead: Ahead) -> None:
    rig = make_rig(ahead, num_blocks=200)
    rig.runner.draft = None
    asked: list[int] = []
    execute = rig.runner.execute_model

    def watched(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        asked.append(len(scheduler_output.num_drafts_wanted))
        return execute(scheduler_output)

    rig.runner.execute_model = watched  # type: ignore[method-assign]
    rig.add("r", 6, max_tokens=500)
    count_steps(rig)
    assert 0 < sum(asked) < 20
    assert rig.tokens["r"] == rig.expected("r", 500)
