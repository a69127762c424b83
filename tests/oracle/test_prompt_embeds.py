"""Tokens behind a prompt with given rows equal transformers' `generate(inputs_embeds=…)` in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.node import Outcome
from baton.messages.node_model import Capability
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import Span
from baton.messages.speculation import SpeculationConfig
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.support.given_spans import random_rows, span_of, with_placeholders
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_with
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


class Prompt(NamedTuple):
    token_ids: Sequence[int]
    spans: Sequence[Span]


def prompts_of(width: int) -> dict[str, Prompt]:
    """Prompts with spans in several places; and text alone, which must not care."""
    rng = Random(7)
    made: dict[str, Prompt] = {}
    places: dict[str, tuple[int, Sequence[tuple[int, int]]]] = {
        "text": (37, ()),
        "rows alone": (23, [(0, 23)]),
        "one row": (1, [(0, 1)]),
        "soft prompt": (50, [(0, 33)]),
        "in the middle": (70, [(15, 34)]),
        "two": (60, [(3, 5), (16, 32)]),
        "at the end": (40, [(31, 9)]),
    }
    for name, (length, spans) in places.items():
        given = [span_of(random_rows(count, width, seed=start), start) for start, count in spans]
        made[name] = Prompt(with_placeholders([rng.randrange(256) for _ in range(length)], given), given)
    return made


def make_engine(runner: TorchModelRunner, budget: int = 24, **settings: Any) -> EngineCore:
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        block_size=runner.layout.block_size,
        windows=runner.layout.windows,
        keeps_states=runner.layout.keeps_states,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=runner.model.max_model_len,
        **settings,
    )
    return EngineCore(Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock()), runner)


def run_all(
    engine: EngineCore, prompts: Mapping[str, Prompt], params: SamplingParams = GREEDY
) -> dict[str, list[list[int]]]:
    """The tokens of each sequence of each prompt; all prompts at once."""
    found: dict[str, list[list[int]]] = {name: [[] for _ in range(params.n)] for name in prompts}
    for name, prompt in prompts.items():
        engine.scheduler.add_request(Request(name, RequestSpec(prompt.token_ids, params, spans=prompt.spans)))
    while engine.has_work():
        for output in (output for outputs in engine.step().values() for output in outputs):
            name, index = output.attempt.request_id, output.sequence_index
            found[name][index] += output.new_token_ids
            assert output.outcome in (None, Outcome.LENGTH), output
    return found


def generate_with_transformers(directory: Path, prompts: Mapping[str, Prompt]) -> dict[str, list[list[int]]]:
    from transformers import AutoModelForCausalLM

    # What transformers 5.17 would choose leaves soft caps out.
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    expected = {}
    with torch.inference_mode():
        for name, prompt in prompts.items():
            rows = model.get_input_embeddings()(torch.tensor([prompt.token_ids])).clone()
            for span in prompt.spans:
                given = torch.frombuffer(bytearray(span.rows), dtype=torch.float32).view(span.length, -1)
                rows[0, span.start : span.stop] = given
            out = model.generate(
                inputs_embeds=rows,
                attention_mask=torch.ones(rows.shape[:2], dtype=torch.int64),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            expected[name] = [out[0].tolist()]
    return expected


EMBEDDINGS = ("llama", "gemma2", "gemma3_text", "deepseek_v3", "gpt_oss", "gpt2", "opt")
"""Models whose embeddings or first layers differ: plain, scaled, scaled in transformers' loop, with latent attention,
with experts, and with learned positions, which begin at 0 or behind it. Others have the modules of these."""


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_tokens_behind_given_rows_equal_generate(tmp_path: Path, name: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64))
    assert Capability.PROMPT_EMBEDS in runner.model.capabilities
    prompts = prompts_of(runner.model.row_width)
    expected = generate_with_transformers(tmp_path, prompts)
    assert len({token for tokens in expected.values() for token in tokens[0]}) > 20
    engine = make_engine(runner)
    assert run_all(engine, prompts) == expected, "in chunks through spans, beside each other"
    assert run_all(engine, prompts) == expected, "with cached prefixes that end in spans"
    assert engine.scheduler.make_stats().prefix_cache.num_hit_tokens["device"] >= 64


class Recorded(NamedTuple):
    """What a request got: its tokens, and the log-probability of each, which shows the bits of its logits."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


