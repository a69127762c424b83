"""The simulated runner's tokens follow from the KV bytes in its cache, and from nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.engine.batch import CachedRequestData, ForkedRequestData, NewRequestData, SchedulerOutput
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import PROBE_BLOCKS
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequences.beams import BeamSearch
from baton.engine.sequences.sequence_group import sequence_id
from baton.errors import AdapterRefused
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner import SimulatedSpec, StepTime, load
from baton.runner.simulated import SimulatedRunner, likeliest_tokens
from tests.doubles.fake_clock import FakeClock
from tests.support.adapter_files import write_simple_adapter
from tests.support.engine_rig import name_of
from tests.support.runner_driver import RunnerDriver
from tests.support.simulated_oracle import expected_beams, expected_kv, expected_tokens

SPEC = SimulatedSpec(num_blocks=64, block_size=4, vocab_size=997, max_model_len=256)
PROMPTS = {"a": [1, 2, 3], "b": [1, 2, 3, 4], "c": list(range(30)), "d": [5], "e": list(range(100, 117))}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


def driven(spec: SimulatedSpec = SPEC) -> RunnerDriver:
    return RunnerDriver(SimulatedRunner(spec))


def read(driver: RunnerDriver, name: str, num_tokens: int) -> np.ndarray:
    assert isinstance(driver.runner, SimulatedRunner)
    return driver.runner.read(driver.requests[name].block_ids, num_tokens)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 1000])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=9, max_tokens=10)])
def test_tokens_and_kv_are_those_of_the_reference(chunk: int, params: SamplingParams) -> None:
    driver = driven()
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, params)
    driver.finish(chunk=chunk)
    for name, prompt in PROMPTS.items():
        tokens = expected_tokens(prompt, params, SPEC)
        assert driver.requests[name].output == tokens
        history = [*prompt, *tokens[:-1]]
        assert np.array_equal(read(driver, name, len(history)), expected_kv(history, driver.runner.layout))


def test_an_adapter_gives_other_tokens_which_its_own_mates_do_not_change(tmp_path: Path) -> None:
    driver = driven()
    digests = ["", *(open_adapter(write_simple_adapter(tmp_path / str(seed), seed)).digest() for seed in range(2))]
    for seed, digest in enumerate(digests[1:]):
        driver.runner.adapters.load(tmp_path / str(seed), digest)
    for name, digest in zip("abc", digests, strict=True):
        driver.add(name, [1, 2, 3], GREEDY, adapter=digest)
    driver.finish(chunk=2)
    outputs = [driver.requests[name].output for name in "abc"]
    assert outputs == [expected_tokens([1, 2, 3], GREEDY, SPEC, digest) for digest in digests]
    assert len({tuple(output) for output in outputs}) == 3


def test_an_adapter_that_is_not_loaded_fails_its_own_requests_alone(tmp_path: Path) -> None:
    driver = driven()
    digest = open_adapter(write_simple_adapter(tmp_path)).digest()
    driver.runner.adapters.load(tmp_path, digest)
    driver.runner.adapters.unload(digest)
    driver.add("with", [1, 2, 3], GREEDY, adapter=digest)
    driver.add("without", [1, 2, 3], GREEDY)
    driver.finish()
    assert "is not loaded" in str(driver.requests["with"].failed)
    assert driver.requests["without"].output == expected_tokens([1, 2, 3], GREEDY, SPEC)


def test_an_adapter_of_another_digest_or_rank_is_refused(tmp_path: Path) -> None:
    runner = SimulatedRunner(replace(SPEC, max_lora_rank=3))
    with pytest.raises(AdapterRefused, match="at most 3 is allowed"):
        runner.adapters.load(write_simple_adapter(tmp_path), "0" * 64)
    with pytest.raises(AdapterRefused, match="its files have changed"):
        SimulatedRunner(SPEC).adapters.load(tmp_path, "0" * 64)


def test_the_likeliest_tokens_follow_from_the_history_and_begin_with_the_greedy_one() -> None:
    driver = driven()
    seen = set()
    for name, prompt in PROMPTS.items():
        kv = expected_kv(prompt, driver.runner.layout)
        likeliest = likeliest_tokens(kv, 6, SPEC.vocab_size)
        assert likeliest[:3] == likeliest_tokens(kv, 3, SPEC.vocab_size)
        assert [likeliest[0][0]] == expected_tokens(prompt, replace(GREEDY, max_tokens=1), SPEC), name
        logprobs = [logprob for _, logprob in likeliest]
        assert logprobs == sorted(logprobs, reverse=True)
        assert logprobs[0] < 0
        assert len({token for token, _ in likeliest}) == 6
        seen.add(tuple(likeliest))
    assert len(seen) == len(PROMPTS)
    assert len(likeliest_tokens(kv, 9, 4)) == 4, "there are no more tokens"


@pytest.mark.parametrize("width", [2, 5, 8])
def test_a_beam_search_finds_what_a_naive_one_finds(width: int) -> None:
    runner = SimulatedRunner(SPEC)
    fields = CacheKeyFields.of(runner.model, runner.layout)
    config = SchedulerConfig(SPEC.num_blocks, block_size=4, max_model_len=256)
    core = EngineCore(Scheduler(config, fields, FakeClock()), runner)
    for name, prompt in PROMPTS.items():
        core.scheduler.add_request(
            Request(name, RequestSpec(prompt, SamplingParams(beam_width=width, n=width, max_tokens=9)))
        )
    found: dict[str, list[int]] = {}
    while core.has_work():
        for outputs in core.step().values():
            found.update((name_of(output), list(output.new_token_ids)) for output in outputs)
    for name, prompt in PROMPTS.items():
        expected = expected_beams(prompt, BeamSearch(width, frozenset(), 9), SPEC)
        assert [found[sequence_id(name, index)] for index in range(width)] == expected


def test_different_requests_generate_different_tokens() -> None:
    tokens = {tuple(expected_tokens(prompt, GREEDY, SPEC)) for prompt in PROMPTS.values()}
    assert len(tokens) == len(PROMPTS)
    seeded = [expected_tokens([1], SamplingParams(seed=seed, max_tokens=4), SPEC) for seed in (1, 2)]
    assert seeded[0] != seeded[1]


@pytest.mark.parametrize("position", [0, 5, 29])
def test_one_wrong_byte_anywhere_in_the_history_changes_the_tokens(position: int) -> None:
    driver = driven()
    request = driver.add("c", PROMPTS["c"], GREEDY)
    driver.step({"c": 30})
    memory = driver.runner.memory
    block = request.block_ids[position // SPEC.block_size]
    # The last byte of the last head's row of that token: the digest must cover every byte.
    row = SPEC.head_dim * 4
    address = memory.base_address + block * memory.block_bytes
    address += memory.block_bytes - (SPEC.block_size - position % SPEC.block_size - 1) * row - 1
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1
    driver.finish()
    assert request.output[:1] == expected_tokens(PROMPTS["c"], GREEDY, SPEC)[:1]
    assert request.output[1] != expected_tokens(PROMPTS["c"], GREEDY, SPEC)[1]


def test_slots_are_recognisable() -> None:
    layout = SimulatedRunner(SPEC).layout
    one, other = expected_kv([1, 2, 3, 9], layout), expected_kv([1, 5, 3, 9], layout)
    assert np.array_equal(one[0], other[0])
    # Equal tokens at equal positions differ once anything before them does.
    assert all((one[i] != other[i]).mean() > 0.9 for i in (1, 2, 3))
    heads = one.reshape(-1, one.shape[-1])
    assert len({row.tobytes() for row in heads}) == heads.shape[0]


def test_stop_ids_end_a_request_only_after_min_tokens() -> None:
    free = expected_tokens([1], GREEDY, SPEC)
    stopping = replace(GREEDY, stop_token_ids=frozenset({free[3]}))
    assert expected_tokens([1], stopping, SPEC) == free[:4]
    barred = expected_tokens([1], replace(stopping, min_tokens=6), SPEC)
    assert free[3] not in barred[:6]
    assert barred[:3] == free[:3]


@pytest.mark.parametrize(("parent", "num_shared"), [("stranger", 3), ("a", 5)])
def test_a_fork_from_an_unknown_parent_fails_alone(parent: str, num_shared: int) -> None:
    driver = driven()
    driver.add("a", [1, 2, 3], GREEDY)
    driver.step({"a": 3})
    fork = ForkedRequestData("fork", parent, num_shared, 7, [40, 41], 0)
    known = CachedRequestData("a", (), 3)
    out = driver.runner.execute_model(
        SchedulerOutput(2, [], [known], {"a": 1, "fork": num_shared + 1}, num_shared + 2, scheduled_forked_reqs=[fork])
    )
    assert out.failed == {"fork": "the runner does not know this request"}
    assert out.sampled_token_ids == {"a": expected_tokens([1, 2, 3], GREEDY, SPEC)[1:2]}


@pytest.mark.parametrize(
    ("request_data", "count", "reason"),
    [
        (NewRequestData("x", [1, 997], (), GREEDY, [1], 0), 2, "a token id is out of range"),
        (NewRequestData("x", [1, -1], (), GREEDY, [1], 0), 2, "a token id is out of range"),
        (NewRequestData("x", [1] * 5, (), GREEDY, [1], 0), 5, "1 blocks don't hold 5 tokens"),
        (NewRequestData("x", [1] * 5, (), GREEDY, [1, 64], 0), 5, "a block id is out of range"),
        (NewRequestData("x", [1] * 5, (), GREEDY, [1, 2], 3), 3, "3 tokens scheduled from 3 on, but the request has 5"),
        (NewRequestData("x", [1] * 257, (), GREEDY, [*range(1, 64), 1, 1], 0), 257, "beyond the model's 256 tokens"),
    ],
)
def test_a_fork_that_shares_too_many_tokens_fails_alone(request_data: NewRequestData, count: int, reason: str) -> None:
    runner = SimulatedRunner(SPEC)
    good = NewRequestData("good", [1, 2, 3], (), GREEDY, [63], 0)
    out = runner.execute_model(SchedulerOutput(1, [request_data, good], [], {"x": count, "good": 3}, count + 3))
    assert reason in str(out.failed["x"])
    assert out.sampled_token_ids == {"good": expected_tokens([1, 2, 3], GREEDY, SPEC)[:1]}


def test_step_time_is_given_to_the_injected_sleep() -> None:
    slept: list[float] = []
    time = StepTime(per_step=1.0, per_prefill_token=0.125, per_decode_seq=0.5)
    driver = driven(replace(SPEC, step_time=time, sleep=slept.append))
    driver.add("c", PROMPTS["c"], GREEDY)
    driver.add("d", PROMPTS["e"], GREEDY)
    driver.step({"c": 30})
    driver.step({"c": 1, "d": 8})
    driver.step({}, finished=["c"])
    assert slept == [1.0 + 30 * 0.125, 1.0 + 8 * 0.125 + 0.5]


def test_load_gives_a_runner_whose_memory_matches_its_layout() -> None:
    runner = load(SPEC)
    assert runner.layout.block_bytes == 2 * 2 * 2 * 4 * 8 * 4
    assert runner.memory.num_blocks == 64
    assert runner.memory.num_bytes == (64 + PROBE_BLOCKS) * runner.layout.block_bytes
    assert runner.model.bit_exact
    assert load(replace(SPEC, vocab_size=5)).model.fingerprint != runner.model.fingerprint
