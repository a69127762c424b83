"""Speculation changes no bit: tokens, log-probabilities and ends are those of plain decoding, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.stats import SpecDecodingStats
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.speculation import SpeculationConfig
from baton.runner import DraftSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_grammar import FakeMatcher
from tests.support.listed_types import LISTED_TYPES
from tests.support.tiny_models import TINY_MODELS

LENGTH = 28
VOCABULARY = 256
LOOP = [7, 8, 9, 10, 11, 12] * 4
FORCED = [[(5 * place + 3) % VOCABULARY] if place % 6 < 4 else range(0, VOCABULARY, 3) for place in range(LENGTH)]
"""A grammar that forces four tokens of six."""
PROMPTS: Mapping[str, Sequence[int]] = {
    "greedy": LOOP,
    "drawn": [(3 * place + 1) % 250 for place in range(19)],
    "penalised": [4, 4, 5, 5, *LOOP],
    "stops": LOOP[2:],
    "forced": [1, 2, 3],
}
PARAMS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=LENGTH, logprobs=2),
    "drawn": SamplingParams(temperature=0.9, top_p=0.9, seed=21, max_tokens=LENGTH, logprobs=4),
    "penalised": SamplingParams(
        temperature=0.6,
        top_k=20,
        seed=3,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        logit_bias={9: 1.5},
        allowed_token_ids=tuple(range(200)),
        max_tokens=LENGTH,
        logprobs=1,
    ),
    "stops": SamplingParams(
        temperature=0.8, seed=8, min_tokens=11, stop_token_ids=frozenset(range(0, VOCABULARY, 7)), max_tokens=LENGTH
    ),
    "forced": SamplingParams(temperature=0.0, json_schema="{}", max_tokens=LENGTH, logprobs=3),
}


@dataclass
class Result:
    """What a client gets of one request."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    outcome: Outcome | None = None


Draft = Callable[[Sequence[int]], Sequence[int]]
"""Drafts from the tokens that plain decoding generates next."""


def generate(
    runner: TorchModelRunner,
    names: Sequence[str],
    speculation: SpeculationConfig | None = None,
    drafts: Mapping[str, Draft] | None = None,
    expected: Mapping[str, Result] | None = None,
    without: Sequence[str] = (),
) -> tuple[dict[str, Result], SpecDecodingStats]:
    """Run requests as one batch, prompts in chunks of 9 tokens, with an engine that drafts, or with given drafts."""
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        block_size=runner.layout.block_size,
        windows=runner.layout.windows,
        keeps_states=runner.layout.keeps_states,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        long_prefill_token_threshold=9,
        enable_prefix_caching=False,
        speculation=speculation,
    )
    core = EngineCore(Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), SystemClock()), runner)
    results = {name: Result([], []) for name in names}
    for name in names:
        params = replace(PARAMS[name], speculation=name not in without)
        core.scheduler.add_request(Request(name, RequestSpec(PROMPTS[name], params)))
        if params.has_grammar:
            core.scheduler.grammar_compiled(name, [FakeMatcher(FORCED, range(VOCABULARY))])
    while core.has_work():
        if drafts is not None and expected is not None:
            core.scheduler.update_draft_token_ids(
                {
                    name: draft(expected[name].token_ids[len(results[name].token_ids) :])
                    for name, draft in drafts.items()
                }
            )
        for client in core.step().values():
            for output in client:
                assert output.error is None
                result = results[output.attempt.request_id]
                result.token_ids += output.new_token_ids
                result.logprobs += output.new_logprobs
                result.outcome = output.outcome
    stats = core.scheduler.make_stats()
    assert stats.free_blocks == stats.total_blocks
    return results, stats.spec_decoding


def random_drafts(seed: int) -> Draft:
    chance = random.Random(seed)

    def draft(to_come: Sequence[int]) -> Sequence[int]:
        count = chance.randint(0, 9)
        return [token_id if chance.random() < 0.8 else chance.randrange(VOCABULARY) for token_id in to_come[:count]]

    return draft


def lying_drafts(to_come: Sequence[int]) -> Sequence[int]:
    """More than there is room for, and no tokens of the model."""
    return [*to_come[:3], *[999, -5] * 100]


