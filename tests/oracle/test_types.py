"""Every listed type gives the tokens of transformers' `generate()`, whatever runs beside a request.

Of each type one tiny model is computed whose every tensor is random: in float32 its greedy tokens are compared with
`generate()` and eager attention, in bfloat16 its tokens and log-probabilities with those of each request alone. Without
more, requests share steps, are cut into chunks, preempted or swapped, and find their prefixes in the cache.
BATON_TYPES=all tries every way by itself, as scripts/model_types does, which writes the register from what has passed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from baton.client import OperatorClient
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_pool import Block
from baton.engine.request import Request
from baton.errors import BatonError, ConfigError
from baton.messages.generation import GenerateRequest
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.speculation import SpeculationConfig
from baton.model_formats.adapters import open_adapter
from baton.model_formats.model_types import REGISTER
from baton.runner import DraftSpec
from baton.runner.loading import load_runner
from baton.runner.model.transformer import Transformer
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_ranks_exact import ALONE, caches_of, loaded
from tests.oracle.test_token_exact import BLOCK_SIZE, generate_with_transformers, make_engine, run_all
from tests.support.caller import TokenCount
from tests.support.encoder_decoder_models import ENCODER_DECODERS
from tests.support.engine_rig import name_of
from tests.support.image_models import IMAGE_MODELS
from tests.support.layer_number_models import GEMMA4_MODELS
from tests.support.listed_types import LISTED_TYPES, WITH_WINDOWS
from tests.support.mini_cluster import mini_cluster
from tests.support.peft_adapters import generate_with_peft, write_peft_adapter
from tests.support.rotary_models import ROPE_TYPES
from tests.support.text_part_models import TEXT_PART_MODELS
from tests.support.tiny_encoders import TINY_ENCODERS
from tests.support.varied_models import write_varied_model

ALL = os.environ.get("BATON_TYPES") == "all"
NEW_TOKENS = 8
LENGTHS = (1, 14, 48, 130, 156)
"""Prompts shorter than a block, of whole blocks, longer than windows, and longer than torch's products take at once
(112 rows). Some answers begin a block."""
LONGER, OTHER_LONGER = (1, 56, 192, 520, 600), 508
"""The same for types without attention, which have a state every 512 tokens and need a block only behind it."""
WITHOUT_ATTENTION = {"falcon_mamba", "mamba", "mamba2"}
LONG = 60
"""Tokens of an answer in whose middle its node ends."""
KEPT = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta", "short_mscale", "long_mscale")
"""What a configuration says of its rotary embedding besides the type."""
Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]
Prompts = Mapping[str, list[int]]


def prompts(row: str) -> dict[str, list[int]]:
    """Beginnings of one text, whose later prompts find those before them in the cache, and one other text."""
    draw = Random(11)
    lengths, other = (LONGER, OTHER_LONGER) if row in WITHOUT_ATTENTION else (LENGTHS, 44)
    texts = [[draw.randrange(256) for _ in range(lengths[-1])] for _ in range(2)]
    return {**{f"{length}": texts[0][:length] for length in lengths}, "other": texts[1][:other]}


@dataclass
class Turn:
    """What an engine answered to some requests, and what happened meanwhile."""

    answers: Answers
    num_preemptions: Mapping[str, int]
    num_cached: int


def run(engine: EngineCore, given: Prompts, params: SamplingParams, between: Callable[[], None] = lambda: None) -> Turn:
    """Run all requests together, and call `between` before each step; each must end by its length."""
    answers: Answers = {name: ([], []) for name in given}
    for name, prompt in given.items():
        engine.scheduler.add_request(Request(name, RequestSpec(prompt, params)))
    while engine.has_work():
        between()
        for outputs in engine.step().values():
            for output in outputs:
                assert output.outcome in (None, Outcome.LENGTH), output
                tokens, logprobs = answers[name_of(output)]
                tokens += output.new_token_ids
                logprobs += output.new_logprobs
    stats = engine.scheduler.make_stats()
    assert stats.free_blocks == stats.total_blocks
    return Turn(answers, stats.num_preemptions_by_mode, stats.prefix_cache.num_hit_tokens["device"])


def alone(runner: TorchModelRunner, given: Prompts, params: SamplingParams) -> Answers:
    """Each request in an engine of its own, its prompt computed at once."""
    found: Answers = {}
    for name, prompt in given.items():
        engine = make_engine(runner, max_num_batched_tokens=512, enable_prefix_caching=False)
        found |= run(engine, {name: prompt}, params).answers
    return found


def in_chunks(runner: TorchModelRunner, given: Prompts, params: SamplingParams, chunk: int) -> Answers:
    return run(make_engine(runner, max_num_batched_tokens=chunk, enable_prefix_caching=False), given, params).answers


def crowded(runner: TorchModelRunner, given: Prompts, params: SamplingParams, mode: str) -> Answers:
    """In chunks; once all requests run there are no free blocks, until some were preempted."""
    swap = {"num_host_blocks": runner.num_host_blocks, "preemption_mode": mode}
    engine = make_engine(runner, max_num_batched_tokens=100, watermark=0.0, **swap)
    scheduler, pool = engine.scheduler, engine.scheduler.kv_cache_manager.pool
    taken: list[Block] = []

    def squeeze() -> None:
        stats = scheduler.make_stats()
        if stats.num_preemptions or not stats.num_running:
            pool.free_blocks(taken)
            taken.clear()
        elif not stats.num_waiting:
            taken.extend(pool.get_new_blocks(pool.num_free_blocks))

    turn = run(engine, given, params, squeeze)
    assert turn.num_preemptions[mode] > 0
    return turn.answers


def behind_prefixes(runner: TorchModelRunner, given: Prompts, params: SamplingParams) -> Answers:
    """Shorter prompts first, which leave the beginnings of the two longest ones in the cache."""
    engine, cached = make_engine(runner), 0
    found: Answers = {}
    longest = sorted((name for name in given if name != "other"), key=lambda name: len(given[name]))[-2:]
    shorter = {name: prompt for name, prompt in given.items() if name not in longest}
    for together in (shorter, *({name: given[name]} for name in longest)):
        turn = run(engine, together, params)
        found |= turn.answers
        cached = turn.num_cached
    lengths = sorted(len(prompt) for name, prompt in given.items() if name != "other")
    assert cached >= sum(lengths[1:-1]) // 2
    return found


def with_drafts(runner: TorchModelRunner, given: Prompts, params: SamplingParams) -> Answers:
    """The model drafts for itself, of which a draft that is drawn otherwise is refused; for one with states another one
    drafts, of which all drafts may be wrong."""
    speculation = SpeculationConfig("draft_model", 4, model="draft")
    engine = make_engine(runner, speculation=speculation)
    turn = run(engine, given, params)
    drafted = engine.scheduler.make_stats().spec_decoding
    assert (drafted.num_draft_tokens if runner.layout.keeps_states else drafted.num_accepted_tokens) > 0
    return turn.answers


Way = Callable[[TorchModelRunner, Prompts, SamplingParams], Answers]
FEW: Mapping[str, Way] = {"swapped": partial(crowded, mode="swap"), "behind prefixes": behind_prefixes}
EVERY: Mapping[str, Way] = {
    **FEW,
    "alone": alone,
    **{f"in chunks of {chunk}": partial(in_chunks, chunk=chunk) for chunk in (16, 64, 100, 512)},
    "preempted": partial(crowded, mode="recompute"),
    "with drafts": with_drafts,
}
WAYS = EVERY if ALL else FEW
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
DRAWN = SamplingParams(temperature=0.8, seed=7, max_tokens=NEW_TOKENS, logprobs=4)
ROWS: Mapping[str, Mapping[str, Any]] = {
    **LISTED_TYPES,
    **{f"{name}+windows": config for name, config in WITH_WINDOWS.items()},
    **{f"gemma4_text+{name}": config for name, config in GEMMA4_MODELS.items()},
    "zamba2+two blocks": {
        **LISTED_TYPES["zamba2"],
        "layers_block_type": ["linear_attention", *["hybrid"] * 3],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": False,
    },
    "gemma3n_text+sparse": {
        **LISTED_TYPES["gemma3n_text"],
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.5, 0.0],
        "altup_active_idx": 1,
        "altup_correct_scale": False,
    },
    "falcon_h1+plain gates": {**LISTED_TYPES["falcon_h1"], "mamba_rms_norm": False, "ssm_out_multiplier": 1.0},
}
"""By the type, and behind a plus what is special about this model of it."""


def load(directory: Path, dtype: str) -> TorchModelRunner:
    spec = TorchSpec(directory, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=224, host_cache_bytes=1 << 22)
    if not ALL:
        return load_runner(spec)
    layout = load_runner(spec).layout
    drafting = directory
    if layout.keeps_states:  # such a model can't draft
        drafting = directory / "drafts"
        write_varied_model(drafting, LISTED_TYPES["llama"], seed=5)
    return load_runner(replace(spec, draft=DraftSpec(drafting, 4), block_size=layout.block_size))


def tokens_of(answers: Answers) -> dict[str, list[int]]:
    return {name: tokens for name, (tokens, _) in answers.items()}


@pytest.fixture(scope="module", params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    """Each row in turn, whose tests run one after the other."""
    return str(request.param)


@pytest.fixture(scope="module")
def written(row: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The row's model."""
    directory = tmp_path_factory.mktemp("model")
    write_varied_model(directory, ROWS[row], seed=5)
    return directory


