"""What every runner must do with drafts: the tokens are those of plain decoding, whatever was drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.runner import DraftSpec, SimulatedSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_runner import FakeRunner
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

Runner = FakeRunner | SimulatedRunner | TorchModelRunner
Draft = Callable[[Sequence[int], int], Sequence[int]]
"""Drafts from the tokens that plain decoding generates next, and how many there may be."""

LENGTH = 24
PARAMS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=LENGTH),
    "drawn": SamplingParams(temperature=1.2, seed=11, top_k=40, max_tokens=LENGTH, logprobs=3),
    "penalised": SamplingParams(
        temperature=0.7,
        seed=5,
        repetition_penalty=1.4,
        frequency_penalty=0.6,
        presence_penalty=0.3,
        logit_bias={3: 2.0},
        min_tokens=9,
        stop_token_ids=frozenset(range(0, 256, 5)),
        max_tokens=LENGTH,
        logprobs=2,
    ),
}


def make_runner(kind: str, directory: Path) -> Runner:
    if kind == "scripted":
        return FakeRunner(64, 4, vocab_size=256)
    if kind == "simulated":
        return SimulatedRunner(SimulatedSpec(num_blocks=64, block_size=4, vocab_size=256, max_model_len=256))
    write_random_model(directory, TINY_MODELS["qwen3"], seed=1)
    return load_runner(TorchSpec(directory, dtype="float32", block_size=4, num_blocks=64))


@pytest.fixture(params=["scripted", "simulated", "torch"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    return make_runner(request.param, tmp_path)


def prompt_of(name: str) -> list[int]:
    return [(position * 37 + len(name)) % 256 for position in range(6 + len(name))]


Outputs = dict[str, tuple[list[int], list[TokenLogprobs]]]


def decode(runner: Runner, drafted: Mapping[str, Draft | None], expected: Outputs | None = None) -> Outputs:
    """Compute all requests together to their length, one step at a time, with the drafts of each."""
    driver = RunnerDriver(runner)
    for name in drafted:
        driver.add(name, prompt_of(name), PARAMS[name])
    found: Outputs = {name: ([], []) for name in drafted}
    while True:
        counts, drafts = {}, {}
        for name, draft in drafted.items():
            request = driver.requests[name]
            room = LENGTH - len(request.output)
            if room == 0:
                continue
            counts[name] = request.num_tokens - request.num_computed
            if draft is not None and expected is not None and request.output:
                drafts[name] = draft(expected[name][0][len(request.output) :], room - 1)
        if not counts:
            return found
        out = driver.step(counts, drafts=drafts)
        assert not out.failed
        for name in counts:
            assert 1 <= len(out.sampled_token_ids[name]) <= 1 + len(drafts.get(name, ()))
            found[name][0].extend(out.sampled_token_ids[name])
            found[name][1].extend(out.logprobs.get(name, ()))


def perfect(to_come: Sequence[int], most: int) -> Sequence[int]:
    return to_come[: min(5, most)]


def right_for_a_while(to_come: Sequence[int], most: int) -> Sequence[int]:
    return [*to_come[:2], (to_come[2] + 1) % 256, *to_come[3:6]][:most] if len(to_come) > 2 else ()


def wrong(to_come: Sequence[int], most: int) -> Sequence[int]:
    return [(token_id + 1) % 256 for token_id in to_come[: min(4, most)]]


def no_tokens_of_the_model(to_come: Sequence[int], most: int) -> Sequence[int]:
    return [*to_come[:1], 256, -1, 10**15][:most]


def unsteady(seed: int) -> Draft:
    chance = random.Random(seed)

    def draft(to_come: Sequence[int], most: int) -> Sequence[int]:
        count = chance.randint(0, most)
        return [token_id if chance.random() < 0.8 else chance.randrange(256) for token_id in to_come[:count]]

    return draft


DRAFTS: Mapping[str, Mapping[str, Draft | None]] = {
    "perfect": dict.fromkeys(PARAMS, perfect),
    "right for a while": dict.fromkeys(PARAMS, right_for_a_while),
    "wrong": dict.fromkeys(PARAMS, wrong),
    "no tokens": dict.fromkeys(PARAMS, no_tokens_of_the_model),
    "unsteady": {name: unsteady(seed) for seed, name in enumerate(PARAMS)},
    "some don't": {"greedy": perfect, "drawn": None, "penalised": unsteady(7)},
}


@pytest.mark.parametrize("drafts", DRAFTS)
def test_tokens_and_log_probabilities_are_those_of_plain_decoding(runner: Runner, drafts: str) -> None:
    expected: Outputs = {}
    for name in PARAMS:
        expected |= decode(runner, {name: None})
    assert decode(runner, DRAFTS[drafts], expected) == expected


def test_right_drafts_save_steps(runner: Runner) -> None:
    expected = decode(runner, {"greedy": None})
    driver = RunnerDriver(runner)
    request = driver.add("greedy", prompt_of("greedy"), PARAMS["greedy"])
    driver.step({"greedy": len(request.prompt)})
    driver.step({"greedy": 1}, drafts={"greedy": expected["greedy"][0][1:6]})
    assert request.output == expected["greedy"][0][:7]


def test_the_same_model_drafts_the_right_tokens(tmp_path: Path) -> None:
    """Also drawn ones: random numbers belong to positions. Beside it another model, which drafts wrong ones."""
    write_random_model(tmp_path, TINY_MODELS["qwen3"], seed=1)
    runner = load_runner(
        TorchSpec(tmp_path, dtype="float32", block_size=4, num_blocks=64, draft=DraftSpec(tmp_path, 5))
    )
    expected: Outputs = {}
    for name in PARAMS:
        expected |= decode(runner, {name: None})
    driver = RunnerDriver(runner)
    requests = [driver.add(name, prompt_of(name), PARAMS[name]) for name in PARAMS]
    drafts = driver.step({request.request_id: len(request.prompt) for request in requests}, wanted=3).draft_token_ids
    for turn in range(6):
        given = {name: [*tokens[:turn], 255] for name, tokens in drafts.items()} if turn % 2 else drafts
        drafts = driver.step(dict.fromkeys(PARAMS, 1), drafts=given, wanted=3).draft_token_ids
        for request in requests:
            num_known = len(request.output)
            assert request.output == expected[request.request_id][0][:num_known]
            to_come = expected[request.request_id][0][num_known : num_known + 3]
            found = list(drafts[request.request_id])[: len(to_come)]
            assert found == to_come[: len(found)]
            assert len(found) == len(to_come) or found[-1] in request.params.stop_token_ids
    assert runner.model.compute_paths[-1].part == "drafts"


def test_a_broken_draft_model_costs_no_request_and_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen3"], seed=1)
    runner = load_runner(
        TorchSpec(tmp_path, dtype="float32", block_size=4, num_blocks=64, draft=DraftSpec(tmp_path, 5))
    )
    expected = decode(runner, {"greedy": None})["greedy"][0]
    transformer = runner._drafter._transformer  # type: ignore[union-attr]
    works = transformer.compute

    def broken(*_: object) -> object:
        raise RuntimeError("no memory")

    transformer.compute = broken  # type: ignore[method-assign]
    driver = RunnerDriver(runner)
    request = driver.add("greedy", prompt_of("greedy"), PARAMS["greedy"])
    driver.step({"greedy": len(request.prompt)}, wanted=3)
    assert "the draft model failed" in caplog.text
    transformer.compute = works  # type: ignore[method-assign]
    drafted = []
    for _ in range(4):
        out = driver.step({"greedy": 1}, wanted=3)
        assert not out.failed
        drafted.append(list(out.draft_token_ids.get("greedy", ())))
    assert request.output == expected[:5]
    assert drafted == [[], [], expected[4:7], expected[5:8]]


def test_a_draft_model_shares_the_memory_of_the_cache(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen3"], seed=1)
    alone = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=4, cache_bytes=1 << 22))
    beside = load_runner(
        TorchSpec(tmp_path, dtype="float32", block_size=4, cache_bytes=1 << 22, draft=DraftSpec(tmp_path, 5))
    )
    # Half of the bytes, less 2 scratch blocks for each of 64 requests.
    assert beside.memory.num_blocks == (alone.memory.num_blocks - 128) // 2


def test_a_request_fails_after_its_right_drafts(tmp_path: Path) -> None:
    """Logits that are not finite at a draft end the request in the step in which it would have ended without drafts."""
    runner = make_runner("torch", tmp_path)
    expected = decode(runner, {"greedy": None})["greedy"][0]
    compute = runner._transformer.compute  # type: ignore[union-attr]

    def spoiled(batch: object, *arguments: object) -> object:
        logits = compute(batch, *arguments)  # type: ignore[arg-type]
        logits[batch.positions[batch.logits_rows] == spoiled_position] = float("nan")  # type: ignore[attr-defined]
        return logits

    spoiled_position = len(prompt_of("greedy")) + 3
    runner._transformer.compute = spoiled  # type: ignore[union-attr,method-assign]
    driver = RunnerDriver(runner)
    request = driver.add("greedy", prompt_of("greedy"), replace(PARAMS["greedy"], ignore_eos=True))
    driver.step({"greedy": len(request.prompt)})
    assert not driver.step({"greedy": 1}, drafts={"greedy": expected[1:6]}).failed
    assert request.output == expected[:4]
    assert driver.step({"greedy": 1}).failed == {"greedy": "the model produced non-finite logits"}