def run_recorded(engine: EngineCore, prompts: Mapping[str, Prompt], params: SamplingParams) -> dict[str, Recorded]:
    """All prompts at once."""
    found = {name: Recorded([[] for _ in range(params.n)], [[] for _ in range(params.n)]) for name in prompts}
    for name, prompt in prompts.items():
        engine.scheduler.add_request(Request(name, RequestSpec(prompt.token_ids, params, spans=prompt.spans)))
    while engine.has_work():
        for output in (output for outputs in engine.step().values() for output in outputs):
            name, index = output.attempt.request_id, output.sequence_index
            found[name].token_ids[index] += output.new_token_ids
            found[name].logprobs[index] += [one.logprob for one in output.new_logprobs]
            assert output.outcome in (None, Outcome.LENGTH), output
    return found


DRAWN = SamplingParams(
    temperature=0.8, seed=4, max_tokens=16, n=2, logprobs=0, repetition_penalty=1.3, frequency_penalty=0.3
)
"""With penalties, which must not count placeholders."""


def alone(runner: TorchModelRunner, prompts: Mapping[str, Prompt], params: SamplingParams) -> dict[str, Recorded]:
    """What each prompt gets with an engine of its own."""
    found: dict[str, Recorded] = {}
    for name, prompt in prompts.items():
        found |= run_recorded(make_engine(runner, budget=256), {name: prompt}, params)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_mates_and_preemption_change_no_bit(tmp_path: Path, dtype: str) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=5)
    block_bytes = 3 * 2 * 2 * BLOCK_SIZE * 16 * 4
    cramped = load_runner(
        TorchSpec(tmp_path, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=13, host_cache_bytes=100 * block_bytes)
    )
    prompts = prompts_of(64)
    expected = alone(cramped, prompts, DRAWN)
    for mode in ("recompute", "swap"):
        engine = make_engine(cramped, preemption_mode=mode, num_host_blocks=cramped.num_host_blocks)
        assert run_recorded(engine, prompts, DRAWN) == expected
        assert engine.scheduler.make_stats().num_preemptions_by_mode[mode] > 0


def test_rows_of_any_dtype_and_the_tokens_own_rows_give_what_the_tokens_give(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5, dtype="bfloat16")
    runner = load_runner(TorchSpec(tmp_path, dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=64))
    text = prompts_of(64)["text"].token_ids
    table = runner._transformer._module.get_input_embeddings()(torch.tensor(text))
    for dtype in (torch.float32, torch.bfloat16):
        span = span_of(table[5:30].to(dtype), 5)
        given = {"rows": Prompt(with_placeholders(text, [span]), [span])}
        engine = make_engine(runner)
        plain = SamplingParams(temperature=0.8, seed=4, max_tokens=16, n=2, logprobs=0)
        assert run_recorded(engine, given, plain)["rows"] == run_recorded(engine, {"t": Prompt(text, ())}, plain)["t"]
    half = random_rows(20, 64, seed=1, dtype=torch.float16)
    same = [Prompt([0] * 20, [span_of(half.to(dtype))]) for dtype in (torch.float16, torch.float32, torch.bfloat16)]
    found = run_recorded(make_engine(runner), {str(place): one for place, one in enumerate(same)}, DRAWN)
    assert found["0"] == found["1"] == found["2"]


