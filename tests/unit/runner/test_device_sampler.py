"""The sampler's kernels: the tokens of the one in numpy, and the same bits in any batch, in tiles of any size."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.errors import ConfigError, EngineFault, InvalidRequest
from baton.messages.sampling import SamplingParams
from baton.runner.backends.cuda import device_sampler
from baton.runner.execution.sampler import HostSampler, Sampled, Sampler, SamplingState
from baton.runner.execution.sampling_arrays import UNITS
from baton.runner.model_runner import TorchModelRunner
from tests.support import sampler_twin as twin
from tests.support.load_with import load_tiny
from tests.support.runner_driver import RunnerDriver
from tests.support.triton_interpreter import DEVICE, triton_attention_module

pytestmark = pytest.mark.triton

Logits = npt.NDArray[np.float32]
EOS = frozenset({4})
VOCAB = 1300
TILES = {"tile": 512, "room": 64}
"""Several tiles a row, and more than one pass before few tokens are left."""
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=["host", "device"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """Each implementation, for rows of 75 tokens."""
    return HostSampler() if request.param == "host" else on_device(75, monkeypatch)


def on_device(vocab: int, monkeypatch: pytest.MonkeyPatch, **tiles: int) -> device_sampler.DeviceSampler:
    """The kernels, on DEVICE; skips the test where they can't run."""
    triton_attention_module(monkeypatch)
    return device_sampler.DeviceSampler(DEVICE, vocab, **{"tile": 256, **tiles})


def sample(sampler: Sampler, logits: Logits, states: Sequence[SamplingState]) -> list[Sampled]:
    return sampler.sample(torch.from_numpy(logits).to(DEVICE) if sampler.is_on_device else logits, states)


def state(params: SamplingParams, tokens: Sequence[int] = (6, 1), **fields: Any) -> SamplingState:
    return SamplingState(params, list(tokens), 1, EOS, **fields)


def mask_of(allowed: Sequence[int], vocab: int) -> npt.NDArray[np.int32]:
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.bool_)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def made(rng: np.random.Generator, seed: int) -> SamplingParams:
    """Parameters at random, each feature in some."""

    def some(value: Any, otherwise: Any, share: float = 0.35) -> Any:
        return value if rng.random() < share else otherwise

    ids = rng.permutation(VOCAB).tolist()
    return SamplingParams(
        temperature=some(float(rng.uniform(0.01, 2.0)), 1.0, 0.7),
        top_k=some(int(rng.choice([1, 2, 40, 70, 900])), -1),
        top_p=some(float(rng.choice([1e-9, 0.3, 0.9, 0.999])), 1.0, 0.5),
        min_p=some(float(rng.choice([1e-3, 0.3])), 0.0, 0.2),
        top_n_sigma=some(float(rng.uniform(0.5, 3.0)), 0.0, 0.2),
        seed=seed * 0x123456789ABCDEF % 2**64 - 2**63,
        repetition_penalty=some(1.4, 1.0),
        frequency_penalty=some(0.3, 0.0),
        presence_penalty=some(-0.2, 0.0),
        logit_bias=some({ids[0]: 6.0, ids[1]: -1e39, ids[2]: 2.5}, {}),
        min_tokens=some(100, 0),
        allowed_token_ids=some(tuple(ids[:200]), (), 0.15),
        bad_words_token_ids=some(((ids[3],), (1, ids[4])), (), 0.2),
        logprobs=some(3, None, 0.3),
    )


def row_of(rng: np.random.Generator, kind: int) -> Logits:
    """Peaked, flat, with many ties, or all equal logits."""
    row = rng.normal(size=VOCAB) * (4.0, 0.05, 2.0, 0.0)[kind % 4]
    return (np.round(row * 2) / 2 if kind % 4 == 2 else row).astype(np.float32)


def test_kernels_equal_their_twin_and_the_sampler_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(51)
    logits = np.stack([row_of(rng, kind) for kind in range(24)])
    states = []
    for row in range(len(logits)):
        mask = mask_of(rng.permutation(VOCAB)[:300].tolist(), VOCAB) if row % 5 == 0 else None
        states.append(state(made(rng, row), (6, 3, 1, 1, 9), mask=mask))
    sampled = sample(on_device(VOCAB, monkeypatch, **TILES), logits, states)
    assert [one.token_id for one in sampled] == [twin.drawn(*pair) for pair in zip(logits, states, strict=True)]
    for one, row, given in zip(sampled, logits, states, strict=True):
        if one.logprobs is not None:
            weight = twin.weight_of_all(row, given)
            peak, own = float(twin.masked(row, given).max()), float(row[one.token_id])
            assert one.logprobs.logprob == own - (peak + math.log(weight / UNITS))
    # In numpy weights are rounded otherwise, which decides only if a number is within 1e-7 of an edge.
    expected = HostSampler().sample(logits, states)
    assert [replace(one, logprobs=None) for one in sampled] == [replace(one, logprobs=None) for one in expected]
    for one, wanted in zip(sampled, expected, strict=True):
        assert (one.logprobs is None) == (wanted.logprobs is None)
        if one.logprobs is not None and wanted.logprobs is not None:
            assert one.logprobs.rank == wanted.logprobs.rank
            assert one.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-6)
            assert [token for token, _ in one.logprobs.top] == [token for token, _ in wanted.logprobs.top]
            values = [value for _, value in wanted.logprobs.top]
            assert [value for _, value in one.logprobs.top] == pytest.approx(values, abs=1e-6)


