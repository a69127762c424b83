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
from baton.messages.pooling import EMBEDDING_KINDS, Pooling, PoolingParams
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.execution.pooling import Pooler
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 17, 70)
RNG = Random(3)
PROMPTS = {f"of-{length}": [RNG.randrange(256) for _ in range(length)] for length in LENGTHS}


def vector_of(row: npt.NDArray[np.float32]) -> bytes:
    pooler = Pooler(PoolingParams())
    pooler.take(4, row[np.newaxis])
    return pooler.vector()


def make_engine(runner: TorchModelRunner, budget: int = 256) -> EngineCore:
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        block_size=BLOCK_SIZE,
        windows=runner.layout.windows,
        keeps_states=runner.layout.keeps_states,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=runner.model.max_model_len,
    )
    return EngineCore(Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock()), runner)


def embed(
    engine: EngineCore, prompts: Mapping[str, Sequence[int]], pooling: Mapping[str, PoolingParams] | None = None
) -> dict[str, bytes]:
    """Compute all vectors at once, beside the engine's other requests; by default embeddings of last tokens."""
    for name, prompt in prompts.items():
        params = (pooling or {}).get(name)
        engine.scheduler.add_request(
            Request(name, RequestSpec(prompt, SamplingParams(), pooling=params), leg=Leg.EMBED)
        )
    found: dict[str, bytes] = {}
    while len(found) < len(prompts):
        for output in (output for outputs in engine.step().values() for output in outputs):
            if output.attempt.request_id in prompts:
                assert (output.outcome, list(output.new_token_ids)) == (Outcome.STOP, []), output
                found[output.attempt.request_id] = output.embedding
    return found


def add_stream(engine: EngineCore) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    stream = Request("stream", RequestSpec(PROMPTS["of-17"][::-1], params))
    engine.scheduler.add_request(stream)
    return stream


def hidden_states(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The last hidden states of transformers' layers at all tokens of each prompt: float32 [tokens, size]."""
    from transformers import AutoModel

    # What transformers 5.17 would choose leaves soft caps out.
    model = AutoModel.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return {
            name: model(input_ids=torch.tensor([prompt])).last_hidden_state[0].numpy()
            for name, prompt in PROMPTS.items()
        }


def pooled(rows: npt.NDArray[np.float32], params: PoolingParams) -> npt.NDArray[np.float64]:
    """The vector of a prompt's hidden states, computed plainly."""
    wide = rows.astype(np.float64)
    row = {Pooling.LAST: wide[-1], Pooling.CLS: wide[0], Pooling.MEAN: wide.mean(axis=0)}[params.kind]
    row = row[: params.dimensions or None]
    vector: npt.NDArray[np.float64] = row / np.linalg.norm(row) if params.normalize else row
    return vector


KINDS = [
    *(PoolingParams(kind, normalize) for kind in sorted(EMBEDDING_KINDS, key=str) for normalize in (True, False)),
    PoolingParams(Pooling.MEAN, dimensions=8),
    PoolingParams(Pooling.LAST, dimensions=8),
]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_an_embedding_is_the_last_hidden_state_with_the_same_bits_in_any_batch(tmp_path: Path, name: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=128))
    together = embed(make_engine(runner), PROMPTS)
    of_rows = hidden_states(tmp_path)
    for prompt, rows in of_rows.items():
        vector = np.frombuffer(together[prompt], dtype="<f4")
        assert vector.shape == (runner.model.embedding_size,)
        np.testing.assert_allclose(vector, pooled(rows, PoolingParams()), rtol=0, atol=1e-5)
    alone: dict[str, bytes] = {}
    for prompt, tokens in PROMPTS.items():
        alone |= embed(make_engine(runner), {prompt: tokens})
    assert alone == together

    engine = make_engine(runner, budget=24)
    stream = add_stream(engine)
    assert embed(engine, PROMPTS) == together, "in chunks, beside a stream"
    assert not stream.is_finished
    assert embed(engine, PROMPTS) == together, "with a cached prefix"
    assert engine.scheduler.make_stats().prefix_cache.num_hit_tokens["device"] >= 64

    prompts = {f"{number} {name}": prompt for number in range(len(KINDS)) for name, prompt in PROMPTS.items()}
    kinds = {f"{number} {name}": kind for number, kind in enumerate(KINDS) for name in PROMPTS}
    of_all = embed(engine, prompts, kinds)
    for name, params in kinds.items():
        expected = pooled(of_rows[name.partition(" ")[2]], params)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(np.frombuffer(of_all[name], dtype="<f4") / scale, expected / scale, atol=1e-5)
    assert embed(make_engine(runner, budget=2048), prompts, kinds) == of_all, "in large steps"
    assert embed(make_engine(runner, budget=17), prompts, kinds) == of_all, "in small ones"
    for name in (f"{number} of-17" for number in range(len(KINDS))):
        assert embed(make_engine(runner), {name: prompts[name]}, kinds) == {name: of_all[name]}, "alone"


def test_streams_that_begin_in_a_step_with_embeddings_get_their_own_tokens(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=128))
    told: list[list[int]] = []
    for prompts in ({}, PROMPTS):
        engine = make_engine(runner)
        if prompts:
            engine.scheduler.add_request(
                Request("before", RequestSpec(PROMPTS["of-70"], SamplingParams()), leg=Leg.EMBED)
            )
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
    runner = load_runner(TorchSpec(tmp_path, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=128), operations=operations)
    together = embed(make_engine(runner), PROMPTS)
    assert embed(make_engine(runner, budget=24), PROMPTS) == together
    means = dict.fromkeys(PROMPTS, PoolingParams(Pooling.MEAN))
    assert embed(make_engine(runner, budget=24), PROMPTS, means) == embed(make_engine(runner), PROMPTS, means)
    for prompt, expected in hidden_states(tmp_path).items():
        vector = np.frombuffer(together[prompt], dtype="<f4")
        assert float(vector @ vector) == pytest.approx(1, abs=1e-6)
        assert float(vector @ pooled(expected, PoolingParams())) > 0.99


def test_a_vector_has_length_1_and_finite_numbers() -> None:
    assert np.frombuffer(vector_of(np.array([3, -4], dtype=np.float32)), "<f4").tolist() == pytest.approx([0.6, -0.8])
    assert vector_of(np.zeros(2, dtype=np.float32)) == bytes(8)
    huge = vector_of(np.full(4, 3e38, dtype=np.float32))
    assert np.frombuffer(huge, "<f4").tolist() == [0.5] * 4
    for bad in (np.nan, np.inf):
        with pytest.raises(ArithmeticError, match="non-finite"):
            vector_of(np.array([1, bad], dtype=np.float32))
