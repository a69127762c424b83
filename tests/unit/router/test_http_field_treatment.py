"""Fields of bodies that are not simply served: ignored ones are named in a header, others are refused by their name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.http.bodies.fields import Strict, Treatment, collect_ignored, read_as
from router.http.pages.operations import OPERATIONS
from tests.support.http_rig import HttpRig, chunk, finished, text_of

JSON_BODIES = {one.bodies[0]: one.example for one in OPERATIONS if one.bodies and one.body_kind.endswith("json")}
HEADER = "x-baton-ignored-fields"
SOMETHING = {"a": "b"}
OWN_TYPE: dict[tuple[str, str], tuple[Any, ...]] = {
    **{("ResponsesBody", name): ("x",) for name in ("prompt_cache_key", "safety_identifier", "user")},
    ("MessagesBody", "metadata"): ({"user_id": "me"},),
}
"""Fields without effect that are checked all the same, and values that they may have."""


def marked(treatment: Treatment) -> Iterator[Any]:
    for body, example in JSON_BODIES.items():
        for name, field in body.model_fields.items():
            if treatment in field.metadata:
                yield pytest.param(body, example, field.alias or name, id=f"{body.__name__}-{name}")


@pytest.mark.parametrize(("body", "example", "name"), [*marked(Treatment.IGNORED)])
def test_an_ignored_field_may_have_any_value_of_its_type(body: type[Strict], example: Any, name: str) -> None:
    for value in OWN_TYPE.get((body.__name__, name), (["x"], SOMETHING, 3, True, "x")):
        names = collect_ignored()
        read_as(body, {**example, name: value})
        assert names == {name}
    names = collect_ignored()
    read_as(body, {**example, name: None})
    assert not names


@pytest.mark.parametrize(("body", "example", "name"), [*marked(Treatment.REFUSED), *marked(Treatment.ONE_VALUE)])
def test_a_field_without_which_the_answer_would_be_another_is_refused(
    body: type[Strict], example: Any, name: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_as(body, {**example, name: SOMETHING})
    assert caught.value.field == name
    read_as(body, {**example, name: None})


USER = {
    "role": "user",
    "content": [{"type": "text", "text": "a", "cache_control": SOMETHING}],
    "cache_control": SOMETHING,
}
BEFORE = {"role": "assistant", "content": "b", "reasoning": "because", "reasoning_details": [SOMETHING], "parsed": {}}
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [USER, BEFORE, {"role": "user", "content": "c"}],
            "top_k": 0,
            "store": True,
            "verbosity": "low",
            "prediction": {"type": "content", "content": "x"},
            "prompt_cache_retention": "24h",
            "prompt_cache_key": "k",
            "metadata": {},
        },
        "cache_control, prediction, prompt_cache_key, prompt_cache_retention, reasoning_details, store, verbosity",
    ),
    "response": (
        "/v1/responses",
        {"input": "a", "text": {"verbosity": "low"}, "reasoning": {"summary": "detailed"}, "max_tool_calls": 3},
        "max_tool_calls, summary, verbosity",
    ),
    "message": (
        "/v1/messages",
        {
            "model": "demo",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": SOMETHING}]}],
            "context_management": {"edits": [SOMETHING]},
        },
        "cache_control, context_management",
    ),
    "embedding": ("/v1/embeddings", {"input": "a", "input_type": "search_query"}, "input_type"),
}


@pytest.mark.parametrize("size", [0, 20_000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CALLS)
async def test_an_answer_names_the_fields_without_effect(case: str, stream: bool, size: int) -> None:
    path, body, names = CALLS[case]
    rig = HttpRig()
    sent = json.dumps(body | ({"stream": True} if stream and case != "embedding" else {})).encode() + b" " * size
    exchange = rig.request("POST", path, sent, {"content-type": "application/json"})
    call = await rig.next_call()
    assert (rig.handler.num_in_threads > 0) == (size > 0)
    call.tell(InvalidRequest("prompt", "no") if case == "embedding" else chunk(0, "b"), finished())
    await exchange.end()
    assert (exchange.status, exchange.headers[HEADER]) == (400 if case == "embedding" else 200, names)


async def test_an_answer_without_such_fields_names_none() -> None:
    rig = HttpRig()
    exchange = await rig.answered(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "store": False},
        chunk(0, "b"),
        finished(),
    )
    assert HEADER not in exchange.headers


async def test_reasoning_of_a_message_has_two_names() -> None:
    template = "{% for message in messages %}[{{ message.reasoning_content }}]{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        rig = HttpRig(template=template)
        exchange = rig.post(
            "/v1/chat/completions", {"messages": [{"role": "assistant", "content": "b", name: "because"}]}
        )
        call = await rig.next_call()
        assert text_of(call.request.prompt) == "[because]"
        exchange.disconnect()
        await exchange.task
