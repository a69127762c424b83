"""Drafts of a runner's draft model: asked for with one step, verified in the next one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.engine.batch import ModelRunnerOutput
from baton.engine.request import RequestStatus
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
    assert rig.core.make_stats().spec_decoding.num_accepted_tokens > 100


def test_wrong_drafts_are_given_up(ahead: Ahead) -> None:
    rig = make_rig(ahead, lambda right: [(token_id + 1) % 1000 for token_id in right])
    rig.add("r", 6, max_tokens=150)
    count_steps(rig)
    assert rig.tokens["r"] == rig.expected("r", 150)
    stats = rig.core.make_stats().spec_decoding
    assert stats.num_accepted_tokens == 0
    assert 0 < stats.num_draft_tokens < 20


def test_a_slow_draft_model_is_asked_seldom_and_tried_again(ahead: Ahead) -> None:
    rig = make_rig(ahead, num_blocks=500)
    rig.runner.seconds_per_round = 1.5
    rig.add("r", 6, max_tokens=700)
    count_steps(rig)
    assert rig.tokens["r"] == rig.expected("r", 700)
    assert rig.core.make_stats().spec_decoding.num_drafts <= 2
    rig.runner.seconds_per_round = 0.05
    rig.add("again", 6, max_tokens=700)
    count_steps(rig)
    assert rig.tokens["again"] == rig.expected("again", 700)
    assert rig.core.make_stats().spec_decoding.num_drafts > 40


def test_requests_that_want_no_drafts_get_none(ahead: Ahead) -> None:
    asked: list[Sequence[int]] = []
    rig = make_rig(ahead, lambda right: asked.append(right) or right)
    rig.add("plain", 6, max_tokens=20, speculation=False)
    rig.add("beams", 5, max_tokens=6, beam_width=2, logprobs=0)
    count_steps(rig)
    assert not asked
    assert rig.tokens["plain"] == rig.expected("plain", 20)


def test_no_drafts_are_wanted_behind_the_end_of_an_output(ahead: Ahead) -> None:
    rig = make_rig(ahead)
    wanted: list[int] = []
    execute = rig.runner.execute_model

    def watched(output: Any) -> ModelRunnerOutput:
        wanted.extend(output.num_drafts_wanted.values())
        return execute(output)

    rig.runner.execute_model = watched  # type: ignore[method-assign]
    for length in (1, 2, 3, 4, 5):
        rig.add(f"r{length}", 6, max_tokens=length)
        count_steps(rig)
        assert rig.tokens[f"r{length}"] == rig.expected(f"r{length}", length)
        # The step with the second token is the first that is asked, and one token more must follow its draft.
        assert bool(wanted) == (length >= 4)


def test_a_draft_does_not_outlive_its_step(ahead: Ahead) -> None:
    """A request that is preempted while its draft waits goes on without it."""
    rig = make_rig(ahead, num_blocks=14, enable_prefix_caching=False)
    for name in ("a", "b", "c"):
        rig.add(name, 6, max_tokens=20)
    count_steps(rig)
    assert sum(rig.core.make_stats().num_preemptions_by_mode.values()) > 0
    for name in rig.requests:
        assert rig.tokens[name] == rig.expected(name, 20)


@pytest.mark.parametrize("seed", range(15))
def test_whatever_is_drafted_tokens_stay(ahead: Ahead, seed: int) -> None:
    """Drafts that are right in part, too long, or no tokens at all, beside requests that end and are aborted."""
    chance = random.Random(seed)

    def draft(right: Sequence[int]) -> Sequence[int]:
        kept = list(right[: chance.randint(0, len(right))])
        return kept + chance.choice([[], [1001, -1], [chance.randrange(1000)] * 40])

    rig = make_rig(ahead, draft, num_blocks=chance.choice([20, 40, 80]))
    aborted: set[str] = set()
    for turn in range(200):
        if turn < 120 and chance.random() < 0.2:
            rig.add(f"r{turn}", chance.randint(1, 20), max_tokens=chance.randint(1, 40), seed=turn)
        live = [name for name in rig.requests if name in rig.scheduler.requests]
        if live and chance.random() < 0.03:
            aborted.add(chance.choice(live))
            rig.abort(*(aborted & set(live)), status=RequestStatus.ABORTED)
        if rig.core.has_work():
            rig.step()
    rig.run()
    for name, request in rig.requests.items():
        tokens = rig.tokens[name]
        assert tokens == rig.expected(name, len(tokens))
        assert name in aborted or len(tokens) == request.sampling_params.max_tokens
    stats = rig.core.make_stats()
    assert stats.free_blocks == stats.total_blocks
