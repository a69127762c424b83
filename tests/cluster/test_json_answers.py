"""Answers that fit a JSON schema, from the client's request to the last token, over two nodes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

import baton
from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.runner.model_runner import TorchModelRunner, load_runner
from tests.support.http_streams import sse, tokens_of
from tests.support.json_fit import SCHEMAS, check_fits, schema_text
from tests.support.mini_cluster import mini_cluster
from tests.support.schema_bombs import schema_bomb

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
PROMPT = "Once upon a time there was a dog. "
SAMPLED: dict[str, object] = {"max_tokens": 60, "temperature": 1.0, "top_k": -1}


def make_runner(node_id: str) -> TorchModelRunner:
    return load_runner(DEMO_MODEL, dtype="float32", block_size=16, num_blocks=256)


def asking(name: str, seed: int, **fields: object) -> GenerateRequest:
    values = {"json_schema": schema_text(name), "max_tokens": 200, "temperature": 1.0, "top_k": -1, **fields}
    return GenerateRequest(PROMPT * 3, seed=seed, **values)  # type: ignore[arg-type]


async def test_answers_fit_their_schemas_and_unconstrained_ones_do_not_change() -> None:
    plain = GenerateRequest(PROMPT, seed=5, max_tokens=40)
    several = asking("object", 3, n=3)
    async with mini_cluster(make_runner, DEMO_MODEL) as cluster:
        undisturbed = await cluster.generate(plain)
        answers = await asyncio.gather(*(cluster.generate(asking(name, 11)) for name in SCHEMAS))
        beside, whole, again = await asyncio.gather(
            cluster.generate(plain), cluster.generate(several), cluster.generate(asking("object", 3))
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


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[a-z]{3,6}-\d{2}"}, r"[a-z]{3,6}-\d{2}"),
        ({"choice": ["yes", "no", "perhaps", "Größe"]}, "yes|no|perhaps|Größe"),
        ({"grammar": 'start: item ("," item)~1..3\nitem: /[0-9]{1,2}/'}, r"\d{1,2}(,\d{1,2}){1,3}"),
    ],
)
async def test_answers_match_their_pattern_choice_or_grammar(constraint: dict[str, object], pattern: str) -> None:
    ask = {**constraint, **SAMPLED}
    async with mini_cluster(make_runner, DEMO_MODEL) as cluster:
        whole = await cluster.generate(GenerateRequest(PROMPT, seed=3, n=8, **ask))  # type: ignore[arg-type]
        alone = await cluster.generate(GenerateRequest(PROMPT, seed=3, **ask))  # type: ignore[arg-type]
        body = {"prompt": PROMPT, "seed": 3, "structured_outputs": constraint, "return_token_ids": True, "stream": True}
        url = f"http://{cluster.router.http}/v1/completions"
        events = await asyncio.to_thread(sse, url, {**SAMPLED, **body}, {})
        for wrong in ({"regex": "("}, {"grammar": "start: start"}):
            with pytest.raises(InvalidRequest) as caught:
                await cluster.generate(GenerateRequest(PROMPT, **wrong))  # type: ignore[arg-type]
            assert caught.value.field in wrong
        await cluster.wait_until_idle()
    texts = [whole.sequence(index).text for index in range(8)]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(set(texts)) > 1
    assert alone.token_ids == tokens_of(events) == whole.token_ids
    streamed = [choice["text"] for _, data in events if data != "[DONE]" for choice in data["choices"]]
    assert "".join(streamed) == alone.text


async def test_any_json_object_may_be_asked_for() -> None:
    request = GenerateRequest(PROMPT, seed=8, json_schema='{"type": "object"}', max_tokens=120, temperature=0.7)
    async with mini_cluster(make_runner, DEMO_MODEL) as cluster:
        answer = await cluster.generate(request)
    if answer.end.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert answer.text.lstrip().startswith("{")