@pytest.fixture(scope="module")
def in_bfloat16(written: Path) -> TorchModelRunner:
    """The row's model, loaded."""
    return load(written, "bfloat16")


def test_greedy_tokens_equal_generate(row: str, written: Path) -> None:
    runner = load(written, "float32")
    assert (runner.model.why_unverified, runner.model.bit_exact_reason) == ("", "")
    expected = generate_with_transformers(written, prompts(row), NEW_TOKENS)
    # A model that repeats one token would prove nothing.
    assert len({token for tokens in expected.values() for token in tokens}) > 12
    for name, way in WAYS.items():
        assert tokens_of(way(runner, prompts(row), GREEDY)) == expected, name


def test_drawn_tokens_depend_on_the_request_alone(row: str, in_bfloat16: TorchModelRunner) -> None:
    assert (in_bfloat16.model.why_unverified, in_bfloat16.model.bit_exact_reason) == ("", "")
    expected = alone(in_bfloat16, prompts(row), DRAWN)
    for name, way in WAYS.items():
        assert way(in_bfloat16, prompts(row), DRAWN) == expected, name


def test_the_loop_is_the_fastest_that_the_type_can_have(row: str, in_bfloat16: TorchModelRunner) -> None:
    transformer = in_bfloat16._transformer
    assert transformer.has_own_loop, transformer.why_no_own_loop
    assert transformer.why_no_programs == ""


