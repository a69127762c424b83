"""Several sequences of one request through router, prefill and decode node: each has the tokens that it has alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.engine.sequences.sequence_group import sequence_seed
from baton.messages.generation import Chunk, GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import TorchSpec
from tests.cluster.test_sampled import alone
from tests.support.caller import Answer
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_tokens
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.one_transport

BLOCK_SIZE = 16
NEW_TOKENS = 12
LENGTHS = (1, 15, 16, 17, 40, 64)
SPEC = SimulatedSpec(num_blocks=64, vocab_size=256, max_model_len=512)


def torch_runner(model_dir: Path) -> Callable[[str], TorchModelRunner]:
    return lambda node_id: load_runner(TorchSpec(model_dir, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))


def sequences(answer: Answer, count: int) -> list[list[int]]:
    for index in range(count):
        own = answer.sequence(index)
        assert own.indices == list(range(len(own.token_ids)))
    return [answer.sequence(index).token_ids for index in range(count)]


async def computed_prompts(cluster: MiniCluster, request_id: str) -> list[int]:
    """How many prompt tokens each chunk of the prefill node reached."""
    events = await cluster.trace("prefill-0")
    return [e.value for e in events if e.name == "chunk_computed" and e.attempt.request_id == request_id]


async def test_each_sampled_sequence_has_the_tokens_that_it_has_alone(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=9, dtype="float32")
    make_runner = torch_runner(tmp_path)
    rng = Random(4)
    prompts = [random_prompt(rng, length, 256) for length in LENGTHS]
    how = {"temperature": 0.9, "top_p": 0.95, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    params = [SamplingParams(seed=sequence_seed(50, i), **how) for i in range(4)]  # type: ignore[arg-type]
    expected = [alone(make_runner("alone"), [prompt] * 4, params) for prompt in prompts]
    async with mini_cluster(make_runner, tmp_path, max_num_batched_tokens=32, max_num_seqs=8) as cluster:
        requests = [
            GenerateRequest(prompt, request_id=f"r{i}", seed=50, n=4, **how)  # type: ignore[arg-type]
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
        single = await cluster.generate(GenerateRequest(prompts[-1], seed=50, **how))  # type: ignore[arg-type]
        await cluster.wait_until_idle()
    assert [sequences(answer, 4) for answer in answers] == expected
    assert len({tuple(tokens) for tokens in expected[-1]}) == 4
    assert single.token_ids == expected[-1][0], "sequence 0 is the request without the others"
    for answer, prompt in zip(answers, prompts, strict=True):
        assert (answer.end.prompt_tokens, answer.end.completion_tokens) == (len(prompt), 4 * NEW_TOKENS)
        assert sorted(answer.ends) == [0, 1, 2, 3]
        assert answer.end.path.prefill_node == "prefill-0"
        assert answer.end.kv_bytes > 0


async def test_greedy_sequences_are_equal_and_their_logprobs_too(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=9, dtype="float32")
    prompt = random_prompt(Random(1), 21, 256)
    request = GenerateRequest(prompt, temperature=0.0, n=4, logprobs=2, max_tokens=NEW_TOKENS, ignore_eos=True)
    async with mini_cluster(torch_runner(tmp_path), tmp_path) as cluster:
        answer = await cluster.generate(request)
        await cluster.wait_until_idle()
    assert len({tuple(tokens) for tokens in sequences(answer, 4)}) == 1
    assert len(answer.token_ids) == NEW_TOKENS
    for index in range(4):
        assert answer.sequence(index).logprobs == answer.logprobs, "the same bits, whoever computed them"
    assert len(answer.logprobs) == NEW_TOKENS


async def test_the_best_of_many_has_the_largest_logprob(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=9, dtype="float32")
    prompt = random_prompt(Random(1), 21, 256)
    chunks: list[Chunk] = []
    async with mini_cluster(torch_runner(tmp_path), tmp_path) as cluster:
        ask = {"temperature": 1.0, "seed": 11, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        every = await cluster.generate(GenerateRequest(prompt, n=6, logprobs=0, **ask))  # type: ignore[arg-type]
        best = await cluster.generate(
            GenerateRequest(prompt, n=2, best_of=6, **ask),  # type: ignore[arg-type]
            on_event=lambda event: chunks.append(event) if isinstance(event, Chunk) else None,
        )
        await cluster.wait_until_idle()
    scores = [sum(position.logprob for position in every.sequence(index).logprobs) for index in range(6)]
    order = sorted(range(6), key=lambda index: -scores[index])
    assert order[:2] != [0, 1], "the choice must matter"
    assert sequences(best, 2) == [every.sequence(index).token_ids for index in order[:2]]
    # At once, but for text that was held back to the end.
    assert [chunk.sequence_index for chunk in chunks if chunk.token_ids] == [0, 1]
    assert best.end.completion_tokens == 6 * NEW_TOKENS


async def test_the_prompt_is_computed_and_pulled_once(tmp_path: Path) -> None:
    prompt = random_prompt(Random(1), 70, 256)
    async with mini_cluster(
        lambda node_id: SimulatedRunner(SPEC), tmp_path, token_ids_only=True, max_num_batched_tokens=32
    ) as cluster:
        request = GenerateRequest(prompt, request_id="once", seed=5, n=8, max_tokens=9)
        answer = await cluster.generate(request)
        single = await cluster.generate(GenerateRequest(prompt, request_id="lone", seed=5, max_tokens=9))
        assert await computed_prompts(cluster, "once") == [32, 64, 70]
        on_decode = [e for e in await cluster.trace("decode-0") if e.attempt.request_id == "once"]
        assert [e.name for e in on_decode].count("read_done") >= 1
        computed = [e.value for e in on_decode if e.name == "chunk_computed"]
        assert set(computed) <= {70}, "only the last prompt token is computed again"
        await cluster.wait_until_idle()
    for index in range(8):
        params = SamplingParams(seed=sequence_seed(5, index), max_tokens=9)
        assert answer.sequence(index).token_ids == expected_tokens(prompt, params, SPEC)
    assert single.token_ids == answer.token_ids


async def test_the_other_sequences_continue_when_sequence_0_ends_with_its_first_token(tmp_path: Path) -> None:
    prompt = random_prompt(Random(2), 40, 256)
    first = expected_tokens(prompt, SamplingParams(seed=5, max_tokens=1), SPEC)
    async with mini_cluster(lambda node_id: SimulatedRunner(SPEC), tmp_path, token_ids_only=True) as cluster:
        request = GenerateRequest(prompt, seed=5, n=3, max_tokens=6, stop_token_ids=first)
        answer = await cluster.generate(request)
        one_token = await cluster.generate(GenerateRequest(prompt, seed=5, n=3, max_tokens=1))
        await cluster.wait_until_idle()
    assert answer.token_ids == first
    assert (answer.ends[0].finish_reason, answer.ends[0].stop_reason) == ("stop", first[0])
    for index in (1, 2):
        params = SamplingParams(seed=sequence_seed(5, index), max_tokens=6, stop_token_ids=frozenset(first))
        expected = expected_tokens(prompt, params, SPEC)
        assert answer.sequence(index).token_ids == expected
        assert one_token.sequence(index).token_ids == expected[:1]


@pytest.mark.parametrize("num_blocks", [12, 20])
async def test_sequences_that_do_not_fit_together_are_preempted_and_keep_their_tokens(
    tmp_path: Path, num_blocks: int
) -> None:
    spec = SimulatedSpec(num_blocks=num_blocks, vocab_size=256, max_model_len=512)
    prompt = random_prompt(Random(3), 50, 256)
    async with mini_cluster(lambda node_id: SimulatedRunner(spec), tmp_path, token_ids_only=True) as cluster:
        answer = await cluster.generate(GenerateRequest(prompt, seed=5, n=5, max_tokens=70))
        assert "preempted" in [event.name for event in await cluster.trace("decode-0")]
        await cluster.wait_until_idle()
    for index in range(5):
        params = SamplingParams(seed=sequence_seed(5, index), max_tokens=70)
        assert answer.sequence(index).token_ids == expected_tokens(prompt, params, spec)


async def test_128_sequences_run_on_nodes_with_few_seats_and_delay_nobody_for_long(tmp_path: Path) -> None:
    prompt = random_prompt(Random(1), 40, 256)
    ended: list[str] = []
    async with mini_cluster(
        lambda node_id: SimulatedRunner(SPEC), tmp_path, token_ids_only=True, max_num_seqs=4
    ) as cluster:

        async def generate(name: str, **fields: Any) -> Answer:
            answer = await cluster.generate(GenerateRequest(prompt, request_id=name, seed=5, **fields))
            ended.append(name)
            return answer

        large, small = await asyncio.gather(generate("large", n=128, max_tokens=9), generate("small", max_tokens=9))
        computed = await computed_prompts(cluster, "large")
        await cluster.wait_until_idle()
    assert ended == ["small", "large"]
    assert computed == [40], "on the prefill node the prompt is computed once"
    for index in range(128):
        params = SamplingParams(seed=sequence_seed(5, index), max_tokens=9)
        assert large.sequence(index).token_ids == expected_tokens(prompt, params, SPEC)
    assert sorted(large.ends) == list(range(128))
    assert large.end.completion_tokens == 128 * 9
    assert small.token_ids == large.token_ids


async def test_a_client_that_leaves_ends_all_of_its_128_sequences(tmp_path: Path) -> None:
    prompt = random_prompt(Random(1), 40, 256)
    async with mini_cluster(
        lambda node_id: SimulatedRunner(SPEC), tmp_path, token_ids_only=True, max_num_seqs=4
    ) as cluster:
        first_tokens = asyncio.Event()
        request = GenerateRequest(prompt, seed=5, n=128, max_tokens=400)
        task = asyncio.create_task(cluster.generate(request, on_event=lambda event: first_tokens.set()))
        await first_tokens.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cluster.wait_until_idle()
        single = await cluster.generate(GenerateRequest(prompt, seed=5, max_tokens=9))
    assert single.token_ids == expected_tokens(prompt, SamplingParams(seed=5, max_tokens=9), SPEC)
