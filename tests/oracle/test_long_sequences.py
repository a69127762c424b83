"""Tokens with rotary angles that depend on a length are those of `generate()`, whatever runs beside a request.

BATON_SCHEDULES=300 runs so many random schedules of each model instead of a few, in both dtypes and with more prompts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequences.sequence_group import sequence_id
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.speculation import SpeculationConfig
from baton.runner import DraftSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.support.engine_rig import name_of
from tests.support.rotary_models import PHI3_LONGROPE, ROPE_TYPES

_SCHEDULES = int(os.environ.get("BATON_SCHEDULES") or 0)
BLOCK_SIZE = 16
NUM_BLOCKS = 96
MOST_TOKENS = 24
"""The most tokens of an output. Outputs of prompts that are fewer tokens shorter than the border cross it."""
LENGTHS = (5, 30, 44, 48, 63, 64, 65, 80, 130, 200) if _SCHEDULES else (5, 48, 63, 64, 65, 130)
MODELS: Mapping[str, Mapping[str, Any]] = {
    "phi3": PHI3_LONGROPE,
    "longrope": ROPE_TYPES["longrope"],
    "in transformers' loop": {**ROPE_TYPES["longrope"], "model_type": "olmo2"},
    "dynamic": ROPE_TYPES["dynamic"],
}
IN_BFLOAT16 = MODELS if _SCHEDULES else ("phi3", "in transformers' loop")
CASES = [*((name, "float32") for name in MODELS), *((name, "bfloat16") for name in IN_BFLOAT16)]


@dataclass
class Answer:
    """What a client gets."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def prompts() -> dict[str, list[int]]:
    """Beginnings of two texts, so that prompts on both sides of the border have prefixes in common."""
    draw = Random(4)
    texts = [[draw.randrange(256) for _ in range(max(LENGTHS))] for _ in range(2)]
    return {f"{text}/{length}": texts[text][:length] for text in range(2) for length in LENGTHS}


def generated(directory: Path, given: Mapping[str, Sequence[int]], count: int) -> dict[str, list[int]]:
    """The greedy tokens of transformers' `generate()`."""
    from transformers import AutoModelForCausalLM

    found = {}
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    for name, prompt in given.items():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found[name] = out[0, len(prompt) :].tolist()
    return found


def make_engine(
    runner: TorchModelRunner, executor: ThreadExecutor | None = None, chunk: int = 512, **limits: Any
) -> EngineCore:
    config = SchedulerConfig(
        num_blocks=limits.pop("num_blocks", runner.memory.num_blocks),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=chunk,
        max_num_seqs=8,
        max_model_len=runner.model.max_model_len,
        long_sequences=runner.model.long_sequences,
        watermark=0.0,
        **limits,
    )
    fields = CacheKeyFields.of(runner.model, runner.layout)
    return EngineCore(Scheduler(config, fields, FakeClock(), None), runner, executor)


