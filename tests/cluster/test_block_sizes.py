"""Prefill and decode nodes whose KV blocks have different sizes hand over, and tokens are those of one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

import pytest

from baton.engine.request import Request
from baton.messages.generation import GenerateRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import TorchSpec
from kv_transfer.backends.nixl import NixlBackend
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
from tests.oracle.test_token_exact import NEW_TOKENS, generate_with_transformers, make_engine, make_prompts, run_all
from tests.support.caller import Answer
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_tokens
from tests.support.step_gate import StepGate
from tests.support.tiny_models import TINY_MODELS

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def greedy(prompt: list[int], key: str, max_tokens: int = GREEDY.max_tokens) -> GenerateRequest:
    return GenerateRequest(prompt, request_id=key, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def answers_of_pair(
    directory: Path,
    sizes: Mapping[str, int],
    prompts: Mapping[str, list[int]],
    cache_dtype: str = "auto",
    *,
    in_turn: bool = False,
) -> dict[str, list[int]]:
    """Each prompt's tokens through a pair of nodes with these block sizes. All must be handed over at once.

    `in_turn`: each prompt is sent when the one before is answered.
    """
    made: dict[str, TorchModelRunner] = {}
    with ExitStack() as stack:

        def make_runner(node_id: str) -> TorchModelRunner:
            size = sizes[node_id]
            runner = load_runner(
                TorchSpec(directory, dtype="float32", block_size=size, num_blocks=1536 // size, cache_dtype=cache_dtype)
            )
            made[node_id] = stack.enter_context(closing(runner))
            return runner

        async with mini_cluster(make_runner, directory, max_num_batched_tokens=24, max_num_seqs=8) as cluster:
            answers: dict[str, Answer] = {}
            for some in [{key: prompt} for key, prompt in prompts.items()] if in_turn else [prompts]:
                asked = [cluster.generate(greedy(prompt, key, NEW_TOKENS)) for key, prompt in some.items()]
                answers.update(zip(some, await asyncio.gather(*asked), strict=True))
            await cluster.wait_until_idle()
    sub_block_bytes = min(runner.layout.block_bytes for runner in made.values())
    for key, answer in answers.items():
        path = answer.end.path
        assert (path.prefill_node, path.decode_node, path.attempts) == ("prefill-0", "decode-0", 1), key
        assert answer.end.kv_bytes % sub_block_bytes == 0 < answer.end.kv_bytes
    return {key: list(answer.token_ids) for key, answer in answers.items()}


@pytest.mark.parametrize(
    ("transport", "prefill", "decode", "name"),
    [
        ("tcp", 16, 32, "llama"),
        ("default", 32, 16, "gemma3_text"),
        ("default", 4, 32, "gpt_oss"),
        ("tcp", 32, 4, "gpt_oss"),
        ("default", 16, 48, "deepseek_v3"),
    ],
    indirect=["transport"],
)
async def test_tokens_are_generates(tmp_path: Path, prefill: int, decode: int, name: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    prompts = make_prompts(256)
    expected = generate_with_transformers(tmp_path, prompts)
    sizes = {"prefill-0": prefill, "decode-0": decode}
    assert await answers_of_pair(tmp_path, sizes, prompts) == expected


@pytest.mark.parametrize(
    ("transport", "prefill", "decode", "dtype"),
    [("default", 16, 32, "int8"), ("tcp", 32, 16, "int8"), ("default", 32, 16, "fp8")],
    indirect=["transport"],
)
async def test_a_cache_in_8_bits_has_its_scales_at_their_places(
    tmp_path: Path, prefill: int, decode: int, dtype: str
) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen3"], seed=5)
    prompts = make_prompts(256)
    with closing(load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=96, cache_dtype=dtype))) as alone:
        requests = [
            Request(key, RequestSpec(prompt, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)))
            for key, prompt in prompts.items()
        ]
        expected = run_all(make_engine(alone), requests)
    sizes = {"prefill-0": prefill, "decode-0": decode}
    assert await answers_of_pair(tmp_path, sizes, prompts, dtype) == expected


def spec(block_size: int, **more: object) -> SimulatedSpec:
    return SimulatedSpec(
        num_blocks=4096 // block_size,
        vocab_size=256,
        max_model_len=1024,
        block_size=block_size,
        **more,  # type: ignore[arg-type]
    )


def simulated(sizes: Mapping[str, int]) -> Callable[[str], SimulatedRunner]:
    return lambda node_id: SimulatedRunner(spec(sizes[node_id.partition("-")[0]]))


async def events(cluster: MiniCluster, node_id: str, name: str, key: str) -> list[int]:
    return [e.value for e in await cluster.trace(node_id) if e.name == name and e.attempt.request_id == key]


@pytest.mark.one_transport
@pytest.mark.parametrize(("prefill", "decode"), [(16, 32), (32, 16), (32, 8)])
async def test_of_a_prefix_that_is_here_nothing_is_read(tmp_path: Path, prefill: int, decode: int) -> None:
    rng = Random(7)
    prefix = random_prompt(rng, 112, 256)
    prompts = {f"r{length}": prefix + random_prompt(rng, length, 256) for length in (1, 16, 50)}
    make_runner = simulated({"prefill": prefill, "decode": decode})
    async with mini_cluster(make_runner, tmp_path, token_ids_only=True, max_num_batched_tokens=64) as cluster:
        for number, (key, prompt) in enumerate(prompts.items()):
            answer = await cluster.generate(greedy(prompt, key))
            assert answer.token_ids == expected_tokens(prompt, GREEDY, spec(decode)), key
            assert answer.end.path.attempts == 1
            if number:
                # The hit ends where a block of the reader ends, which may be in the middle of one of the sender.
                here = len(prefix) // decode * decode
                step = min(prefill, decode)
                token_bytes = make_runner("decode-0").layout.block_bytes // decode
                assert answer.end.kv_bytes == -(-(len(prompt) - here) // step) * step * token_bytes
        await cluster.wait_until_idle()


@pytest.mark.parametrize(
    ("transport", "prefill", "decode", "name", "window"),
    [
        ("default", 4, 32, "gemma3_text", 16),
        ("tcp", 8, 32, "mistral", 24),
        ("default", 16, 32, "gemma3_text", 24),
        ("default", 32, 16, "gemma3_text", 24),
    ],
    indirect=["transport"],
)
async def test_a_hit_behind_a_block_that_a_window_cuts_reads_nothing_old(
    tmp_path: Path, prefill: int, decode: int, name: str, window: int
) -> None:
    """The block of which only the end was read serves no prompt that ends before it: it holds what was there before."""
    write_random_model(tmp_path, {**TINY_MODELS[name], "sliding_window": window}, seed=5)
    rng, prompts = Random(3), {}
    for number in range(3):
        prompts[f"first{number}"] = random_prompt(rng, 108, 256)
        prompts[f"again{number}"] = prompts[f"first{number}"][:96] + random_prompt(rng, 4, 256)
    sizes = {"prefill-0": prefill, "decode-0": decode}
    expected = generate_with_transformers(tmp_path, prompts)
    assert await answers_of_pair(tmp_path, sizes, prompts, in_turn=True) == expected


@pytest.mark.parametrize(
    ("transport", "prefill", "decode"), [("default", 16, 32), ("tcp", 32, 16)], indirect=["transport"]
)
async def test_blocks_are_read_while_the_rest_is_computed(tmp_path: Path, prefill: int, decode: int) -> None:
    chunk, num_chunks = 80, 6
    gate = StepGate(allowed=num_chunks - 1)

    def make_runner(node_id: str) -> SimulatedRunner:
        if node_id.startswith("decode"):
            return SimulatedRunner(spec(decode))
        return SimulatedRunner(spec(prefill, step_time=StepTime(1.0), sleep=gate))

    prompt = random_prompt(Random(3), chunk * num_chunks - 5, 256)
    async with mini_cluster(make_runner, tmp_path, token_ids_only=True, max_num_batched_tokens=chunk) as cluster:
        answering = asyncio.create_task(cluster.generate(greedy(prompt, "r")))
        # The last chunk's step stands at the gate. Progress counts blocks of the sender.
        whole = (num_chunks - 1) * chunk // prefill
        while max(await events(cluster, "prefill-0", "read_progress", "r"), default=0) < whole:
            pass
        gate.allow(None)
        answer = await answering
        await cluster.wait_until_idle()
    assert answer.token_ids == expected_tokens(prompt, GREEDY, spec(decode))
    step = min(prefill, decode)
    token_bytes = SimulatedRunner(spec(decode)).layout.block_bytes // decode
    assert answer.end.kv_bytes == -(-len(prompt) // step) * step * token_bytes


@pytest.mark.parametrize(
    ("transport", "prefill", "decode"), [("tcp", 16, 32), ("default", 32, 16)], indirect=["transport"]
)
async def test_wrong_bytes_are_noticed(
    tmp_path: Path, prefill: int, decode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {f"r{number}": random_prompt(Random(number), 40 + number, 256) for number in range(6)}
    backends: list[FaultyTransferBackend] = []

    def faulty(incarnation: str, memory: object) -> FaultyTransferBackend:
        backends.append(FaultyTransferBackend(NixlBackend(incarnation, memory), Faults(seed=1, corrupt=1.0)))  # type: ignore[arg-type]
        return backends[-1]

    faulty.name = NixlBackend.name  # type: ignore[attr-defined]
    monkeypatch.setattr("decode_node.app.NixlBackend", faulty)
    make_runner = simulated({"prefill": prefill, "decode": decode})
    async with mini_cluster(make_runner, tmp_path, token_ids_only=True, on_transfer_failure="recompute") as cluster:
        for key, prompt in prompts.items():
            answer = await cluster.generate(greedy(prompt, key))
            assert answer.token_ids == expected_tokens(prompt, GREEDY, spec(decode)), key
            lost = [
                e.detail
                for e in await cluster.trace("decode-0")
                if e.attempt.request_id == key and e.name == "kv_failed"
            ]
            assert lost == ["digest_mismatch"]
        await cluster.wait_until_idle()
    assert backends[0].counters["corrupt"] >= len(prompts)


@pytest.mark.one_transport
async def test_sizes_that_dont_fit_make_no_pair(tmp_path: Path) -> None:
    prompts = {f"r{number}": random_prompt(Random(number), 60, 256) for number in range(8)}
    sizes = {"prefill-0": 16, "prefill-1": 48, "decode-0": 24, "decode-1": 32}

    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(spec(sizes[node_id]))

    async with mini_cluster(make_runner, tmp_path, prefill=2, decode=2, token_ids_only=True) as cluster:
        answers = await asyncio.gather(*(cluster.generate(greedy(prompt, key)) for key, prompt in prompts.items()))
        await cluster.wait_until_idle()
    for prompt, answer in zip(prompts.values(), answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, GREEDY, spec(16))
    pairs = {(answer.end.path.prefill_node, answer.end.path.decode_node) for answer in answers}
    assert pairs == {("prefill-0", "decode-1"), ("prefill-1", "decode-0")}
