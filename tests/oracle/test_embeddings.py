"""Embeddings equal transformers' last hidden state at length 1, with the same bits whatever else a step computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.node import Leg, Outcome
from baton.messages.sampling import SamplingParams
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.execution.embedding import embedding_of
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.testing.fake_clock import FakeClock
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 17, 70)
RNG = Random(3)
PROMPTS = {f"of-{length}": [RNG.randrange(256) for _ in range(length)] for length in LENGTHS}


def make_engine(runner: TorchModelRunner, budget: int = 256) -> EngineCore:
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        block_size=BLOCK_SIZE,
        windows=runner.layout.windows,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=runner.model.max_model_len,
    )
    return EngineCore(Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock()), runner)


def embed(engine: EngineCore, prompts: Mapping[str, Sequence[int]]) -> dict[str, bytes]:
    """Compute all embeddings at once, beside the engine's other requests."""
    for name, prompt in prompts.items():
        engine.add_request(Request(name, prompt, SamplingParams(), leg=Leg.EMBED))
    found: dict[str, bytes] = {}
    while len(found) < len(prompts):
        for output in (output for outputs in engine.step().values() for output in outputs.outputs):
            if output.request_id in prompts:
                assert (output.outcome, list(output.new_token_ids)) == (Outcome.STOP, []), output
                found[output.request_id] = output.embedding
    return found


def add_stream(engine: EngineCore) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    stream = Request("stream", PROMPTS["of-17"][::-1], params)
    engine.add_request(stream)
    return stream


def hidden_states(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The last hidden state of transformers' layers at the last token of each prompt, scaled to length 1."""
    from transformers import AutoModel

    # What transformers 5.17 would choose leaves soft caps out.
    model = AutoModel.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    found = {}
    with torch.inference_mode():
        for name, prompt in PROMPTS.items():
            row = model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
            found[name] = (row / row.norm()).numpy()
    return found


@pytest.mark.parametrize("name", TINY_MODELS)
def test_an_embedding_is_the_last_hidden_state_with_the_same_bits_in_any_batch(tmp_path: Path, name: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    runner = load_runner(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=128)
    together = embed(make_engine(runner), PROMPTS)
    for prompt, expected in hidden_states(tmp_path).items():
        vector = np.frombuffer(together[prompt], dtype="<f4")
        assert vector.shape == (runner.model.embedding_size,)
        np.testing.assert_allclose(vector, expected, rtol=0, atol=2e-5)
    alone: dict[str, bytes] = {}
    for prompt, tokens in PROMPTS.items():
        alone |= embed(make_engine(runner), {prompt: tokens})
    assert alone == together

    engine = make_engine(runner, budget=24)
    stream = add_stream(engine)
    assert embed(engine, PROMPTS) == together, "in chunks, beside a stream"
    assert not stream.is_finished
    assert embed(engine, PROMPTS) == together, "with a cached prefix"
    assert engine.make_stats().prefix_cache.num_hit_tokens["device"] >= 64


def test_streams_that_begin_in_a_step_with_embeddings_get_their_own_tokens(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    runner = load_runner(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=128)
    told: list[list[int]] = []
    for prompts in ({}, PROMPTS):
        engine = make_engine(runner)
        if prompts:
            engine.add_request(Request("before", PROMPTS["of-70"], SamplingParams(), leg=Leg.EMBED))
        stream = add_stream(engine)
        embed(engine, prompts)
        while engine.has_work():
            engine.step()
        told.append(stream.output_token_ids)
    assert told[0] == told[1]
    assert len(told[0]) == 60


@pytest.mark.parametrize(
    ("name", "dtype", "operations"),
    [("llama", "bfloat16", None), ("mixtral", "bfloat16", None), ("qwen3", "float32", TorchOperations(1))],
)
def test_embeddings_with_other_kernels_and_dtypes(
    tmp_path: Path, name: str, dtype: str, operations: TorchOperations | None
) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    runner = load_runner(tmp_path, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=128, operations=operations)
    together = embed(make_engine(runner), PROMPTS)
    assert embed(make_engine(runner, budget=24), PROMPTS) == together
    for prompt, expected in hidden_states(tmp_path).items():
        vector = np.frombuffer(together[prompt], dtype="<f4")
        assert float(vector @ vector) == pytest.approx(1, abs=1e-6)
        assert float(vector @ expected) > 0.99


def test_a_vector_has_length_1_and_finite_numbers() -> None:
    assert np.frombuffer(embedding_of(np.array([3, -4], dtype=np.float32)), "<f4").tolist() == pytest.approx(
        [0.6, -0.8]
    )
    assert embedding_of(np.zeros(2, dtype=np.float32)) == bytes(8)
    huge = embedding_of(np.full(4, 3e38, dtype=np.float32))
    assert np.frombuffer(huge, "<f4").tolist() == [0.5] * 4
    for bad in (np.nan, np.inf):
        with pytest.raises(ArithmeticError, match="non-finite"):
            embedding_of(np.array([1, bad], dtype=np.float32))
