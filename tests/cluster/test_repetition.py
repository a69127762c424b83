"""A request with repetition detection gets its tokens and then an error, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.errors import RepetitiveOutput
from baton.messages.generation import Accepted, Chunk, GenerateRequest
from baton.messages.sampling import RepetitionDetection
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.support.mini_cluster import mini_cluster
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.one_transport

ALWAYS = {7: 100.0}
PROMPT = [1, 2, 3, 4, 5]


def post(address: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers.items()), json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_repetitive_output_ends_with_an_error_after_its_tokens(tmp_path: Path, n: int) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 3)

    def runner(_: str) -> object:
        return load_runner(TorchSpec(tmp_path, dtype="float32", block_size=16, num_blocks=64))

    async with mini_cluster(runner, tmp_path, token_ids_only=True) as cluster:  # type: ignore[arg-type]
        token_ids: list[int] = []

        def record_tokens(event: Accepted | Chunk) -> None:
            if isinstance(event, Chunk) and event.sequence_index == 0:
                token_ids.extend(event.token_ids)

        rule = RepetitionDetection(4, min_count=6)
        request = GenerateRequest(
            PROMPT, logit_bias=ALWAYS, max_tokens=20, n=n, ignore_eos=True, repetition_detection=rule
        )
        with pytest.raises(RepetitiveOutput, match="its last token came 6 times in a row") as ended:
            await cluster.generate(request, on_event=record_tokens)
        assert token_ids == [7] * 6
        assert ended.value.tokens_sent is not None
        free = GenerateRequest(PROMPT, logit_bias=ALWAYS, max_tokens=20, ignore_eos=True)
        assert (await cluster.generate(free)).token_ids == [7] * 20

        body = {
            "prompt": PROMPT,
            "max_tokens": 20,
            "ignore_eos": True,
            "logit_bias": {"7": 100},
            "repetition_detection": {"max_pattern_size": 4, "min_count": 6},
        }
        status, headers, refused = await asyncio.to_thread(post, cluster.router.http, body)
        assert (status, headers["x-should-retry"]) == (500, "false")
        assert "repeats itself" in refused["error"]["message"]
        status, _, refused = await asyncio.to_thread(
            post, cluster.router.http, body | {"repetition_detection": {"max_pattern_size": 400}}
        )
        assert (status, refused["error"]["param"]) == (400, "repetition_detection")
        await cluster.wait_until_idle()