class ThreadExecutor:
    """Computes steps on a thread, so that the next one is decided meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def submit(self, execute: Any) -> Any:
        return self._thread.submit(execute).result

    def close(self) -> None:
        self._thread.shutdown()


def step(engine: EngineCore, answers: dict[str, Answer]) -> None:
    for outputs in engine.step().values():
        for output in outputs:
            assert output.outcome in (None, Outcome.LENGTH), output
            answer = answers.setdefault(name_of(output), Answer())
            answer.token_ids += output.new_token_ids
            answer.logprobs += output.new_logprobs


def greedy(count: int = MOST_TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, logprobs=1, ignore_eos=True, **more)


def alone(runner: TorchModelRunner, given: Mapping[str, Sequence[int]]) -> dict[str, Answer]:
    """Each request in an engine of its own, its prompt computed at once."""
    answers: dict[str, Answer] = {}
    for name, prompt in given.items():
        engine = make_engine(runner, enable_prefix_caching=False)
        engine.scheduler.add_request(Request(name, RequestSpec(prompt, greedy())))
        while engine.has_work():
            step(engine, answers)
    return answers


class Schedule:
    """A random schedule: chunks, batches, cached prefixes, preemptions, drafts, and outputs to go on from."""

    def __init__(self, runner: TorchModelRunner, expected: Mapping[str, Answer], seed: int) -> None:
        self._draw = draw = Random(seed)
        self._expected = expected
        self._executor = ThreadExecutor() if draw.random() < 0.3 else None
        self._drafts = self._executor is None and draw.random() < 0.5
        methods = [SpeculationConfig(), SpeculationConfig("draft_model", 4, model="draft"), None]
        self.engine = make_engine(
            runner,
            self._executor,
            draw.choice([16, 24, 40, 100, 512]),
            num_blocks=20 if seed < 2 else draw.choice([20, 28, 40, NUM_BLOCKS]),
            num_host_blocks=runner.num_host_blocks,
            preemption_mode="swap" if seed % 2 else "recompute",
            speculation=None if self._drafts or self._executor is not None else draw.choice(methods),
        )
        self._answers: dict[str, Answer] = {}
        self._of: dict[str, tuple[str, int]] = {}
        """The prompt of each sequence, and how many tokens of its output it came with."""

    def run(self, most: int = 12) -> Counter[str]:
        """Run all requests; their answers must be the expected ones. Returns how often what has happened."""
        engine, draw = self.engine, self._draw
        waiting = draw.sample(sorted(self._expected), most)
        while waiting or engine.has_work():
            while waiting and (draw.random() < 0.4 or not engine.has_work()):
                self._add(waiting.pop())
            if self._drafts:
                engine.scheduler.update_draft_token_ids(
                    {name: self._draft(name) for name in self._of if draw.random() < 0.5}
                )
            step(engine, self._answers)
        if self._executor is not None:
            self._executor.close()
        stats = engine.scheduler.make_stats()
        assert stats.free_blocks == stats.total_blocks
        engine.scheduler.kv_cache_manager.check_invariant()
        for name, (prompt, num_given) in self._of.items():
            answer, expected = self._answers[name], self._expected[prompt]
            assert answer.token_ids == expected.token_ids[num_given:], (name, num_given)
            if expected.logprobs:
                assert answer.logprobs == expected.logprobs[num_given:], (name, num_given)
        hits = stats.prefix_cache.num_hit_tokens
        return Counter({**stats.num_preemptions_by_mode, "cached": hits["device"]})

    def _add(self, prompt: str) -> None:
        draw = self._draw
        n = 2 if draw.random() < 0.2 and len(prompts()[prompt]) < 100 else 1
        num_given = draw.randrange(MOST_TOKENS) if n == 1 and draw.random() < 0.3 else 0
        given = self._expected[prompt].token_ids[:num_given]
        token_ids = prompts()[prompt]
        self.engine.scheduler.add_request(Request(prompt, RequestSpec(token_ids, greedy(n=n)), output_token_ids=given))
        for index in range(n):
            self._of[sequence_id(prompt, index)] = prompt, num_given

    def _draft(self, name: str) -> list[int]:
        """Tokens that mostly follow."""
        prompt, num_given = self._of[name]
        done = num_given + len(self._answers.get(name, Answer()).token_ids)
        to_come = self._expected[prompt].token_ids[done : done + self._draw.randrange(8)]
        return [token if self._draw.random() < 0.85 else self._draw.randrange(256) for token in to_come]


def load(directory: Path, dtype: str) -> TorchModelRunner:
    return load_runner(
        TorchSpec(
            directory,
            dtype=dtype,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            host_cache_bytes=1 << 21,
            draft=DraftSpec(directory, 4),
        )
    )


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_an_answer_is_that_of_its_request_alone(tmp_path: Path, name: str, dtype: str) -> None:
    write_random_model(tmp_path, MODELS[name], seed=5)
    runner = load(tmp_path, dtype)
    assert runner.model.bit_exact
    expected = alone(runner, prompts())
    if dtype == "float32":
        tokens = generated(tmp_path, prompts(), MOST_TOKENS)
        assert {name: answer.token_ids for name, answer in expected.items()} == tokens
    happened: Counter[str] = Counter()
    for seed in range(_SCHEDULES or 4):
        happened += Schedule(runner, expected, seed).run()
    assert happened["recompute"] + happened["swap"] > 0 < happened["cached"]


@pytest.mark.parametrize("name", ROPE_TYPES)
def test_tokens_of_every_type_equal_generate(tmp_path: Path, name: str) -> None:
    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}
    write_random_model(tmp_path, ROPE_TYPES[name], seed=5)
    given = {key: prompts()[f"0/{key}"] for key in ("5", "48", "130")}
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))
    # Its tables of angles are transformers'.
    assert "Baton's loop over the layers" in [path.runs for path in runner.model.compute_paths]
    engine = make_engine(runner, chunk=24)
    for key, prompt in given.items():
        engine.scheduler.add_request(Request(key, RequestSpec(prompt, greedy(18))))
    answers: dict[str, Answer] = {}
    while engine.has_work():
        step(engine, answers)
    assert {key: answer.token_ids for key, answer in answers.items()} == generated(tmp_path, given, 18)
