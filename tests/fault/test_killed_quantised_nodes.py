"""SIGKILL of nodes that serve a quantised model with KV in 8 bits: streams have the tokens of one engine alone.

The model is a GGUF file with all of its eight formats, and the nodes draft tokens, which the engine alone doesn't.
Other tests kill nodes at more moments, with a simulated model.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from baton.engine.request import Request
from baton.messages.generation import GenerateRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.speculation import SpeculationConfig
from baton.runner.loading import load_runner
from baton.runner.spec import TorchSpec
from tests.oracle.test_token_exact import make_engine, run_all
from tests.support.caller import TokenCount
from tests.support.gguf_models import VOCAB_SIZE
from tests.support.meant_models import mixed_formats, write_gguf_model
from tests.support.mini_cluster import random_prompt
from tests.support.process_cluster import ProcessCluster, process_cluster
from tests.support.requested_fault import RequestedFault

MAX_MODEL_LEN = 2048
FLAGS = (
    *("--prefill", "1", "--decode", "2", "--threads", "1", "--kv-cache-memory", "16MiB", "--kv-cache-dtype", "int8"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
)
SIZES = {"decode-dies": (100, 1200), "prefill-dies": (1900, 60)}
"""Tokens of prompt and output, by the id of the request."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantised") / "model"
    write_gguf_model(directory, "llama", mixed_formats, max_position_embeddings=MAX_MODEL_LEN)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """The tokens of both requests, computed by one engine in this process."""
    params = {
        name: SamplingParams(temperature=1.0, seed=7, max_tokens=max_tokens, ignore_eos=True)
        for name, (_, max_tokens) in SIZES.items()
    }
    engine = make_engine(load_runner(TorchSpec(model, num_blocks=256, cache_dtype="int8")))
    tokens = run_all(engine, [Request(name, RequestSpec(prompt(name), params[name])) for name in SIZES])
    assert all(len(set(found)) > 20 for found in tokens.values()), "a model that repeats one token would prove nothing"
    return tokens


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path, failpoints_dir: Path) -> Iterator[ProcessCluster]:
    drafts = SpeculationConfig("draft_model", num_speculative_tokens=4, model=str(model))
    place, environment = tmp_path_factory.mktemp("cluster") / "run", {"BATON_FAILPOINTS": str(failpoints_dir)}
    flags = (*FLAGS, "--speculative-config", drafts.to_json())
    with process_cluster(place, model, *flags, environment=environment) as running:
        yield running


def prompt(name: str) -> list[int]:
    return random_prompt(Random(name), SIZES[name][0], VOCAB_SIZE)


def request(name: str) -> GenerateRequest:
    return GenerateRequest(
        prompt(name), request_id=name, temperature=1.0, seed=7, max_tokens=SIZES[name][1], ignore_eos=True
    )


async def test_killed_nodes_change_no_token(
    cluster: ProcessCluster, expected: dict[str, list[int]], failpoints_dir: Path
) -> None:
    """First a decode node in mid-stream, then, before it is replaced or after, the prefill node.

    That one dies when it has computed the prompt, and before it can say that all blocks are there.
    """
    async with cluster.session() as session:
        count = TokenCount()
        answering = asyncio.create_task(session.generate(request("decode-dies"), on_event=count))
        await count.wait_for_tokens(4)
        decode = await session.wait_for_event("decode", "kv_arrived", "decode-dies")
        session.cluster.signal(decode, signal.SIGKILL)
        answer = await answering
        assert answer.token_ids == expected["decode-dies"]
        assert answer.indices == list(range(len(answer.token_ids)))
        assert answer.end.path.attempts == 2
        assert answer.end.path.decode_node != decode

        with RequestedFault(failpoints_dir, "closing-offer", "kill prefill-dies") as fault:
            answer = await session.generate(request("prefill-dies"))
            assert fault.has_struck()
        assert answer.token_ids == expected["prefill-dies"]
        assert answer.end.path.attempts == 2
        assert answer.end.path.prefill_node == "", "the decode node computed alone"
