"""Tokens through router, prefill node, NIXL and decode node equal the naive path's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from baton.engine.request import Request
from baton.messages.generation import GenerateRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_token_exact import NEW_TOKENS, generate_with_transformers, make_engine, make_prompts, run_all
from tests.support.caller import Answer
from tests.support.meant_models import GGUF_FILES, write_gguf_model
from tests.support.mini_cluster import mini_cluster
from tests.support.quantized_models import FP8_FORMATS, PACKED_FORMATS, write_quantized_model
from tests.support.rotary_models import MOST_SHORT, PHI3_LONGROPE, ROPE_TYPES
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
CHUNK = 24


async def answers_equal_to_generate(
    directory: Path, config: Mapping[str, Any], prompts: dict[str, list[int]]
) -> Sequence[Answer]:
    """The answers of a pair of nodes to these prompts, after it was asserted that their tokens are generate()'s."""
    write_random_model(directory, config, seed=5)

    def make_runner(node_id: str) -> TorchModelRunner:
        return load_runner(TorchSpec(directory, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))

    expected = generate_with_transformers(directory, prompts)
    async with mini_cluster(make_runner, directory, max_num_batched_tokens=CHUNK, max_num_seqs=8) as cluster:
        requests = [
            GenerateRequest(prompt, request_id=key, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            for key, prompt in prompts.items()
        ]
        answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
        await cluster.wait_until_idle()
    for key, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected[key], key
    return answers


@pytest.mark.parametrize(
    ("transport", "name"),
    [*zip(cycle(["default", "default", "tcp"]), TINY_MODELS, strict=False)],
    indirect=["transport"],
)
async def test_greedy_tokens_equal_generate(tmp_path: Path, name: str) -> None:
    for answer in await answers_equal_to_generate(tmp_path, TINY_MODELS[name], make_prompts(256)):
        assert answer.indices == list(range(NEW_TOKENS))
        path = answer.end.path
        assert (path.prefill_node, path.decode_node, path.attempts) == ("prefill-0", "decode-0", 1)
        assert answer.end.kv_bytes > 0


@pytest.mark.one_transport
@pytest.mark.parametrize("config", [PHI3_LONGROPE, ROPE_TYPES["longrope"]], ids=["starts over", "goes on"])
async def test_outputs_that_outgrow_short_angles_equal_generate(tmp_path: Path, config: Mapping[str, Any]) -> None:
    text = make_prompts(256)["prompt-100"]
    prompts = {f"prompt-{n}": text[:n] for n in (30, MOST_SHORT - 5, MOST_SHORT, MOST_SHORT + 1, 100)}
    for answer in await answers_equal_to_generate(tmp_path, config, prompts):
        assert answer.end.path.prefill_node == "prefill-0"


@pytest.mark.parametrize(("transport", "cache_dtype"), [("default", "int8"), ("tcp", "fp8")], indirect=["transport"])
async def test_kv_in_8_bits_gives_the_tokens_of_one_node_alone(tmp_path: Path, cache_dtype: str) -> None:
    write_random_model(tmp_path, TINY_MODELS["gemma3_text"], seed=5)

    def make_runner(node_id: str) -> TorchModelRunner:
        return load_runner(TorchSpec(tmp_path, block_size=BLOCK_SIZE, num_blocks=96, cache_dtype=cache_dtype))

    prompts = make_prompts(256)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
    alone = make_runner("alone")
    expected = run_all(
        make_engine(alone), [Request(key, RequestSpec(prompt, params)) for key, prompt in prompts.items()]
    )
    as_they_are = load_runner(TorchSpec(tmp_path, block_size=BLOCK_SIZE, num_blocks=96))
    # A head of 16 numbers takes 16 bytes and 2 for its scale, instead of 32 in bfloat16 or 64 in float32.
    numbers = as_they_are.layout.block_elements
    assert alone.layout.block_bytes == numbers * 18 // 16
    assert alone.model.numerics != as_they_are.model.numerics
    async with mini_cluster(make_runner, tmp_path, max_num_batched_tokens=CHUNK, max_num_seqs=8) as cluster:
        requests = [
            GenerateRequest(prompt, request_id=key, temperature=0.7, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
            for key, prompt in prompts.items()
        ]
        answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
        await cluster.wait_until_idle()
    for key, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected[key], key
        assert answer.end.path.prefill_node == "prefill-0"
        assert answer.end.kv_bytes % alone.layout.block_bytes == 0 < answer.end.kv_bytes


@pytest.mark.one_transport
@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [
        ("awq-int4", "int8"),
        ("fp8-block", "fp8"),
        ("gguf-mixed", "auto"),
    ],
)
async def test_quantised_weights_give_the_tokens_of_one_node_alone(tmp_path: Path, name: str, cache_dtype: str) -> None:
    """A format of each way in which weights come. Blocks don't show how they are stored: those of caches in 8
    bits move over both transports above.
    """
    if name in GGUF_FILES:
        write_gguf_model(tmp_path / "model", "llama", GGUF_FILES[name])
    else:
        write_quantized_model(tmp_path / "model", "llama", {**PACKED_FORMATS, **FP8_FORMATS}[name])

    def make_runner(node_id: str) -> TorchModelRunner:
        return load_runner(TorchSpec(tmp_path / "model", block_size=BLOCK_SIZE, num_blocks=96, cache_dtype=cache_dtype))

    prompts = make_prompts(256)
    temperatures = {key: 0.7 * (number % 2) for number, key in enumerate(prompts)}
    own = [
        Request(
            key,
            RequestSpec(
                prompt, SamplingParams(temperature=temperatures[key], seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
            ),
        )
        for key, prompt in prompts.items()
    ]
    expected = run_all(make_engine(make_runner("alone")), own)
    async with mini_cluster(make_runner, tmp_path / "model", max_num_batched_tokens=CHUNK, max_num_seqs=8) as cluster:
        requests = [
            GenerateRequest(
                prompt,
                request_id=key,
                temperature=temperatures[key],
                seed=3,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
            )
            for key, prompt in prompts.items()
        ]
        answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
        await cluster.wait_until_idle()
    for key, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected[key], key
        assert answer.end.path.prefill_node == "prefill-0"
        assert answer.end.kv_bytes > 0


@pytest.mark.parametrize(
    ("transport", "name"), [("default", "mistral"), ("tcp", "gemma3_text")], indirect=["transport"]
)
async def test_blocks_behind_every_window_are_not_transferred(tmp_path: Path, name: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    runners: list[TorchModelRunner] = []

    def make_runner(node_id: str) -> TorchModelRunner:
        runners.append(load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96)))
        return runners[-1]

    prompt = [7 * position % 250 for position in range(150)]
    expected = generate_with_transformers(tmp_path, {"long": prompt})
    async with mini_cluster(make_runner, tmp_path, max_num_batched_tokens=CHUNK, max_num_seqs=8) as cluster:
        request = GenerateRequest(prompt, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        answer = await cluster.generate(request)
        await cluster.wait_until_idle()
    assert answer.token_ids == expected["long"]
    layout = runners[0].layout
    assert 16 in layout.windows
    # Ten stripes; the query at 149 sees 134 to 149 of a window, in the last two.
    num_blocks = sum(10 if window is None else 2 for window in layout.windows)
    assert answer.end.kv_bytes == num_blocks * layout.block_bytes