SOME = list(ROWS) if ALL else ["deepseek_v2"]
"""The rows whose further ways are tried."""
OF_EACH_KIND = list(ROWS) if ALL else [*SOME, "qwen3_5_text", "olmo2"]
"""The rows that are tried in ranks and stages: `SOME`, one with states, and one whose layers begin with attention."""


SHAPES = {"ranks": (2, 1), "stages": (1, 2)}
DIVIDED = [(row, shape) for row in OF_EACH_KIND for shape in SHAPES]
IN_PROGRAMS_OF_RANKS = [
    *("deepseek_v2", "deepseek_v32", "gpt_oss", "longcat_flash", "llama4_text", "qwen2_moe"),
    *("olmo2", "qwen3_5_moe_text", "mamba", "zamba2"),
]
"""Latents and a mixture, selections, experts with biases and a clamped gate, those that pass rows on, those of weighted
rows, shared rows with a gate, whose only column one rank has; norms of all heads, states, those of channels, and
terms of shared products."""
if not ALL:
    # Parts of two layers each, several streams, keys of other layers, a look at the embedding, and rows in float32.
    DIVIDED += [(row, "stages") for row in ("longcat_flash", "gemma3n_text", "zamba2", "mamba")]
    DIVIDED += [(row, "ranks") for row in IN_PROGRAMS_OF_RANKS if row not in OF_EACH_KIND]


@pytest.mark.parametrize(("row", "shape"), DIVIDED)
def test_divided_models_give_the_bits_of_one_process(tmp_path: Path, row: str, shape: str) -> None:
    write_varied_model(tmp_path, ROWS[row], seed=5)
    with loaded(tmp_path, ALONE, dtype="bfloat16", num_blocks=224) as runner:
        expected = in_chunks(runner, prompts(row), DRAWN, 40)
    try:
        with loaded(tmp_path, SHAPES[shape], dtype="bfloat16", num_blocks=224) as runner:
            found = in_chunks(runner, prompts(row), DRAWN, 40)
            assert runner._transformer.why_no_programs == "" or shape == "stages" or row not in IN_PROGRAMS_OF_RANKS
    except ConfigError as error:
        if not ALL:
            raise
        pytest.skip(f"it is refused: {error}")
    assert found == expected


