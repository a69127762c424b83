"""Log-probabilities of a prompt are those of the model, with the same bits in whatever chunks and beside whatever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.node import Leg
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

RNG = Random(4)
PROMPTS = {f"of-{length}": [RNG.randrange(256) for _ in range(length)] for length in (1, 2, 17, 70)}
PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=3, max_tokens=2)


@pytest.fixture(params=["qwen2", "gpt2", "gemma3_text"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_random_model(tmp_path, TINY_MODELS[request.param], seed=6, dtype="float32")
    return tmp_path


def load(model: Path, num_blocks: int = 96, host_cache_bytes: int = 0) -> TorchModelRunner:
    return load_runner(TorchSpec(model, dtype="float32", num_blocks=num_blocks, host_cache_bytes=host_cache_bytes))


def expected(model: Path, prompt: Sequence[int]) -> npt.NDArray[np.float64]:
    """The log-softmax of transformers' logits at each position, in float64: [tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([list(prompt)])).logits[0].double()
    found: npt.NDArray[np.float64] = torch.log_softmax(logits, dim=-1).numpy()
    return found


def computed(
    model: Path, prompts: Mapping[str, Sequence[int]], chunks: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Sequence[TokenLogprobs]]:
    """What the runner returns for these prompts, computed together, in these chunks."""
    driver = RunnerDriver(load(model))
    for name, prompt in prompts.items():
        driver.add(name, prompt, PARAMS)
    driver.add("plain", PROMPTS["of-17"], SamplingParams(temperature=0.0, max_tokens=2))
    found: dict[str, Sequence[TokenLogprobs]] = {}
    plan = {name: list(sizes) for name, sizes in (chunks or {}).items()}
    while counts := {
        name: plan[name].pop(0) if plan.get(name) else one.num_tokens - one.num_computed
        for name, one in driver.requests.items()
        if len(one.output) < 2
    }:
        out = driver.step(counts)
        assert not out.failed
        assert not found.keys() & out.prompt_logprobs.keys(), "given out once"
        found |= out.prompt_logprobs
    assert found.keys() == prompts.keys()
    return found


def test_they_are_the_models_own(model: Path) -> None:
    for name, positions in computed(model, PROMPTS).items():
        prompt = PROMPTS[name]
        assert [position.token_id for position in positions] == prompt[1:]
        for position, row in zip(positions, expected(model, prompt), strict=False):
            assert position.logprob == pytest.approx(row[position.token_id], abs=1e-4)
            assert [token for token, _ in position.top] == np.argsort(-row, kind="stable")[:3].tolist()
            assert [logprob for _, logprob in position.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)
            assert position.rank == 1 + int((row > row[position.token_id]).sum())


def test_chunks_and_company_change_no_bit(model: Path) -> None:
    together = computed(model, PROMPTS)
    chunks = {"of-17": [1, 7, 9], "of-70": [16, 1, 30, 22, 1], "of-2": [1, 1]}
    assert computed(model, PROMPTS, chunks) == together
    for name, prompt in PROMPTS.items():
        assert computed(model, {name: prompt}) == {name: together[name]}


class Engine:
    """One engine, and the log-probabilities of prompts that came out of it."""

    def __init__(self, runner: TorchModelRunner, **settings: object) -> None:
        config = SchedulerConfig(
            num_blocks=runner.memory.num_blocks,
            block_size=runner.layout.block_size,
            windows=runner.layout.windows,
            keeps_states=runner.layout.keeps_states,
            max_model_len=runner.model.max_model_len,
            **{"max_num_seqs": 8, **settings},  # type: ignore[arg-type]
        )
        scheduler = Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock())
        self.core = EngineCore(scheduler, runner)
        self.found: dict[str, list[Sequence[TokenLogprobs]]] = {}
        self.cached: dict[str, int] = {}

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.core.scheduler.add_request(request)
        running = {request.request_id for request in requests}
        while running:
            for output in (output for outputs in self.core.step().values() for output in outputs):
                self.cached[output.attempt.request_id] = output.num_cached_tokens
                if output.prompt_logprobs:
                    assert output.first_index == 0
                    self.found.setdefault(output.attempt.request_id, []).append(output.prompt_logprobs)
                if output.outcome is not None:
                    assert output.error is None
                    running.discard(output.attempt.request_id)


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=6, dtype="float32")
    return tmp_path


def test_a_prompt_in_the_cache_is_computed_all_the_same(qwen2: Path) -> None:
    engine = Engine(load(qwen2), max_num_batched_tokens=64)
    prompt = PROMPTS["of-70"]
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    engine.run(Request("plain", RequestSpec(prompt, plain)))
    engine.run(Request("again", RequestSpec(prompt, plain)), Request("asks", RequestSpec(prompt, PARAMS)))
    assert engine.cached == {"plain": 0, "again": 64, "asks": 0}
    assert engine.found == {"asks": [computed(qwen2, PROMPTS)["of-70"]]}


def test_they_come_once_for_all_sequences_and_not_where_output_was_given(qwen2: Path) -> None:
    engine = Engine(load(qwen2), max_num_batched_tokens=64)
    prompt = PROMPTS["of-17"]
    several = SamplingParams(seed=3, n=3, prompt_logprobs=3, max_tokens=4)
    engine.run(Request("several", RequestSpec(prompt, several)))
    engine.run(Request("given", RequestSpec(prompt, PARAMS), output_token_ids=[5]))
    assert engine.found == {"several": [computed(qwen2, PROMPTS)["of-17"]]}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(qwen2: Path, mode: str) -> None:
    runner = load(qwen2, 8, host_cache_bytes=1 << 22)
    # A prompt is computed so slowly that the stream needs a block of it before it is complete.
    engine = Engine(
        runner,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        preemption_mode=mode,
        num_host_blocks=runner.num_host_blocks,
    )
    stream = Request(
        "stream", RequestSpec(PROMPTS["of-17"], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    )
    asks = [Request(f"asks-{n}", RequestSpec(PROMPTS["of-70"], PARAMS)) for n in range(2)]
    engine.run(stream, *asks)
    assert engine.core.scheduler.make_stats().num_preemptions_by_mode[mode] > 0
    right = computed(qwen2, PROMPTS)["of-70"]
    assert engine.found == {f"asks-{n}": [right] for n in range(2)}


def test_a_step_computes_few_of_their_rows_and_goes_on_with_others(qwen2: Path) -> None:
    engine = Engine(load(qwen2, 256), max_num_batched_tokens=512)
    long = [RNG.randrange(256) for _ in range(200)]
    for name in ("a", "b"):
        engine.core.scheduler.add_request(Request(name, RequestSpec(long, PARAMS), leg=Leg.WHOLE))
    engine.core.scheduler.add_request(Request("plain", RequestSpec(long[::-1], SamplingParams(max_tokens=1))))
    scheduled = engine.core.scheduler.schedule()
    assert dict(scheduled.num_scheduled_tokens) == {"a": 128, "b": 1, "plain": 200}
