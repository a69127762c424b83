"""On a GPU: a model in stages gives the bits of one process. All stages are on one GPU here, as they would be on many.

Each stage before the last is a process of its own, with its own part of the KV cache.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.request import Request
from baton.engine.runner import RunnerLost
from baton.errors import ConfigError
from baton.messages.generation import GenerateRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.execution.step_thread import StepThread
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.runner.stages.stage_leader import StageLeader
from baton.runner.stages.stages_here import start_on
from tests.oracle.test_ranks_exact import Run, compute
from tests.oracle.test_token_exact import make_engine, make_prompts, run_all
from tests.support.load_with import load_with
from tests.support.mini_cluster import mini_cluster
from tests.support.tiny_models import TINY_MODELS

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]


def start_on_one_gpu(spec: TorchSpec, first_device: torch.device) -> StageLeader:
    return start_on([str(first_device)] * (spec.pipeline_parallel - 1), spec)


@contextmanager
def on_gpu(directory: Path, count: int, **settings: Any) -> Iterator[TorchModelRunner]:
    made: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "device": DEVICE, "start_stages": start_on_one_gpu}
    runner = load_with(directory, pipeline_parallel=count, **made | settings)
    try:
        yield runner
    finally:
        runner.close()


def run_of(runner: TorchModelRunner, *, ahead: bool) -> Run:
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=24, repetition_penalty=1.1)
    return compute(runner, sampling, StepThread() if ahead else None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3", "gpt2"])
def test_stages_on_a_gpu_give_the_bits_of_one_process(tmp_path: Path, name: str, dtype: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    with on_gpu(tmp_path, 1, dtype=dtype) as alone:
        expected = run_of(alone, ahead=False)
        numerics, layout = alone.model.numerics, alone.layout
        num_replays = 0 if alone._transformer.decode_graphs is None else alone._transformer.decode_graphs.num_replays
    with on_gpu(tmp_path, 2, dtype=dtype) as divided:
        computed = run_of(divided, ahead=False)
        assert computed.tokens == expected.tokens
        assert np.array_equal(np.concatenate(computed.logits), np.concatenate(expected.logits))
        assert (divided.model.numerics, divided.layout) == (numerics, layout)
        assert divided.model.bit_exact
        assert divided.memory.kind == "VRAM"
        graphs = divided._transformer.decode_graphs
        # The last stage's decode steps are graphs where the whole model's are.
        assert (graphs is not None and graphs.num_replays > 0) == (num_replays > 0)
        assert run_of(divided, ahead=True).tokens == expected.tokens


@pytest.mark.parametrize(
    ("prefill", "decode", "name"), [(2, 1, "qwen3"), (1, 2, "gemma3_text"), (2, 3, "deepseek_v3")], ids=str
)
async def test_stages_on_a_gpu_hand_over(tmp_path: Path, prefill: int, decode: int, name: str) -> None:
    """Each stage's process reads and is read with its own agent, from GPU memory to GPU memory."""
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    prompts = make_prompts(256)
    with on_gpu(tmp_path, 1, dtype="float32") as alone:
        greedy = SamplingParams(temperature=0.0, max_tokens=24)
        expected = run_all(
            make_engine(alone), [Request(key, RequestSpec(prompt, greedy)) for key, prompt in prompts.items()]
        )
    with ExitStack() as stack:

        def make_runner(node_id: str) -> TorchModelRunner:
            count = prefill if node_id.startswith("prefill") else decode
            return stack.enter_context(on_gpu(tmp_path, count, dtype="float32", num_blocks=96))

        limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "kv_digests": "on"}
        async with mini_cluster(make_runner, tmp_path, **limits) as cluster:  # type: ignore[arg-type]
            requests = [
                GenerateRequest(prompt, request_id=key, temperature=0.0, max_tokens=24, ignore_eos=True)
                for key, prompt in prompts.items()
            ]
            answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
            await cluster.wait_until_idle()
    for key, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected[key], key
        path = answer.end.path
        assert (path.prefill_node, path.decode_node, path.attempts) == ("prefill-0", "decode-0", 1)


def test_a_stage_on_a_gpu_that_is_killed_is_noticed(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    with on_gpu(tmp_path, 2, dtype="float32") as runner:
        engine = make_engine(runner)
        engine.scheduler.add_request(
            Request("first", RequestSpec([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
        )
        engine.step()
        os.kill(runner.rank_reports()[1].pid, signal.SIGKILL)
        engine.scheduler.add_request(
            Request("later", RequestSpec([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
        )
        with pytest.raises(RunnerLost, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
            engine.step()


def test_more_stages_than_gpus_are_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    there = torch.cuda.device_count()
    if there < 3:  # the model has three layers
        with pytest.raises(ConfigError, match=f"3 stages need 3 GPUs from cuda:0 on, and this machine has {there}"):
            load_runner(TorchSpec(tmp_path, num_blocks=64, device=DEVICE, pipeline_parallel=3))