@pytest.mark.parametrize("row", ["gemma3n_text", "zamba2"])
def test_a_stage_between_others_has_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """The stage receives streams or the embedding, and sends them, by programs and by transformers' own loop."""
    write_varied_model(tmp_path, {**ROWS[row], "num_kv_shared_layers": 0}, seed=5)
    with loaded(tmp_path, ALONE, dtype="bfloat16", num_blocks=224) as runner:
        expected = in_chunks(runner, prompts(row), DRAWN, 40)
    for has_programs in (True, False):
        with loaded(tmp_path, (1, 3), dtype="bfloat16", num_blocks=224) as runner:
            assert all((stage.why_no_programs == "") == has_programs for stage in caches_of(runner))
            assert in_chunks(runner, prompts(row), DRAWN, 40) == expected
        monkeypatch.setattr(Transformer, "_own_loop", lambda *_: None)


def with_rope(row: str, rope_type: str) -> dict[str, Any]:
    """The row's configuration with this type of rotary embedding in all layers. Skips a test of a type without any."""
    settings = AutoConfig.for_model(**{"pad_token_id": None, **ROWS[row]})
    usual = getattr(settings, "rope_parameters", None)
    if not usual:
        pytest.skip("the type has no rotary embedding")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(settings)
    scaled = {name: value for name, value in ROPE_TYPES[rope_type]["rope_parameters"].items() if name != "rope_theta"}
    if rope_type == "longrope":
        count = max(buffer.numel() for name, buffer in module.named_buffers() if name.endswith("inv_freq"))
        scaled |= {"short_factor": [1.0] * count, "long_factor": [1.0 + place for place in range(count)]}

    def of(usual: Mapping[str, Any]) -> dict[str, Any]:
        return {**{name: usual[name] for name in KEPT if name in usual}, **scaled}

    by_kind = all(isinstance(value, Mapping) for value in usual.values())
    return {**ROWS[row], "rope_parameters": {kind: of(usual[kind]) for kind in usual} if by_kind else of(usual)}


SCALED = [(row, rope_type) for row in SOME for rope_type in ROPE_TYPES if rope_type != "default"]
if not ALL:  # two kinds of angles, complex numbers, and norms behind a rotation
    SCALED += [("granite_swa", "longrope"), ("llama4_text", "longrope"), ("nanochat", "yarn")]


@pytest.mark.parametrize(("row", "rope_type"), SCALED)
def test_scaled_rotary_embeddings(tmp_path: Path, row: str, rope_type: str) -> None:
    config = with_rope(row, rope_type)
    try:
        write_varied_model(tmp_path, config, seed=5)
        expected = generate_with_transformers(tmp_path, prompts(row), NEW_TOKENS)
    except (StrictDataclassClassValidationError, KeyError, TypeError, RuntimeError) as error:
        pytest.skip(f"transformers can't compute it: {error!r}")
    runner = load(tmp_path, "float32")
    assert (runner.model.why_unverified, runner.model.bit_exact_reason) == ("", "")
    for name, way in FEW.items():
        assert tokens_of(way(runner, prompts(row), GREEDY)) == expected, name


