"""Nodes in stages hand over to nodes divided in other ways: tokens are generate()'s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
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
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_token_exact import NEW_TOKENS, generate_with_transformers, make_engine, make_prompts, run_all
from tests.support.caller import TokenCount
from tests.support.load_with import load_with
from tests.support.mini_cluster import mini_cluster
from tests.support.tiny_models import TINY_MODELS


class Runners:
    """Makes the runner of each node, with the number of stages and the settings in `nodes`, and ends them."""

    def __init__(self, directory: Path, nodes: Mapping[str, tuple[int, Mapping[str, Any]]], stack: ExitStack) -> None:
        self.made: dict[str, TorchModelRunner] = {}
        self._directory = directory
        self._nodes = nodes
        self._stack = stack

    def __call__(self, node_id: str) -> TorchModelRunner:
        count, settings = self._nodes[node_id]
        more: dict[str, Any] = {"dtype": "float32", "num_blocks": 96, **settings}
        if count > 1:
            more |= {"pipeline_parallel": count, "stages": FakeStages(count, self._directory)}
        runner = load_with(self._directory, **more)
        self.made[node_id] = self._stack.enter_context(closing(runner))
        return runner

    def stages_of(self, node_id: str) -> FakeStages:
        stages = self.made[node_id]._leader
        assert isinstance(stages, FakeStages)
        return stages


@pytest.mark.parametrize(
    ("transport", "prefill", "decode", "name", "settings"),
    [
        ("tcp", 2, 1, "qwen3", {}),
        ("default", 1, 2, "gemma3_text", {}),
        ("default", 2, 3, "deepseek_v3", {}),
        ("tcp", 3, 2, "gpt_oss", {}),
        ("default", 2, 2, "llama", {"cache_dtype": "int8"}),
        ("tcp", 1, 2, "gemma3_text", {"block_size": 8}),
        ("default", 3, 2, "qwen3", {"block_size": 32}),
    ],
    indirect=["transport"],
    ids=str,
)
async def test_tokens_through_nodes_that_are_divided_in_different_ways(
    tmp_path: Path, prefill: int, decode: int, name: str, settings: Mapping[str, Any]
) -> None:
    """`settings` are of both nodes; the block size is that of the prefill node alone."""
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    prompts = make_prompts(256)
    of_decode = {key: value for key, value in settings.items() if key != "block_size"}
    with ExitStack() as stack:
        nodes = {"prefill-0": (prefill, settings), "decode-0": (decode, of_decode)}
        make_runner = Runners(tmp_path, nodes, stack)
        async with mini_cluster(make_runner, tmp_path, max_num_batched_tokens=32, max_num_seqs=8) as cluster:
            requests = [
                GenerateRequest(prompt, request_id=key, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
                for key, prompt in prompts.items()
            ]
            answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
            await cluster.wait_until_idle()
    if "cache_dtype" in settings:
        with closing(load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=96, **settings))) as alone:
            greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
            expected = run_all(
                make_engine(alone), [Request(key, RequestSpec(prompt, greedy)) for key, prompt in prompts.items()]
            )
    else:
        expected = generate_with_transformers(tmp_path, prompts)
    for key, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected[key], key
        path = answer.end.path
        assert (path.prefill_node, path.decode_node, path.attempts) == ("prefill-0", "decode-0", 1)
        assert answer.end.kv_bytes > 0


def by_the_leader(stages: FakeStages) -> None:
    stages.declare_lost("ended by a test")


def by_the_stage(stages: FakeStages) -> None:
    stages.workers[0].cut()


@pytest.mark.parametrize(
    ("transport", "lose"),
    [("tcp", by_the_leader), ("default", by_the_stage)],
    indirect=["transport"],
    ids=["by the leader", "by the stage"],
)
async def test_a_stream_goes_on_when_a_stage_is_lost(tmp_path: Path, lose: Callable[[FakeStages], None]) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    prompt = make_prompts(256)["prompt-33"]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=200, ignore_eos=True)
    alone = load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=96))
    expected = run_all(make_engine(alone), [Request("alone", RequestSpec(prompt, params))])["alone"]
    with ExitStack() as stack:
        nodes: Mapping[str, Any] = {"prefill-0": (2, {}), "decode-0": (2, {}), "decode-1": (3, {})}
        make_runner = Runners(tmp_path, nodes, stack)
        async with mini_cluster(make_runner, tmp_path, decode=2) as cluster:
            count = TokenCount()
            request = GenerateRequest(
                prompt, request_id="lost", temperature=1.0, seed=7, max_tokens=200, ignore_eos=True
            )
            answering = asyncio.create_task(cluster.generate(request, on_event=count))
            await count.wait_for_tokens(4)
            lost = next(name for name in ("decode-0", "decode-1") if cluster.nodes[name].num_blocks_in_use)
            lose(make_runner.stages_of(lost))
            answer = await answering
            other = next(name for name in ("decode-0", "decode-1") if name != lost)
            await cluster.wait_until_idle("prefill-0", other)
            del cluster.nodes[lost]
    assert answer.token_ids == expected
    assert answer.indices == list(range(len(expected)))
    assert (answer.end.path.attempts, answer.end.path.decode_node) == (2, other)