def test_drafts_change_no_token_and_beams_are_those_of_the_tokens(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))
    prompts = prompts_of(64)
    span = span_of(random_rows(20, 64, seed=3), 5)
    loop = [7, 8, 9, 10] * 12
    prompts["loop"] = Prompt(with_placeholders(loop, [span]), [span])
    params = SamplingParams(temperature=0.4, seed=4, max_tokens=40, logprobs=0, repetition_penalty=1.1)
    expected = alone(runner, prompts, params)
    drafting = make_engine(runner, speculation=SpeculationConfig(prompt_lookup_min=1))
    assert run_recorded(drafting, prompts, params) == expected
    assert drafting.scheduler.make_stats().spec_decoding.num_drafts > 0

    table = runner._transformer._module.get_input_embeddings().weight.detach()
    whole = prompts["text"].token_ids
    own = [span_of(table[whole[start : start + 9]], start) for start in (0, 12)]
    beams = SamplingParams(temperature=0.0, beam_width=3, n=2, max_tokens=12)
    found = run_all(make_engine(runner), {"rows": Prompt(with_placeholders(whole, own), own)}, beams)
    assert found["rows"] == run_all(make_engine(runner), {"text": prompts["text"]}, beams)["text"]
    assert all(len(beam) == 12 for beam in found["rows"])


@pytest.mark.parametrize(("how", "name"), [("ranks", "llama"), ("stages", "gpt2"), ("stages", "zamba2")])
def test_ranks_and_stages_give_the_bits_of_one_process(tmp_path: Path, how: str, name: str) -> None:
    """All stages of zamba2 look at the embedding, whose rows are those that were given."""
    write_random_model(tmp_path, LISTED_TYPES[name], seed=5)
    choices: dict[str, dict[str, Any]] = {
        "ranks": {"tensor_parallel": 2, "start_ranks": FakeRankGroup},
        "stages": {"pipeline_parallel": 3, "start_stages": FakeStages.start},
    }
    settings = choices[how]
    one = load_runner(TorchSpec(tmp_path, dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=64))
    prompts = prompts_of(one.model.row_width)
    expected = run_recorded(make_engine(one), prompts, DRAWN)
    several = load_with(tmp_path, dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=64, **settings)
    try:
        assert several.model.row_width == one.model.row_width
        assert run_recorded(make_engine(several), prompts, DRAWN) == expected
    finally:
        several.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_rows_fail_their_own_request_and_change_no_tokens_of_others(tmp_path: Path, dtype: str) -> None:
    """Their keys and values are not numbers, in blocks that others use afterwards."""
    write_random_model(tmp_path, TINY_MODELS["gpt2"], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=13))
    bad = Prompt([0] * 40, [span_of(torch.full((40, 64), 3e38))])
    prompts = {name: prompt for name, prompt in prompts_of(64).items() if len(prompt.token_ids) < 50}
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=0)
    expected = alone(runner, prompts, params)
    engine = make_engine(runner, budget=256, enable_prefix_caching=False)
    for turn in range(2):
        tokens: dict[str, list[int]] = {}
        outcomes: dict[str, Outcome] = {}
        engine.scheduler.add_request(Request(f"bad {turn}", RequestSpec(bad.token_ids, params, spans=bad.spans)))
        for name, prompt in prompts.items():
            engine.scheduler.add_request(
                Request(f"{name} {turn}", RequestSpec(prompt.token_ids, params, spans=prompt.spans))
            )
        while engine.has_work():
            for output in (output for outputs in engine.step().values() for output in outputs):
                name = output.attempt.request_id.removesuffix(f" {turn}")
                tokens.setdefault(name, []).extend(output.new_token_ids)
                if output.outcome is not None:
                    outcomes[name] = output.outcome
        assert outcomes.pop("bad") is Outcome.ERROR
        assert set(outcomes.values()) == {Outcome.LENGTH}
        assert {name: tokens[name] for name in prompts} == {name: expected[name].token_ids[0] for name in prompts}


def test_rows_of_another_width_fail_their_own_request_alone(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64))
    engine = make_engine(runner)
    narrow = span_of(random_rows(8, 63, seed=0))
    engine.scheduler.add_request(Request("narrow", RequestSpec([0] * 8, GREEDY, spans=[narrow])))
    engine.scheduler.add_request(Request("text", RequestSpec([5] * 8, GREEDY)))
    ended: dict[str, Outcome] = {}
    while engine.has_work():
        for output in (output for outputs in engine.step().values() for output in outputs):
            if output.outcome is not None:
                ended[output.attempt.request_id] = output.outcome
    assert ended == {"narrow": Outcome.ERROR, "text": Outcome.LENGTH}