DTYPES = ("float32", "bfloat16")
IN_BOTH = ("llama", "gemma3_text", "deepseek_v3")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The directory of a random model of this kind and seed, which is written once."""

    @cache
    def written(kind: str, seed: int) -> Path:
        directory = tmp_path_factory.mktemp("model")
        write_random_model(directory, LISTED_TYPES[kind], seed)
        return directory

    return written


@pytest.fixture(scope="module")
def plain_results(model_dir: Callable[[str, int], Path]) -> Callable[[str, str], Mapping[str, Result]]:
    """What plain decoding gives, each request alone, by the model's kind and dtype; it is computed once."""

    @cache
    def results(kind: str, dtype: str) -> Mapping[str, Result]:
        runner = load_runner(TorchSpec(model_dir(kind, 0), dtype=dtype, num_blocks=160, block_size=8))
        assert runner.model.bit_exact
        found: dict[str, Result] = {}
        for name in PROMPTS:
            found |= generate(runner, [name])[0]
        assert {result.outcome for result in found.values()} >= {Outcome.LENGTH}
        return found

    return results


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        # Each model in one dtype; in both where keys are in one group, in several, and wider than values.
        *((kind, DTYPES[place % 2]) for place, kind in enumerate(TINY_MODELS)),
        *((kind, DTYPES[1 - place % 2]) for place, kind in enumerate(TINY_MODELS) if kind in IN_BOTH),
        # Their states can't be taken back.
        ("lfm2", "bfloat16"),
        ("qwen3_5_text", "float32"),
    ],
)
def test_speculation_changes_no_bit(
    kind: str,
    dtype: str,
    model_dir: Callable[[str, int], Path],
    plain_results: Callable[[str, str], Mapping[str, Result]],
) -> None:
    names = list(PROMPTS)
    plain = plain_results(kind, dtype)
    runner = load_runner(TorchSpec(model_dir(kind, 0), dtype=dtype, num_blocks=160, block_size=8))

    # Drafts of the engine's own: of one request alone, of all, and of some beside mates without.
    assert generate(runner, ["penalised"], SpeculationConfig(prompt_lookup_min=1))[0] == {
        "penalised": plain["penalised"]
    }
    found, stats = generate(runner, names, SpeculationConfig(prompt_lookup_min=1))
    assert found == plain
    assert stats.num_accepted_tokens > 0  # how many are drafted depends on the time that steps take
    assert generate(runner, names, SpeculationConfig(prompt_lookup_min=2), without=["greedy", "forced"])[0] == plain

    # Drafts from elsewhere: right, partly right, and impossible.
    perfect: dict[str, Draft] = dict.fromkeys(names, lambda to_come: to_come[:12])
    found, stats = generate(runner, names, None, perfect, plain)
    assert found == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > LENGTH
    mixed = {name: random_drafts(seed) for seed, name in enumerate(names[:4])}
    assert generate(runner, names, None, mixed, plain)[0] == plain
    assert generate(runner, names, None, dict.fromkeys(names, lying_drafts), plain)[0] == plain


@pytest.mark.parametrize(
    # What drafts has no part in the bits of what is drafted for, whose rows are those of the test above.
    ("kind", "dtype", "drafting"),
    [
        ("llama", "float32", "the same"),
        ("llama", "bfloat16", "another"),
        ("gemma3_text", "bfloat16", "the same"),
        ("gemma3_text", "float32", "another"),
        ("deepseek_v3", "float32", "the same"),
        ("gpt_oss", "bfloat16", "another"),
        ("qwen3_5_text", "bfloat16", "another"),
    ],
)
def test_a_draft_model_changes_no_bit(
    kind: str,
    dtype: str,
    drafting: str,
    model_dir: Callable[[str, int], Path],
    plain_results: Callable[[str, str], Mapping[str, Result]],
) -> None:
    directory = model_dir(kind, 0) if drafting == "the same" else model_dir("llama", 1)
    draft = DraftSpec(directory, num_tokens=6)
    runner = load_runner(TorchSpec(model_dir(kind, 0), dtype=dtype, num_blocks=160, block_size=8, draft=draft))
    names = list(PROMPTS)
    plain = plain_results(kind, dtype)
    config = SpeculationConfig("draft_model", num_speculative_tokens=6, model=str(directory))
    for name in ("penalised", "forced"):
        assert generate(runner, [name], config)[0] == {name: plain[name]}
    found, stats = generate(runner, names, config)
    assert found == plain
    assert stats.num_draft_tokens > 0
    assert generate(runner, names, config, without=["greedy", "forced"])[0] == plain