def test_a_row_depends_neither_on_other_rows_nor_on_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    logits = np.stack([row_of(rng, kind) for kind in range(6)])
    states = [state(replace(made(rng, seed), logprobs=2)) for seed in range(5)] + [state(GREEDY)]
    together = sample(on_device(VOCAB, monkeypatch, tile=512, room=64, programs=2), logits, states)
    other_tiles = on_device(VOCAB, monkeypatch, tile=256, room=512)
    alone = [sample(other_tiles, logits[row : row + 1], states[row : row + 1])[0] for row in range(6)]
    assert together == alone


KINDS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.5, temperature=2.0),
    SamplingParams(seed=3, top_k=3, logprobs=2),
]


def test_each_sampler_says_what_is_wrong_with_a_row_and_samples_the_others(sampler: Sampler) -> None:
    logits = np.random.default_rng(1).normal(size=(8, 75)).astype(np.float32)
    logits[1, 74], logits[3, 0], logits[5, 3] = np.nan, np.inf, -np.inf
    never = SamplingParams(seed=5, json_schema="{}", logit_bias={7: -1e39}, logprobs=1)
    states = [state(KINDS[row % 4]) for row in range(6)]
    states += [state(never, mask=mask_of([7], 75)), state(never, mask=mask_of([7, 70], 75))]
    sampled = sample(sampler, logits, states)
    assert [type(one.error) for one in sampled[1:6:2]] == [EngineFault] * 3
    assert str(sampled[1].error) == "the model produced non-finite logits"
    assert isinstance(sampled[6].error, InvalidRequest)
    assert str(sampled[6].error) == "json_schema: leaves no token that may follow, with logit_bias"
    assert sampled[7].token_id == 70
    assert sampled[7].logprobs is not None
    assert {token for token, _ in sampled[7].logprobs.top} <= {7, 70}
    for row in (0, 2, 4, 7):
        assert sampled[row] == sample(sampler, logits[row : row + 1], states[row : row + 1])[0]
        assert sampled[row].error is None


def test_each_sampler_takes_the_lowest_of_equal_logits_and_the_largest_at_a_tiny_temperature(sampler: Sampler) -> None:
    logits = np.full((5, 75), -2.0, dtype=np.float32)
    logits[:2, [9, 40]] = -0.0, 0.0
    logits[2:, [70, 71]] = 2.0
    tiny, barred = (
        SamplingParams(temperature=1e-45, seed=1),
        replace(GREEDY, min_tokens=9, stop_token_ids=frozenset({70})),
    )
    states = [state(one) for one in (GREEDY, replace(GREEDY, min_tokens=9), tiny, barred)]
    states.append(state(replace(GREEDY, logit_bias={3: 1e39})))
    assert [one.token_id for one in sample(sampler, logits, states)] == [9, 9, 70, 71, 3]
    assert sample(sampler, logits[:0], []) == []


def test_each_sampler_keeps_no_more_of_equal_tokens_than_needed(sampler: Sampler) -> None:
    params = [SamplingParams(top_p=0.04, seed=seed) for seed in range(12)]  # 3 of 75
    drawn = sample(sampler, np.zeros((12, 75), dtype=np.float32), [state(one) for one in params])
    assert {one.token_id for one in drawn} == {0, 1, 2}


def test_a_vocabulary_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="75 logits a row, and the vocabulary has 80"):
        sample(on_device(80, monkeypatch), np.zeros((1, 75), dtype=np.float32), [state(GREEDY)])
    with pytest.raises(ConfigError, match="too large"):
        device_sampler.DeviceSampler(DEVICE, 2**19)


class HeedlessSampler(HostSampler):
    """Samples all rows with the parameters of the first one."""

    def sample(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        return super().sample(np.asarray(logits.cpu()), [states[0]] * len(states))


def test_kernels_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_sampler.why_not_right(on_device(75, monkeypatch), DEVICE, 75) == ""
    assert "draw other tokens than numpy" in device_sampler.why_not_right(HeedlessSampler(), DEVICE, 75)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU")
def test_without_kernels_numpy_samples_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not device_sampler.sampler_on(torch.device("cuda", 0), 75).is_on_device
    assert "tokens are sampled on the host, which is slow" in caplog.text


def generated(runner: TorchModelRunner) -> dict[str, tuple[list[int], Any]]:
    driver = RunnerDriver(runner)
    prompt = [(position * 37 + 5) % 256 for position in range(9)]
    logprobs: dict[str, Any] = {}
    for name, params in {
        "greedy": GREEDY,
        "drawn": SamplingParams(seed=7, top_p=0.9, repetition_penalty=1.2),
        "prompt": SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
    }.items():
        driver.add(name, prompt, replace(params, max_tokens=4))
    driver.step({"greedy": 5, "drawn": 9})
    for counts in ({"greedy": 4, "prompt": 9, "drawn": 1}, dict.fromkeys(driver.requests, 1)):
        out = driver.step(counts)
        assert not out.failed
        logprobs |= {**out.prompt_logprobs}
    return {name: (one.output, logprobs.get(name)) for name, one in driver.requests.items()}


def test_a_runner_draws_the_same_tokens_with_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_tiny(tmp_path, "qwen3", seed=1, device=DEVICE.type)
    assert runner.model.numerics.endswith(device_sampler.NUMERICS) == (DEVICE.type == "cuda")
    of_host, there = (
        generated(TorchModelRunner(runner.model, runner._transformer, sampler=sampler))
        for sampler in (HostSampler(), on_device(256, monkeypatch))
    )
    assert of_host["prompt"][1] is not None
    assert {name: len(output) for name, (output, _) in of_host.items()} == {"greedy": 2, "drawn": 3, "prompt": 2}
    assert of_host == there