def adapted(base: Path) -> str | list[str]:
    """What an adapter changes: all linear layers, or of a mixture those whose names only attention has; of types with
    Mamba's layers those that PEFT takes."""
    model = AutoModelForCausalLM.from_pretrained(base)
    names = [name for name, _ in model.named_parameters()]
    linear = [path for path, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    if not any("expert" in name or "router" in name for name in names):
        # A number would name layers, too.
        projections = {name for path in linear if not (name := path.rpartition(".")[2]).isdigit()}
        projections -= {"lm_head", "out_proj", "dt_proj", "linear"}
        return sorted(projections) if any("conv1d" in name for name in names) else "all-linear"
    of_attention = {path.rpartition(".")[2] for path in linear if "attn" in path or "attention" in path}
    others = {path.rpartition(".")[2] for path in linear if not ("attn" in path or "attention" in path)}
    return sorted(of_attention - others) or ["q_proj", "v_proj"]


@pytest.mark.parametrize("row", OF_EACH_KIND)
def test_adapters_give_the_tokens_of_peft(tmp_path: Path, row: str) -> None:
    write_varied_model(tmp_path / "base", ROWS[row], seed=5)
    require_tokens_of_peft(tmp_path, row, adapted(tmp_path / "base"))


def test_adapters_change_the_terms_that_a_layer_adds_to_shared_products(tmp_path: Path) -> None:
    write_varied_model(tmp_path / "base", ROWS["zamba2"], seed=5)
    own = r"layers\.1\..*_list\.0\.[01]|layers\.3\..*_list\.1\.[01]"
    require_tokens_of_peft(tmp_path, "zamba2", rf".*({own}|q_proj)$")


def require_tokens_of_peft(tmp_path: Path, row: str, modules: str | list[str]) -> None:
    """Compare the tokens with an adapter that changes these modules, beside requests without one; `base` is written."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    runner = load(base, "float32")
    write_peft_adapter(base, adapter, seed=1, target_modules=modules, r=4, lora_alpha=8)
    digest = open_adapter(adapter).digest()
    runner.adapters.load(adapter, digest)
    given = {name: prompt for name, prompt in prompts(row).items() if len(prompt) < 100}
    expected = {
        digest: generate_with_peft(base, adapter, given, NEW_TOKENS),
        "": generate_with_peft(base, None, given, NEW_TOKENS),
    }
    engine = make_engine(runner)
    requests = [
        Request(f"{name}-{digest}", RequestSpec(prompt, GREEDY, cache_salt=digest, adapter=digest))
        for name, prompt in given.items()
        for digest in expected
    ]
    found = run_all(engine, requests)
    assert found == {f"{name}-{digest}": of[name] for name in given for digest, of in expected.items()}
    assert expected[digest] != expected[""]


@pytest.mark.parametrize("row", OF_EACH_KIND)
async def test_a_pair_of_nodes_and_its_failover_give_the_tokens_of_one(tmp_path: Path, row: str) -> None:
    write_varied_model(tmp_path, ROWS[row], seed=5)
    runner = load(tmp_path, "bfloat16")
    expected = tokens_of(alone(runner, prompts(row), DRAWN))
    long = {"long": max(prompts(row).values(), key=len)}
    expected |= tokens_of(alone(runner, long, replace(DRAWN, max_tokens=LONG)))
    expected["moved"] = expected["long"]

    def make_runner(node_id: str) -> TorchModelRunner:
        return load_runner(TorchSpec(tmp_path, dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=224))

    async with mini_cluster(make_runner, tmp_path, decode=3, max_num_batched_tokens=40, max_num_seqs=8) as cluster:

        def request(name: str, prompt: list[int], count: int = NEW_TOKENS) -> GenerateRequest:
            return GenerateRequest(prompt, request_id=name, temperature=0.8, seed=7, max_tokens=count, ignore_eos=True)

        count = TokenCount()
        interrupted = asyncio.create_task(cluster.generate(request("long", long["long"], LONG), on_event=count))
        await count.wait_for_tokens(2)
        node = next(node for name, node in cluster.nodes.items() if name != "prefill-0" and node.num_blocks_in_use)
        await node.end()
        others = await asyncio.gather(*(cluster.generate(request(*item)) for item in prompts(row).items()))
        answers = dict(zip([*prompts(row), "long"], [*others, await interrupted], strict=True))
        while "moved" not in answers:
            # The first of them may have ended before the other node has a link to its node.
            count = TokenCount()
            moving = asyncio.create_task(cluster.generate(request("moved", long["long"], LONG), on_event=count))
            await count.wait_for_tokens(2)
            with closing(OperatorClient(cluster.router.operator)) as operator, suppress(BatonError):
                await asyncio.to_thread(operator.move, "moved")
                answers["moved"] = await moving
            await moving
    assert {name: answer.token_ids for name, answer in answers.items()} == expected
    assert all(answer.end.kv_bytes > 0 for answer in others)
    assert answers["long"].end.path.attempts > 1
    assert answers["moved"].end.path.attempts > 1


def test_the_register_lists_the_types_that_are_tested() -> None:
    """With the installed transformers; run `scripts/model_types --test` after a change of either."""
    register = json.loads(REGISTER.read_text())
    assert register["transformers"] == version("transformers")
    decoders, of_parts = ({row.partition("+")[0] for row in rows} for rows in (ROWS, TEXT_PART_MODELS))
    assert set(register["types"]) == {*decoders, *of_parts, *IMAGE_MODELS, *ENCODER_DECODERS, *TINY_ENCODERS}
    assert all({"tokens", "bits"} <= {*register["types"][name]} for name in decoders)
