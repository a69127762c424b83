"""Constrained tokens equal those of a naive mask over transformers' own logits, however the engine computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import LazyExecutor
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequences.sequence_group import sequence_id, sequence_seed
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.execution.token_masks import TokenMasks
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.text.constraints.grammar import Grammars, num_mask_words
from baton.text.tokenizer import Tokenizer
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_grammar import FakeMatcher
from tests.support.engine_rig import name_of
from tests.support.json_fit import SCHEMAS, check_fits, schema_text
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
VOCAB = 300
EOS = 299
"""The end token of a vocabulary without special tokens, in which it could also be read as a word."""
MAX_TOKENS = 160


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = {**TINY_MODELS["qwen2"], "vocab_size": VOCAB, "eos_token_id": EOS}
    write_random_model(directory, config, seed=5)
    return directory


@pytest.fixture(scope="module")
def grammars(model_dir: Path) -> Iterator[Grammars]:
    grammars = Grammars.load(model_dir, VOCAB, {EOS})
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> TorchModelRunner:
    return load_runner(TorchSpec(model_dir, dtype="float32", block_size=BLOCK_SIZE, num_blocks=128))


class Engine:
    """One engine; requests get the matchers that a node would compile for them."""

    def __init__(self, runner: TorchModelRunner, grammars: Grammars, ahead: bool = False, **limits: Any) -> None:
        values = {"max_num_batched_tokens": 24, "max_num_seqs": 12, "enable_prefix_caching": False} | limits
        config = SchedulerConfig(
            num_blocks=runner.memory.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=runner.model.max_model_len,
            **values,
        )
        fields = CacheKeyFields.of(runner.model, runner.layout)
        self.core = EngineCore(Scheduler(config, fields, FakeClock()), runner, LazyExecutor() if ahead else None)
        self.errors: dict[str, str] = {}
        self._grammars = grammars
        self._eos = runner.model.eos_token_ids

    def run(self, prompts: Mapping[str, list[int]], params: Mapping[str, SamplingParams]) -> dict[str, list[int]]:
        """Output tokens by sequence. Requests that may end must."""
        tokens: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            how = params[name]
            self.core.scheduler.add_request(Request(name, RequestSpec(prompt, how), eos_token_ids=self._eos))
            if how.has_grammar:
                self.core.scheduler.grammar_compiled(
                    name, [self._grammars.matcher(how.json_schema) for _ in range(how.n)]
                )
        while self.core.has_work():
            for outputs in self.core.step().values():
                for output in outputs:
                    tokens.setdefault(name_of(output), []).extend(output.new_token_ids)
                    if output.error is not None:
                        self.errors[name_of(output)] = str(output.error)
        self.core.scheduler.kv_cache_manager.check_invariant()
        return tokens


def prompt_of(index: int) -> list[int]:
    return [(index * 31 + place * 7) % 256 for place in range(5 + index * 3)]


def constrained(name: str, seed: int = 0, **fields: Any) -> SamplingParams:
    values = {"seed": seed, "max_tokens": MAX_TOKENS, **fields}
    return SamplingParams(json_schema=schema_text(name), **values)


def naive_mask(grammars: Grammars, json_schema: str, output: list[int]) -> np.ndarray[Any, Any]:
    """The mask of a new matcher that has been given only this output."""
    matcher = grammars.matcher(json_schema)
    matcher.advance(output)
    mask = np.zeros(num_mask_words(VOCAB), dtype=np.int32)
    matcher.fill(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def greedy_with_transformers(
    directory: Path, prompt: list[int], allowed: Callable[[list[int]], np.ndarray[Any, Any]]
) -> list[int]:
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    class Masked(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            barred = torch.from_numpy(~allowed(input_ids[0, len(prompt) :].tolist()))
            return scores.masked_fill(barred, -torch.inf)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([Masked()]),
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_greedy_tokens_equal_generate_under_a_naive_mask(
    model_dir: Path, runner: TorchModelRunner, grammars: Grammars
) -> None:
    names = ("object", "enum", "pattern", "nested")
    prompts = {name: prompt_of(index) for index, name in enumerate(names)}
    params = {name: constrained(name, temperature=0.0) for name in names}
    got = Engine(runner, grammars).run(prompts, params)
    for name in names:
        text = schema_text(name)
        assert got[name] == greedy_with_transformers(
            model_dir,
            prompts[name],
            lambda output, text=text: naive_mask(grammars, text, output),  # type: ignore[misc]
        )


@pytest.fixture(scope="module")
def sampled() -> tuple[dict[str, list[int]], dict[str, SamplingParams]]:
    """Constrained requests of every schema, with unconstrained requests between them."""
    prompts, params = {}, {}
    for index, name in enumerate(SCHEMAS):
        prompts[name] = prompt_of(index)
        params[name] = constrained(name, seed=index, temperature=1.0)
        prompts[f"plain-{index}"] = prompt_of(index + 1)
        params[f"plain-{index}"] = SamplingParams(seed=index, max_tokens=30)
    penalised = constrained("object", seed=9, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: -3.0})
    prompts["penalised"], params["penalised"] = prompt_of(3), replace(penalised, top_p=0.9, logprobs=2)
    return prompts, params


Sampled = tuple[dict[str, list[int]], dict[str, SamplingParams]]


@pytest.fixture(scope="module")
def alone(runner: TorchModelRunner, grammars: Grammars, sampled: Sampled) -> dict[str, list[int]]:
    """The tokens of all requests, computed one after the other."""
    prompts, params = sampled
    tokens: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        tokens |= Engine(runner, grammars).run({name: prompt}, params)
    return tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_batching_preemption_and_asynchronous_scheduling_change_no_token(
    model_dir: Path, grammars: Grammars, sampled: Sampled, alone: dict[str, list[int]], mode: str, ahead: bool
) -> None:
    block_bytes = 3 * 2 * 2 * BLOCK_SIZE * 16 * 4
    cramped = load_runner(
        TorchSpec(model_dir, dtype="float32", block_size=BLOCK_SIZE, num_blocks=24, host_cache_bytes=100 * block_bytes)
    )
    cramped._masks = TokenMasks(VOCAB, least_beside=1)  # all steps' masks by the second thread
    engine = Engine(cramped, grammars, ahead, preemption_mode=mode, num_host_blocks=cramped.num_host_blocks)
    assert engine.run(*sampled) == alone
    assert engine.core.scheduler.make_stats().num_preemptions_by_mode[mode] > 0


def test_generated_json_fits_the_schema(model_dir: Path, alone: dict[str, list[int]]) -> None:
    tokenizer = Tokenizer.load(model_dir)
    for name in SCHEMAS:
        assert alone[name][-1] == EOS
        check_fits(tokenizer.decode(alone[name][:-1]), name)


def test_constrained_requests_change_no_tokens_of_others(
    runner: TorchModelRunner, grammars: Grammars, sampled: Sampled, alone: dict[str, list[int]]
) -> None:
    prompts, params = sampled
    plain = {name: prompt for name, prompt in prompts.items() if name.startswith("plain")}
    assert Engine(runner, grammars).run(plain, params) == {name: alone[name] for name in plain}


def test_each_of_several_constrained_sequences_is_what_it_would_be_alone(
    runner: TorchModelRunner, grammars: Grammars
) -> None:
    params = constrained("object", seed=4, n=3)
    together = Engine(runner, grammars).run({"r": prompt_of(2)}, {"r": params})
    for index in range(3):
        single = replace(params, n=1, seed=sequence_seed(4, index))
        assert (
            together[sequence_id("r", index)] == Engine(runner, grammars).run({"r": prompt_of(2)}, {"r": single})["r"]
        )


@pytest.mark.parametrize("num_generated", [1, 7, 30])
def test_an_attempt_continues_behind_the_tokens_of_an_earlier_one(
    runner: TorchModelRunner, grammars: Grammars, sampled: Sampled, alone: dict[str, list[int]], num_generated: int
) -> None:
    prompts, params = sampled
    core = Engine(runner, grammars).core
    requests = {
        name: Request(
            name,
            RequestSpec(prompts[name], params[name]),
            eos_token_ids=frozenset({EOS}),
            output_token_ids=alone[name][:num_generated],
        )
        for name in ("object", "penalised")
    }
    for name, request in requests.items():
        core.scheduler.add_request(request)
        matcher = grammars.matcher(params[name].json_schema)
        matcher.advance(request.output_token_ids)
        core.scheduler.grammar_compiled(name, [matcher])
    while core.has_work():
        core.step()
    assert {name: request.output_token_ids for name, request in requests.items()} == {
        name: alone[name] for name in requests
    }


def test_no_token_is_outside_the_mask(grammars: Grammars, sampled: Sampled, alone: dict[str, list[int]]) -> None:
    _, params = sampled
    for name in ("object", "pattern", "penalised"):
        output = alone[name]
        assert all(
            naive_mask(grammars, params[name].json_schema, output[:place])[token] for place, token in enumerate(output)
        )


def test_a_constrained_request_may_end_by_its_length(runner: TorchModelRunner, grammars: Grammars) -> None:
    engine = Engine(runner, grammars)
    request = Request(
        "r", RequestSpec(prompt_of(1), constrained("object", max_tokens=3)), eos_token_ids=frozenset({EOS})
    )
    engine.core.scheduler.add_request(request)
    engine.core.scheduler.grammar_compiled("r", [grammars.matcher(schema_text("object"))])
    while engine.core.has_work():
        engine.core.step()
    assert request.outcome is Outcome.LENGTH


def test_a_schema_that_becomes_too_complex_fails_its_request_alone(
    runner: TorchModelRunner, grammars: Grammars, sampled: Sampled, alone: dict[str, list[int]]
) -> None:
    prompts, params = sampled
    engine = Engine(runner, grammars)
    costly = Request("costly", RequestSpec(prompt_of(1), constrained("object")))
    engine.core.scheduler.add_request(costly)
    engine.core.scheduler.grammar_compiled("costly", [FakeMatcher([range(VOCAB)] * 9, {EOS}, too_complex_at=4)])
    assert engine.run({"object": prompts["object"]}, params)["object"] == alone["object"]
    assert engine.errors == {"costly": "json_schema: too complex"}
    assert (costly.outcome, costly.num_output_tokens) == (Outcome.INVALID, 4)
