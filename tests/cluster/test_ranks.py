"""Prefill and decode nodes of different numbers of ranks and stages: tokens are generate()'s."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from baton.messages.generation import GenerateRequest
from baton.messages.node_model import NodeShape
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_token_exact import NEW_TOKENS, generate_with_transformers, make_prompts
from tests.support.mini_cluster import mini_cluster
from tests.support.tiny_models import TINY_MODELS


class Runners:
    """Makes the runner of each node, of the shape in `shapes`, and ends them."""

    def __init__(self, directory: Path, shapes: Mapping[str, NodeShape], stack: ExitStack) -> None:
        self.made: dict[str, TorchModelRunner] = {}
        self._directory = directory
        self._shapes = shapes
        self._stack = stack

    def __call__(self, node_id: str) -> TorchModelRunner:
        shape = self._shapes[node_id]
        runner = load_runner(
            TorchSpec(
                self._directory, dtype="float32", num_blocks=96, tensor_parallel=shape.tp, pipeline_parallel=shape.pp
            ),
            start_ranks=FakeRankGroup,
            start_stages=FakeStages.start,
        )
        self.made[node_id] = self._stack.enter_context(closing(runner))
        return runner


@contextmanager
def runners(directory: Path, shapes: Mapping[str, NodeShape]) -> Iterator[Runners]:
    with ExitStack() as stack:
        yield Runners(directory, shapes, stack)


@pytest.mark.parametrize(
    ("transport", "prefill", "decode", "name"),
    [
        ("tcp", NodeShape(2), NodeShape(1), "gemma3_text"),
        ("default", NodeShape(4), NodeShape(2), "qwen3"),
        ("default", NodeShape(1), NodeShape(4), "gpt_oss"),
        ("tcp", NodeShape(1, 2), NodeShape(1), "mixtral"),
        ("default", NodeShape(2), NodeShape(1, 3), "deepseek_v3"),
        ("default", NodeShape(1, 2), NodeShape(2, 2), "llama"),
    ],
    indirect=["transport"],
    ids=str,
)
async def test_tokens_through_nodes_of_different_shapes(
    tmp_path: Path, prefill: NodeShape, decode: NodeShape, name: str
) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    prompts = make_prompts(256)
    expected = generate_with_transformers(tmp_path, prompts)
    with runners(tmp_path, {"prefill-0": prefill, "decode-0": decode}) as make_runner:
        async with mini_cluster(make_runner, tmp_path, max_num_batched_tokens=24, max_num_seqs=8) as cluster:
            requests = [
                GenerateRequest(prompt, request_id=key, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
                for key, prompt in prompts.items()
            ]
            answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
            await cluster.wait_until_idle()
    block_bytes = make_runner.made["decode-0"].layout.block_bytes
    for key, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected[key], key
        path = answer.end.path
        assert (path.prefill_node, path.decode_node, path.attempts) == ("prefill-0", "decode-0", 1)
        # As many bytes as between nodes of one size.
        assert answer.end.kv_bytes % block_bytes == 0 < answer.end.kv_bytes
