"""The conditions that end a request: stop tokens, lengths and failures."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.batch import ModelRunnerOutput
from baton.engine.request import Request
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from tests.support.engine_rig import EngineRig, prompt_of

PROMPT = prompt_of(6)


def tokens_of(count: int) -> list[int]:
    rig = EngineRig()
    rig.complete("r", PROMPT, max_tokens=count)
    return rig.tokens["r"]


TOKENS = tokens_of(10)


def test_the_scripted_tokens_do_not_repeat() -> None:
    assert len(set(TOKENS)) == 10, "the tests below stop at one token each"


@pytest.mark.parametrize(
    ("params", "eos", "reason", "stop_reason", "length"),
    [
        ({}, (), Outcome.LENGTH, None, 10),
        ({"max_tokens": 1}, (), Outcome.LENGTH, None, 1),
        ({}, TOKENS[3:4], Outcome.STOP, None, 4),
        ({}, TOKENS[5:3:-1], Outcome.STOP, None, 5),
        ({"ignore_eos": True}, TOKENS[3:4], Outcome.LENGTH, None, 10),
        ({"min_tokens": 4}, TOKENS[3:4], Outcome.STOP, None, 4),
        ({"min_tokens": 5}, TOKENS[3:4], Outcome.LENGTH, None, 10),
        ({"min_tokens": 5}, (TOKENS[3], TOKENS[7]), Outcome.STOP, None, 8),
        ({"stop_token_ids": frozenset(TOKENS[2:3])}, (), Outcome.STOP, TOKENS[2], 3),
        ({"stop_token_ids": frozenset(TOKENS[2:3]), "min_tokens": 4}, (), Outcome.LENGTH, None, 10),
        ({"stop_token_ids": frozenset(TOKENS[2:3]), "ignore_eos": True}, TOKENS[1:2], Outcome.STOP, TOKENS[2], 3),
        ({"stop_token_ids": frozenset(TOKENS[2:3])}, TOKENS[2:3], Outcome.STOP, None, 3),
        ({"stop_token_ids": frozenset(TOKENS[2:3]), "max_tokens": 3}, (), Outcome.STOP, TOKENS[2], 3),
        ({"max_tokens": 4}, TOKENS[3:4], Outcome.STOP, None, 4),
    ],
)
def test_each_stop_condition_ends_a_request(
    rig: EngineRig, params: dict[str, Any], eos: tuple[int, ...], reason: Outcome, stop_reason: int | None, length: int
) -> None:
    rig.complete("r", PROMPT, eos=frozenset(eos), **{"max_tokens": 10, **params})
    assert rig.tokens["r"] == TOKENS[:length], "the token that stops is part of the output"
    assert (rig.ends["r"].outcome, rig.ends["r"].stop_reason) == (reason, stop_reason)


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_the_models_length_ends_a_request(min_tokens: int) -> None:
    rig = EngineRig(max_model_len=9)
    rig.complete("r", PROMPT, max_tokens=10, min_tokens=min_tokens)
    assert rig.tokens["r"] == TOKENS[:3]
    assert rig.reason("r") is Outcome.LENGTH


def test_the_pool_bounds_the_models_length() -> None:
    """Two blocks hold eight tokens. The ninth token is sampled, and its KV is never needed."""
    rig = EngineRig(num_blocks=3)
    assert rig.scheduler.max_model_len == 9
    rig.complete("r", PROMPT, max_tokens=10)
    assert rig.tokens["r"] == TOKENS[:3]
    assert rig.reason("r") is Outcome.LENGTH


@pytest.mark.parametrize(("num_tokens", "refused"), [(8, False), (9, True), (40, True)])
def test_a_prompt_that_never_fits_is_refused_at_once(num_tokens: int, refused: bool) -> None:
    rig = EngineRig(num_blocks=3)
    rig.add("huge", num_tokens, max_tokens=4)
    rig.add("small", 3, max_tokens=1)
    if refused:
        assert rig.reason("huge") is Outcome.IGNORED, "before any step"
    rig.step()
    if refused:
        assert f"a prompt of {num_tokens} tokens leaves no room" in str(rig.ends["huge"].error)
        assert rig.reason("small") is Outcome.LENGTH, "nobody waits behind it"
    else:
        assert rig.tokens["huge"] == rig.expected("huge", 1)


def test_a_refusal_that_was_not_taken_comes_with_the_next_step() -> None:
    rig = EngineRig(num_blocks=3)
    rig.scheduler.add_request(Request("huge", RequestSpec(list(range(40)), SamplingParams())))
    assert rig.core.has_work()
    (outputs,) = rig.core.step().values()
    assert [output.outcome for output in outputs] == [Outcome.IGNORED]
    assert not rig.core.has_work()


def test_a_failed_request_ends_alone(rig: EngineRig) -> None:
    rig.add("bad", 8, max_tokens=5)
    rig.begin("good", PROMPT, max_tokens=10)
    rig.runner.failures["bad"] = "non-finite logits"
    rig.step()
    assert (rig.reason("bad"), rig.ends["bad"].error) == (Outcome.ERROR, "non-finite logits")
    rig.run()
    assert rig.tokens["good"] == TOKENS


def test_kv_of_a_failed_chunk_is_never_found(rig: EngineRig) -> None:
    rig.add("bad", PROMPT, max_tokens=5)
    rig.runner.failures["bad"] = "non-finite logits"
    rig.step()
    rig.complete("good", PROMPT, max_tokens=10)
    assert rig.ends["good"].num_cached_tokens == 0


def test_a_runner_that_raises_fails_the_step_and_not_the_engine() -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.add("a", 8, max_tokens=5)
    rig.add("b", 8, max_tokens=5)
    rig.begin("waits", PROMPT, max_tokens=10)
    rig.runner.raise_next = RuntimeError("device lost")
    rig.step()
    assert rig.ends["a"].error == rig.ends["b"].error == "the runner failed: RuntimeError('device lost')"
    assert rig.reason("a") is Outcome.ERROR
    assert rig.scheduler.kv_cache_manager.pool.accounts().owned == 0
    rig.run()
    assert rig.tokens["waits"] == TOKENS


def test_a_request_without_a_sampled_token_fails(rig: EngineRig) -> None:
    rig.add("r", 4, max_tokens=5)
    output = rig.scheduler.schedule()
    rig.commit(output, ModelRunnerOutput({}))
    assert (rig.reason("r"), rig.ends["r"].error) == (Outcome.ERROR, "the runner returned no token")


def test_tokens_behind_a_stop_are_cut_with_their_logprobs(rig: EngineRig) -> None:
    rig.add("r", PROMPT, max_tokens=10, stop_token_ids=frozenset({2}))
    output = rig.scheduler.schedule()
    logprobs = [TokenLogprobs(token, -0.5, 1, ()) for token in (1, 2, 3)]
    (end,) = rig.commit(output, ModelRunnerOutput({"r": [1, 2, 3]}, logprobs={"r": logprobs}))
    assert (end.new_token_ids, end.new_logprobs, end.stop_reason) == ([1, 2], logprobs[:2], 2)
