"""Answers that fit a JSON schema, from the client's request to the last token, over two nodes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import baton
from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.text.constraints.structural_tags import lark_of_structural_tag
from tests.support.caller import TokenCount
from tests.support.http_streams import sse, tokens_of
from tests.support.json_fit import SCHEMAS, check_fits, schema_text
from tests.support.mini_cluster import BOTH_KINDS, mini_cluster
from tests.support.schema_bombs import schema_bomb

pytestmark = pytest.mark.one_transport

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
PROMPT = "Once upon a time there was a dog. "
SAMPLED: dict[str, object] = {"max_tokens": 60, "temperature": 1.0, "top_k": -1}


def make_runner(node_id: str) -> TorchModelRunner:
    return load_runner(TorchSpec(DEMO_MODEL, dtype="float32", block_size=16, num_blocks=256))


def asking(name: str, seed: int, **fields: object) -> GenerateRequest:
    values = {"json_schema": schema_text(name), "max_tokens": 200, "temperature": 1.0, "top_k": -1, **fields}
    return GenerateRequest(PROMPT * 3, seed=seed, **values)  # type: ignore[arg-type]


async def test_answers_fit_their_schemas_and_unconstrained_ones_do_not_change() -> None:
    plain = GenerateRequest(PROMPT, seed=5, max_tokens=40)
    several = asking("object", 3, n=3)
    any_object = GenerateRequest(PROMPT, seed=8, json_schema='{"type": "object"}', max_tokens=60, temperature=0.7)
    async with mini_cluster(make_runner, DEMO_MODEL) as cluster:
        undisturbed = await cluster.generate(plain)
        answers = await asyncio.gather(*(cluster.generate(asking(name, 11)) for name in SCHEMAS))
        beside, whole, again, any_answer = await asyncio.gather(
            cluster.generate(plain),
            cluster.generate(several),
            cluster.generate(asking("object", 3)),
            cluster.generate(any_object),
        )
        refused = [
            asking("object", 1, ignore_eos=True),
            asking("object", 1, min_tokens=2),
            asking("object", 1, json_schema='{"not": {}}'),
            asking("object", 1, json_schema=schema_bomb()),
            GenerateRequest(PROMPT, json_schema=schema_text("object"), beam_width=2),
        ]
        for request in refused:
            with pytest.raises(InvalidRequest) as caught:
                await cluster.generate(request)
            assert caught.value.field in ("ignore_eos", "min_tokens", "json_schema")
        await cluster.wait_until_idle()
    for name, answer in zip(SCHEMAS, answers, strict=True):
        check_fits(answer.text, name)
        assert (answer.end.finish_reason, answer.end.stop_reason) == ("stop", None)
        assert (answer.end.path.prefill_node, answer.end.path.decode_node) == ("prefill-0", "decode-0")
    for index in range(3):
        check_fits(whole.sequence(index).text, "object")
    assert len({whole.sequence(index).text for index in range(3)}) == 3
    assert again.token_ids == whole.token_ids
    assert beside.token_ids == undisturbed.token_ids
    if any_answer.end.finish_reason == "stop":
        assert isinstance(json.loads(any_answer.text), dict)
    else:
        assert any_answer.text.lstrip().startswith("{")


CONSTRAINTS: Sequence[tuple[dict[str, object], str]] = [
    ({"regex": r"[a-z]{3,6}-\d{2}"}, r"[a-z]{3,6}-\d{2}"),
    ({"choice": ["yes", "no", "perhaps", "Größe"]}, "yes|no|perhaps|Größe"),
    ({"grammar": 'start: item ("," item)~1..3\nitem: /[0-9]{1,2}/'}, r"\d{1,2}(,\d{1,2}){1,3}"),
]


async def test_answers_match_their_pattern_choice_or_grammar() -> None:
    async with mini_cluster(make_runner, DEMO_MODEL) as cluster:
        url = f"http://{cluster.router.http}/v1/completions"
        for constraint, pattern in CONSTRAINTS:
            ask = {**constraint, **SAMPLED}
            whole = await cluster.generate(GenerateRequest(PROMPT, seed=3, n=8, **ask))  # type: ignore[arg-type]
            alone = await cluster.generate(GenerateRequest(PROMPT, seed=3, **ask))  # type: ignore[arg-type]
            body = {"prompt": PROMPT, "seed": 3, "structured_outputs": constraint, "return_token_ids": True}
            events = await asyncio.to_thread(sse, url, {**SAMPLED, **body, "stream": True}, {})
            texts = [whole.sequence(index).text for index in range(8)]
            assert all(re.fullmatch(pattern, text) for text in texts), texts
            assert len(set(texts)) > 1
            assert alone.token_ids == tokens_of(events) == whole.token_ids
            streamed = [choice["text"] for _, data in events if data != "[DONE]" for choice in data["choices"]]
            assert "".join(streamed) == alone.text
        for wrong in ({"regex": "("}, {"grammar": "start: start"}):
            with pytest.raises(InvalidRequest) as caught:
                await cluster.generate(GenerateRequest(PROMPT, **wrong))  # type: ignore[arg-type]
            assert caught.value.field in wrong
        await cluster.wait_until_idle()


TAGGED = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {
                "type": "tag",
                "begin": "<think>",
                "content": {"type": "regex", "pattern": "([a-z]{1,9} ){40}"},
                "end": "</think>",
            },
            {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [
                    {
                        "begin": "<f=sum>",
                        "content": {
                            "type": "json_schema",
                            "json_schema": {"type": "integer", "minimum": 1, "maximum": 999},
                        },
                        "end": "</f>",
                    }
                ],
                "at_least_one": True,
                "stop_after_first": True,
            },
        ],
    },
}


@pytest.mark.parametrize("n", [1, 2])
async def test_a_structural_tag_goes_on_with_the_same_tokens_when_its_node_is_lost(n: int) -> None:
    grammar = lark_of_structural_tag(json.dumps(TAGGED), "response_format")
    ask = GenerateRequest(PROMPT, seed=6, n=n, grammar=grammar, max_tokens=250, temperature=1.0, top_k=-1)
    # A node that ends would begin to move its streams, which takes a number of an attempt.
    settings = {**BOTH_KINDS, "move_streams": "off"}
    async with mini_cluster(make_runner, DEMO_MODEL, decode=2, router_settings=settings) as cluster:
        undisturbed = await cluster.generate(ask)
        await cluster.wait_until_idle()
        count = TokenCount()
        answering = asyncio.create_task(cluster.generate(ask, on_event=count))
        await count.wait_for_tokens(20, num_sequences=n)
        (lost,) = (name for name in ("decode-0", "decode-1") if cluster.nodes[name].num_blocks_in_use)
        assert max(count.by_sequence.values()) < len(undisturbed.token_ids) / 2
        await cluster.nodes[lost].end()
        answer = await answering
    assert (answer.end.path.attempts, answer.end.path.decode_node == lost) == (2, False)
    for index in range(n):
        assert answer.sequence(index).token_ids == undisturbed.sequence(index).token_ids
        assert answer.sequence(index).indices == list(range(len(answer.sequence(index).token_ids)))
        assert re.fullmatch(r"<think>([a-z]{1,9} ){40}</think><f=sum>\d{1,3}</f>", answer.sequence(index).text)
