"""What every runner must do for beam search: continue with a given token, and fork from a known request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.batch import (
    BlockCopy,
    CachedRequestData,
    ForkedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from baton.messages.sampling import TokenLogprobs
from baton.runner import SimulatedSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_runner import FakeRunner
from tests.support.runner_driver import GREEDY
from tests.support.tiny_models import TINY_MODELS

Runner = FakeRunner | SimulatedRunner | TorchModelRunner

PROMPT = [(position * 37 + 5) % 256 for position in range(10)]
PARAMS = replace(GREEDY, logprobs=6, repetition_penalty=1.3)
TABLE = [1, 2, 3, 4, 5]
ELSEWHERE = [30, 31, 32, 33, 34]
FORKED_TABLE, COPY = [1, 2, 20, 21, 22], BlockCopy(3, 20)
"""Two full blocks are shared; the third has the end of the prompt."""


@pytest.fixture(params=["scripted", "simulated", "torch"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    if request.param == "scripted":
        return FakeRunner(64, 4, vocab_size=256)
    if request.param == "simulated":
        return SimulatedRunner(SimulatedSpec(num_blocks=64, block_size=4, vocab_size=256, max_model_len=256))
    write_random_model(tmp_path, TINY_MODELS["qwen3"], seed=1)
    return load_runner(TorchSpec(tmp_path, dtype="float32", block_size=4, num_blocks=64))


def step(
    runner: Runner,
    counts: Mapping[str, int],
    *,
    new: Sequence[NewRequestData] = (),
    known: Sequence[CachedRequestData] = (),
    forked: Sequence[ForkedRequestData] = (),
    copies: Sequence[BlockCopy] = (),
    finished: frozenset[str] = frozenset(),
) -> ModelRunnerOutput:
    return runner.execute_model(
        SchedulerOutput(
            step=1,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=known,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            blocks_to_copy=copies,
            finished_req_ids=finished,
            scheduled_forked_reqs=forked,
        )
    )


def compute_prompt(runner: Runner) -> None:
    prompt = NewRequestData("beam", PROMPT, (), PARAMS, TABLE, 0)
    assert "beam" in step(runner, {"beam": len(PROMPT)}, new=[prompt]).sampled_token_ids


def continued(token_id: int, num_computed_tokens: int) -> CachedRequestData:
    return CachedRequestData("beam", (), num_computed_tokens, last_token_id=token_id)


def fork(token_id: int, num_tokens: int) -> ForkedRequestData:
    """Return a request with these computed tokens of the beam and one token of its own."""
    return ForkedRequestData("fork", "beam", num_tokens, token_id, FORKED_TABLE, num_tokens)


def likeliest(computed: ModelRunnerOutput, name: str) -> Sequence[TokenLogprobs]:
    assert not computed.failed
    return computed.logprobs[name]


def computed_alone(runner: Runner, *token_ids: int) -> Sequence[TokenLogprobs]:
    """Return what follows the prompt and these tokens in a request of its own."""
    whole = NewRequestData("computed_alone", PROMPT, token_ids, PARAMS, ELSEWHERE, 0)
    computed = step(runner, {"computed_alone": len(PROMPT) + len(token_ids)}, new=[whole])
    step(runner, {}, finished=frozenset({"computed_alone"}))
    return likeliest(computed, "computed_alone")


def test_a_beam_continues_with_the_given_token(runner: Runner) -> None:
    compute_prompt(runner)
    assert likeliest(step(runner, {"beam": 1}, known=[continued(77, 10)]), "beam") == computed_alone(runner, 77)
    assert likeliest(step(runner, {"beam": 1}, known=[continued(78, 11)]), "beam") == computed_alone(runner, 77, 78)


def test_a_fork_continues_beside_its_parent_beam(runner: Runner) -> None:
    compute_prompt(runner)
    both = {"beam": 1, "fork": 1}
    computed = step(runner, both, known=[continued(77, 10)], forked=[fork(55, 10)], copies=[COPY])
    assert likeliest(computed, "beam") == computed_alone(runner, 77)
    assert likeliest(computed, "fork") == computed_alone(runner, 55)
    forked = CachedRequestData("fork", (), 11, last_token_id=56)
    computed = step(runner, both, known=[continued(78, 11), forked])
    assert likeliest(computed, "beam") == computed_alone(runner, 77, 78)
    assert likeliest(computed, "fork") == computed_alone(runner, 55, 56)


def test_a_beam_can_be_forked_in_the_step_in_which_it_ends(runner: Runner) -> None:
    compute_prompt(runner)
    computed = step(runner, {"fork": 1}, forked=[fork(55, 10)], copies=[COPY], finished=frozenset({"beam"}))
    assert likeliest(computed, "fork") == computed_alone(runner, 55)
    assert runner.num_requests == 1


def test_a_fork_takes_no_more_than_the_tokens_it_shares(runner: Runner) -> None:
    compute_prompt(runner)
    step(runner, {"beam": 1}, known=[continued(77, 10)])
    step(runner, {"beam": 1}, known=[continued(78, 11)])
    computed = step(runner, {"fork": 1}, forked=[fork(55, 11)], copies=[COPY])
    assert likeliest(computed, "fork") == computed_alone(runner, 77, 55)
    computed = step(runner, {"beam": 1}, known=[continued(79, 12)])
    assert likeliest(computed, "beam") == computed_alone(runner, 77, 78, 79), "nothing of the fork is in it"


def test_a_fork_computes_the_tokens_whose_blocks_it_does_not_share(runner: Runner) -> None:
    compute_prompt(runner)
    begins = replace(fork(55, 10), block_ids=ELSEWHERE, num_computed_tokens=0)
    assert step(runner, {"fork": 4}, forked=[begins]).sampled_token_ids == {}
    known = CachedRequestData("fork", (), 4, last_token_id=55)
    assert likeliest(step(runner, {"fork": 7}, known=[known]), "fork") == computed_alone(runner, 55)


def test_a_beam_without_its_blocks_computes_its_tokens_again(runner: Runner) -> None:
    compute_prompt(runner)
    step(runner, {"beam": 1}, known=[continued(77, 10)])
    again = [CachedRequestData("beam", ELSEWHERE, 0, resumed=True, last_token_id=78)]
    assert step(runner, {"beam": 5}, known=again).sampled_token_ids == {}
    computed = step(runner, {"beam": 7}, known=[continued(78, 5)])
    assert likeliest(computed, "beam") == computed_alone(runner, 77, 78)
