"""Prompts with given rows through router, prefill node, NIXL and decode node, over both APIs and after a lost node."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from random import Random

import openai
import pytest

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest, PromptEmbeds
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_prompt_embeds import Prompt, generate_with_transformers, make_engine, prompts_of, run_all
from tests.support.caller import TokenCount
from tests.support.given_spans import random_rows, safetensors_of, span_of, with_placeholders
from tests.support.mini_cluster import BOTH_KINDS, mini_cluster
from tests.support.tiny_models import TINY_MODELS
from tests.unit.router.test_prompt_embeds_checks import BAD_FILES

pytestmark = pytest.mark.one_transport

LONG = 400
ALLOWED = {**BOTH_KINDS, "allow_prompt_embeds": "on"}


async def test_tokens_behind_rows_are_those_of_transformers_and_of_an_undisturbed_engine(tmp_path: Path) -> None:
    write_random_model(tmp_path, {**TINY_MODELS["llama"], "max_position_embeddings": 1024}, seed=5)

    def make_runner(node_id: str) -> TorchModelRunner:
        return load_runner(TorchSpec(tmp_path, dtype="float32", block_size=16, num_blocks=96))

    prompts = prompts_of(64)
    expected = generate_with_transformers(tmp_path, prompts)
    rows = random_rows(40, 64, seed=9)
    ids = [Random(1).randrange(256) for _ in range(60)]
    lost = Prompt(with_placeholders(ids, [span_of(rows, 10)]), [span_of(rows, 10)])
    params = SamplingParams(temperature=0.9, seed=8, max_tokens=LONG, repetition_penalty=1.2, ignore_eos=True)
    undisturbed = run_all(make_engine(make_runner("alone")), {"lost": lost}, params)["lost"][0]
    async with mini_cluster(
        make_runner, tmp_path, decode=2, router_settings=ALLOWED, max_num_batched_tokens=24
    ) as cluster:
        requests = [
            GenerateRequest(
                prompt.token_ids,
                request_id=name.replace(" ", "-"),
                prompt_embeds=[
                    PromptEmbeds(safetensors_of(random_rows(span.length, 64, seed=span.start)), span.start)
                    for span in prompt.spans
                ],
                temperature=0.0,
                max_tokens=10,
                ignore_eos=True,
            )
            for name, prompt in prompts.items()
        ]
        # Hostile files meanwhile: each is refused, and changes no token.
        hostile = [
            replace(requests[1], request_id="", prompt_embeds=[PromptEmbeds(bad)]) for bad, _ in BAD_FILES.values()
        ]
        refusing = asyncio.gather(*(cluster.generate(request) for request in hostile), return_exceptions=True)
        answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
        assert [type(one) for one in await refusing] == [InvalidRequest] * len(hostile)
        for name, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == expected[name][0], name
            assert (answer.end.path.prefill_node, answer.end.path.attempts) == ("prefill-0", 1)
        again = await cluster.generate(replace(requests[3], request_id="again"))
        assert again.token_ids == expected["soft prompt"][0]
        assert again.end.cached_tokens >= 32

        async with openai.AsyncOpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="any") as client:
            (card,) = (await client.models.list()).data
            assert card.model_extra is not None
            assert "prompt_embeds" in card.model_extra["capabilities"]
            # As examples of vLLM do it: the client always sends a prompt.
            given = {"prompt_embeds": base64.b64encode(safetensors_of(random_rows(23, 64, seed=0))).decode()}
            completion = await client.completions.create(
                model=card.id,
                prompt="",
                temperature=0,
                max_tokens=10,
                extra_body={**given, "ignore_eos": True, "return_token_ids": True},
            )
            assert completion.choices[0].model_extra is not None
            assert completion.choices[0].model_extra["token_ids"] == expected["rows alone"][0]
            assert completion.usage is not None
            assert completion.usage.prompt_tokens == 23

        count = TokenCount()
        request = GenerateRequest(
            ids,
            request_id="lost",
            prompt_embeds=[PromptEmbeds(safetensors_of(rows), 10)],
            temperature=0.9,
            seed=8,
            max_tokens=LONG,
            repetition_penalty=1.2,
            ignore_eos=True,
        )
        answering = asyncio.create_task(cluster.generate(request, on_event=count))
        await count.wait_for_tokens(4)
        (used,) = [name for name in ("decode-0", "decode-1") if cluster.nodes[name].node.scheduler.requests]
        await cluster.nodes[used].end()
        continued = await answering
        assert continued.token_ids == undisturbed
        assert (continued.end.path.attempts, continued.end.path.decode_node == used) == (2, False)
        await cluster.wait_until_idle(*(name for name in cluster.nodes if name != used))
