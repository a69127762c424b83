"""A runner does what the scheduler decides: shared blocks, resumed and finished requests, log-probabilities."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from baton.engine.batch import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from tests.support.load_with import load_tiny
from tests.support.runner_driver import GREEDY, RunnerDriver
from tests.support.simulated_oracle import expected_tokens

PROMPT = [(position * 37 + 5) % 256 for position in range(30)]
PARAMS = replace(GREEDY, max_tokens=6)
SIMULATED = SimulatedSpec(num_blocks=128, block_size=4, vocab_size=256, max_model_len=256)
Runner = SimulatedRunner | TorchModelRunner


@pytest.fixture(scope="module", params=["simulated", "float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    if request.param == "simulated":
        return SimulatedRunner(SIMULATED)
    directory = tmp_path_factory.mktemp("models")
    return load_tiny(directory, "qwen3", seed=1, dtype=request.param, block_size=4, num_blocks=128)


@pytest.fixture(scope="module")
def expected(runner: Runner) -> list[int]:
    """What a request with PARAMS must generate: of a model, what it does when it is alone."""
    if isinstance(runner, SimulatedRunner):
        return expected_tokens(PROMPT, PARAMS, SIMULATED)
    driver = RunnerDriver(runner)
    alone = driver.add("alone", PROMPT, PARAMS)
    driver.finish()
    driver.step({}, finished=["alone"])
    assert len(set(alone.output)) > 2
    return alone.output


def test_a_cached_prefix_gives_the_same_tokens(runner: Runner, expected: list[int]) -> None:
    driver = RunnerDriver(runner)
    first = driver.add("first", PROMPT, PARAMS)
    driver.step({"first": 30})
    again = driver.add("again", PROMPT, PARAMS, shared=first.block_ids[:7], num_computed=28)
    driver.finish()
    assert again.output == first.output == expected


def test_a_copied_block_continues_the_original(runner: Runner, expected: list[int]) -> None:
    driver = RunnerDriver(runner)
    params = replace(PARAMS, logprobs=5)
    original = driver.add("original", PROMPT, params)
    at_once = driver.step({"original": 30})
    fork = NewRequestData("fork", PROMPT, (), params, [*original.block_ids[:6], 100, 101, 102], 26)
    copies = [BlockCopy(original.block_ids[6], 100)]
    out = runner.execute_model(SchedulerOutput(9, [fork], [], {"fork": 4}, 4, blocks_to_copy=copies))
    assert out.sampled_token_ids["fork"] == expected[:1]
    assert out.logprobs["fork"] == at_once.logprobs["original"]
    driver.finish()
    assert original.output == expected


def test_a_resumed_request_computes_its_output_again(runner: Runner, expected: list[int]) -> None:
    driver = RunnerDriver(runner)
    request = driver.add("resumed", PROMPT, PARAMS)
    for count in (30, 1, 1):
        driver.step({"resumed": count})
    resumed = CachedRequestData("resumed", list(range(80, 92)), 0, resumed=True)
    out = runner.execute_model(SchedulerOutput(9, [], [resumed], {"resumed": 33}, 33))
    assert [*request.output, *out.sampled_token_ids["resumed"]] == expected[:4]


def test_kv_moved_as_raw_memory_continues_bit_for_bit(runner: Runner, expected: list[int]) -> None:
    driver = RunnerDriver(runner)
    params = replace(PARAMS, logprobs=5)
    sent = driver.add("sent", PROMPT, params)
    driver.step({"sent": 30})
    taken = driver.add("taken", PROMPT, params, output=expected[:1], num_computed=30)
    memory = runner.memory
    for mine, theirs in zip(taken.block_ids[:8], sent.block_ids, strict=False):
        ctypes.memmove(
            memory.base_address + mine * memory.block_bytes,
            memory.base_address + theirs * memory.block_bytes,
            memory.block_bytes,
        )
    out = driver.step({"sent": 1, "taken": 1})
    assert out.logprobs["taken"] == out.logprobs["sent"]
    driver.finish()
    assert taken.output == sent.output == expected


def test_log_probabilities_come_with_every_token(runner: Runner, expected: list[int]) -> None:
    driver = RunnerDriver(runner)
    driver.add("asks", PROMPT, replace(PARAMS, logprobs=3))
    driver.add("does-not", PROMPT, PARAMS)
    driver.step({"asks": 30, "does-not": 29})
    assert set(driver.last.logprobs) == {"asks"}
    (at_first,) = driver.last.logprobs["asks"]
    assert (at_first.token_id, at_first.rank) == (expected[0], 1)
    assert at_first.top[0] == (expected[0], at_first.logprob)
    assert len(at_first.top) == 3


def test_a_seed_draws_the_same_tokens_in_any_batch(runner: Runner) -> None:
    params = SamplingParams(seed=42, max_tokens=6, top_p=0.9)
    drawn = []
    for mates in (0, 3):
        driver = RunnerDriver(runner)
        for mate in range(mates):
            driver.add(f"mate-{mate}", PROMPT[mate:], replace(params, seed=mate))
        request = driver.add("drawn", PROMPT, params)
        driver.finish({f"mate-{mate}": [5, 7] for mate in range(mates)})
        drawn.append(request.output)
    assert drawn[0] == drawn[1]


def test_finished_requests_are_forgotten(runner: Runner) -> None:
    driver = RunnerDriver(runner)
    driver.add("gone", PROMPT, PARAMS)
    driver.step({"gone": 30})
    known = runner.num_requests
    driver.step({}, finished=["gone"])
    assert runner.num_requests == known - 1
    out = runner.execute_model(SchedulerOutput(5, [], [CachedRequestData("gone", (), 30)], {"gone": 1}, 1))
    assert out.failed == {"gone": "the runner does not know this request"}
