"""An encoder's cluster: vectors and scores have the bits of the model alone, also after a node was lost."""

from __future__ import annotations

import asyncio
import struct
import threading
from pathlib import Path
from random import Random

import pytest

from baton.client import AsyncGenerationClient, EmbedInput, EmbedRequest, EmbedTask
from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.pooling import Pooling, PoolingParams
from baton.runner.text_encoder.encoder_runner import EncoderRunner
from baton.text.tokenizer import Tokenizer
from tests.oracle.test_encoders import load, vectors
from tests.support.mini_cluster import mini_cluster
from tests.support.tiny_encoders import write_encoder, write_pair_tokenizer

pytestmark = pytest.mark.one_transport

LONG_S = 30.0


async def test_vectors_and_scores_survive_a_lost_node(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert", num_labels=1)
    write_pair_tokenizer(tmp_path)
    begun = threading.Event()

    def make_runner(node_id: str) -> EncoderRunner:
        runner = load(tmp_path)
        if node_id == "prefill-0":
            execute = runner.execute_model

            def watched(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
                if scheduler_output.total_num_scheduled_tokens:
                    begun.set()
                return execute(scheduler_output)

            runner.execute_model = watched  # type: ignore[method-assign]
        return runner

    rng = Random(2)
    texts = {str(place): [rng.randrange(2, 256) for _ in range(rng.randint(1, 80))] for place in range(200)}
    alone, mean = load(tmp_path), PoolingParams(Pooling.MEAN)
    expected = vectors(alone, texts, dict.fromkeys(texts, mean))
    tokenizer = Tokenizer.load(tmp_path)
    pairs = [("a query", "one text"), ("a query", "another"), ("x", "y")]
    ids = {
        first + second: tokenizer.with_special_tokens(*tokenizer.encode_all([first, second])) for first, second in pairs
    }
    scores = vectors(
        alone,
        {name: tokens for name, (tokens, _) in ids.items()},
        {name: PoolingParams(Pooling.CLASSIFY, second_start=second) for name, (_, second) in ids.items()},
    )
    async with mini_cluster(make_runner, tmp_path, prefill=2, decode=0) as cluster:
        async with AsyncGenerationClient(cluster.router.grpc) as client:
            call = EmbedRequest([EmbedInput(text) for text in texts.values()], pooling=Pooling.MEAN)
            embedding = asyncio.create_task(client.embed(call))
            assert await asyncio.to_thread(begun.wait, LONG_S)
            await cluster.nodes["prefill-0"].end()
            found = [struct.pack(f"<{len(one.values)}f", *one.values) for one in (await embedding).results]
            assert found == list(expected.values())
            scored = await client.embed(EmbedRequest([EmbedInput(*pair) for pair in pairs], EmbedTask.SCORE))
            assert [struct.pack("<f", *one.values) for one in scored.results] == list(scores.values())
            with pytest.raises(InvalidRequest, match="is an encoder, which generates nothing"):
                await cluster.generate(GenerateRequest("a"))
        await cluster.wait_until_idle("prefill-1")
