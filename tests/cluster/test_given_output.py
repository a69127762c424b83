"""An attempt that continues the output of an earlier one samples the same tokens, bit for bit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import baton
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, Outcome, RequestDelta, StepReport, Submit
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from baton.text.constraints.structural_tags import lark_of_structural_tag
from baton.wire.clients.node_client import NodeClient
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt
from tests.support.reports import QueuedReports
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.one_transport

BLOCK_SIZE = 16
NEW_TOKENS = 24
SPLITS = (1, 7, 23)
"""The first attempt is lost after so many tokens. Prompt and output end inside blocks and at their ends."""
LENGTHS = (9, 25, 40)

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=2),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=11, logprobs=1),
    "penalised": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, seed=12
    ),
    "biased": SamplingParams(temperature=1.0, seed=13, min_tokens=12, logit_bias={5: 3.0, 17: -4.0}, logprobs=0),
    "ruled": SamplingParams(
        temperature=1.0,
        seed=14,
        allowed_token_ids=tuple(range(3, 40)),
        bad_words_token_ids=((7,), *((first, second) for first in range(3, 40) for second in (8, 9, 10, 11))),
        logprobs=1,
    ),
}


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[a-z ]{5,9}"}, "end": "</a>"},
            {"type": "triggered_tags", "triggers": [" "], "tags": [{"begin": " ", "content": {"type": "json_schema",
             "json_schema": {"type": "array", "items": {"type": "integer"}}}, "end": "."}]},
        ],
    },
}  # fmt: skip


class Legs:
    """Plays the router: submits legs and reads their reports."""

    def __init__(self, cluster: MiniCluster, prefill: QueuedReports, decode: QueuedReports) -> None:
        self._source = cluster.nodes["prefill-0"].description.as_peer
        self._prefill, self._decode = prefill, decode
        self._reports = {stream: aiter(stream) for stream in (prefill, decode)}
        self._flight = 0

    async def whole(self, prompt: Sequence[int], params: SamplingParams, given: Sequence[int] = ()) -> Output:
        """Run the whole request on the decode node."""
        self._flight += 1
        key = AttemptKey("whole", 1, self._flight)
        self._decode.send(Submit(key, Leg.WHOLE, RequestSpec(prompt, params), output_token_ids=given))
        return Output(await self._until_end(self._decode, key))

    async def pair(self, prompt: Sequence[int], params: SamplingParams, given: Sequence[int]) -> tuple[Output, Output]:
        """Run a prefill and a decode leg; return the output of both."""
        self._flight += 1
        key = AttemptKey("pair", 2, self._flight)
        self._prefill.send(Submit(key, Leg.PREFILL, RequestSpec(prompt, params), output_token_ids=given))
        decode = Submit(key, Leg.DECODE, RequestSpec(prompt, params), kv_source=self._source, output_token_ids=given)
        self._decode.send(decode)
        return Output(await self._until_end(self._prefill, key)), Output(await self._until_end(self._decode, key))

    async def _until_end(self, stream: QueuedReports, key: AttemptKey) -> list[RequestDelta]:
        deltas: list[RequestDelta] = []
        while not deltas or deltas[-1].outcome is None:
            report: StepReport = await anext(self._reports[stream])
            deltas += [delta for delta in report.deltas if delta.attempt == key]
        return deltas


class Output:
    """The output of one leg."""

    def __init__(self, deltas: Sequence[RequestDelta]) -> None:
        assert not deltas[-1].error, deltas[-1].error
        with_tokens = [delta for delta in deltas if delta.token_ids]
        self.first_index = with_tokens[0].first_index
        self.tokens = [token for delta in with_tokens for token in delta.token_ids]
        self.logprobs: list[TokenLogprobs] = [position for delta in with_tokens for position in delta.logprobs]
        self.outcome = deltas[-1].outcome
        self.timings = deltas[-1].timings


@pytest.fixture(params=["float32", "bfloat16"])
async def legs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Legs]:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], seed=9, dtype=request.param)
    async with legs_of(tmp_path, request.param) as legs:
        yield legs


@asynccontextmanager
async def legs_of(model: Path, dtype: str) -> AsyncIterator[Legs]:
    async with mini_cluster(
        lambda node_id: load_runner(TorchSpec(model, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=96)),
        model,
        max_num_batched_tokens=32,
    ) as cluster:
        clients = [NodeClient(cluster.nodes[name].description.address) for name in ("prefill-0", "decode-0")]
        yield Legs(cluster, *[QueuedReports(await client.attach("by-hand")) for client in clients])
        for client in clients:
            await client.close()
        await cluster.wait_until_idle()


async def test_an_attempt_with_given_output_continues_with_the_same_tokens(legs: Legs) -> None:
    rng = Random(5)
    for name, how in SAMPLINGS.items():
        params = replace(how, max_tokens=NEW_TOKENS)
        for length, split in zip(LENGTHS, SPLITS, strict=True):
            prompt = random_prompt(rng, length, 256)
            expected = await legs.whole(prompt, params)
            given = expected.tokens[:split]
            last = await legs.whole(prompt, params, given)
            first, rest = await legs.pair(prompt, params, given)
            for what, output in (("whole", last), ("decode leg", rest)):
                assert output.first_index == split, f"{name}, {what} of {length} + {split}"
                assert output.tokens == expected.tokens[split:], f"{name}, {what} of {length} + {split}"
                assert output.logprobs == (expected.logprobs[split:] if params.logprobs is not None else [])
                assert output.outcome is expected.outcome
            assert (first.first_index, first.tokens) == (split, expected.tokens[split : split + 1])
            assert first.logprobs == rest.logprobs[:1]
            assert first.outcome is (expected.outcome if split + 1 == len(expected.tokens) else Outcome.HANDED_OFF)
            for output in (last, first, rest):
                assert output.timings is not None
                assert output.timings.cached_tokens <= length, "of the prompt"


CONSTRAINTS = {
    "regex": SamplingParams(regex="[a-z]{20}-[0-9]{10}x"),
    "choice": SamplingParams(choice=("perhaps tomorrow", "perhaps today", "perhaps not")),
    "grammar": SamplingParams(grammar='start: start "," item | item\nitem: /[a-z]{3,9}/'),
    "json_schema": SamplingParams(json_schema='{"type": "array", "items": {"type": "integer"}, "minItems": 4}'),
    "gbnf": SamplingParams(grammar='root ::= ("(" root ")" | [a-z]) [a-z ]{9,20}'),
    "structural_tag": SamplingParams(grammar=lark_of_structural_tag(json.dumps(TAG), "")),
}


async def test_an_attempt_continues_a_constrained_output_with_the_same_tokens() -> None:
    prompt = [5, 6, 7, 8]
    async with legs_of(Path(baton.__file__).parent / "demo_model", "float32") as legs:
        for name, how in CONSTRAINTS.items():
            params = replace(how, seed=7, max_tokens=NEW_TOKENS)
            expected = await legs.whole(prompt, params)
            # Each split takes one of the two ways of continuing a constraint; one at an end of the output takes both.
            num_splits = len(expected.tokens) - 2
            for split in range(1, num_splits + 1):
                where, given = f"{name}, {split}", expected.tokens[:split]
                is_end = split in (1, num_splits)
                if split % 2 or is_end:
                    last = await legs.whole(prompt, params, given)
                    assert last.tokens == expected.tokens[split:], where
                    assert last.outcome is expected.outcome, where
                if not split % 2 or is_end:
                    first, rest = await legs.pair(prompt, params, given)
                    assert rest.tokens == expected.tokens[split:], where
                    assert first.tokens == expected.tokens[split : split + 1], where
                    assert rest.outcome is expected.outcome, where
