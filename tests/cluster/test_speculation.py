"""Speculation through router, prefill node, NIXL and decode node: clients get what they get without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import baton
from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.speculation import SpeculationConfig
from baton.runner import DraftSpec
from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.support.caller import Answer
from tests.support.json_fit import schema_text
from tests.support.mini_cluster import mini_cluster

pytestmark = pytest.mark.one_transport

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
LOOP = "one two three four one two three four one two three four one two"


def make_runner(node_id: str) -> TorchModelRunner:
    return load_runner(TorchSpec(DEMO_MODEL, dtype="float32", block_size=16, num_blocks=256))


REQUESTS = (
    GenerateRequest(LOOP, temperature=0.0, max_tokens=56, ignore_eos=True, logprobs=2),
    GenerateRequest(LOOP, temperature=0.3, seed=7, max_tokens=56, ignore_eos=True, logprobs=1, repetition_penalty=1.05),
    GenerateRequest(LOOP, temperature=0.5, seed=9, max_tokens=40, n=3),
    GenerateRequest(LOOP, temperature=0.7, seed=4, max_tokens=40, stop=("four",), min_tokens=5),
    GenerateRequest("Once upon a time. ", temperature=0.8, seed=11, max_tokens=80, json_schema=schema_text("object")),
)


def told(answer: Answer) -> Sequence[object]:
    sequences = [answer, *(answer.sequence(index) for index in sorted(answer.others))]
    return [(sequence.token_ids, sequence.text, sequence.logprobs) for sequence in sequences]


def make_drafting_runner(node_id: str) -> TorchModelRunner:
    draft = DraftSpec(DEMO_MODEL, num_tokens=4, quantization="int4")
    return load_runner(TorchSpec(DEMO_MODEL, dtype="float32", block_size=16, num_blocks=256, draft=draft))


DRAFTS = {
    "ngram": (make_runner, SpeculationConfig(prompt_lookup_min=2)),
    "draft_model": (
        make_drafting_runner,
        SpeculationConfig("draft_model", num_speculative_tokens=4, model=str(DEMO_MODEL), quantization="int4"),
    ),
}


@pytest.mark.parametrize(("method", "ahead"), [("ngram", "off"), ("draft_model", "on")])
async def test_clients_get_what_they_get_without_drafts(ahead: str, method: str) -> None:
    make, config = DRAFTS[method]
    async with mini_cluster(make, DEMO_MODEL, speculative_config=config.to_json(), async_scheduling=ahead) as cluster:
        plain = [await cluster.generate(replace(request, speculation=False)) for request in REQUESTS]
        decode = cluster.nodes["decode-0"].node.scheduler
        assert decode.make_stats().spec_decoding.num_drafts == 0
        alone = [await cluster.generate(request) for request in REQUESTS]
        together = await asyncio.gather(
            *(cluster.generate(request) for request in REQUESTS),
            *(cluster.generate(replace(request, speculation=False)) for request in REQUESTS),
        )
        await cluster.wait_until_idle()
        stats, prefill = decode.make_stats().spec_decoding, cluster.nodes["prefill-0"].node.scheduler
    for answers in (alone, together[: len(REQUESTS)], together[len(REQUESTS) :]):
        assert [told(answer) for answer in answers] == [told(answer) for answer in plain]
        assert [answer.end.finish_reason for answer in answers] == [answer.end.finish_reason for answer in plain]
    # How much a model drafts depends on the time that it takes: here as long as the model that it drafts for.
    assert stats.num_accepted_tokens > 20 if method == "ngram" else stats.num_drafts > 0
    assert not any(answer.end.draft_counts.num_drafted for answer in (*plain, *together[len(REQUESTS) :]))
    counts = [answer.end.draft_counts for answer in (*alone, *together[: len(REQUESTS)])]
    assert sum(found.num_drafted for found in counts) == stats.num_draft_tokens
    assert all(found.num_accepted > 0 for found in counts[:2]) or method != "ngram"
    assert sum(found.num_accepted for found in counts) <= stats.num_accepted_tokens
    assert prefill.make_stats().spec_decoding.num_drafts == 0


async def test_a_beam_search_is_refused_with_drafts_and_runs_without() -> None:
    beams = GenerateRequest(LOOP, beam_width=2, max_tokens=8)
    async with mini_cluster(make_runner, DEMO_MODEL, speculative_config='{"method": "ngram"}') as cluster:
        for switch in (None, False):
            assert (await cluster.generate(replace(beams, speculation=switch))).token_ids
        with pytest.raises(InvalidRequest, match="speculation: does not go with beam_width"):
            await cluster.generate(replace(beams, speculation=True))
        await cluster.wait_until_idle()
