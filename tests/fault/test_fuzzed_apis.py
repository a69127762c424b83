"""Fuzzed bodies of Anthropic's messages and of OpenAI's responses, sent to a whole cluster in virtual time.

A valid body is served, one with a single wrong field is refused with that field's name, and any other gets an answer
that is no server error. It leaves no state, and a request beside it gets its own tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.fuzzed_cluster import SPEC, Run, fuzzed_cluster
from tests.support.fuzzed_http import NO_NUMBERS, NO_TEXTS, fuzzed, mutations, post, wild_bodies
from tests.support.http_client import Exchange

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with fuzzed_cluster() as made:
        yield made


TEXTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": TEXTS, "is_error": True}
CALLED = {"type": "function_call", "name": "f", "arguments": "{"}
PART = {"type": "input_text", "text": "a"}
COMMON: dict[str, tuple[list[Any], list[Any]]] = {
    "top_p": ([1, 0.5], [*NO_NUMBERS, 0, -1, 1.1]),
    "seed": ([0, 2**64 - 1], [*NO_NUMBERS, -1, 2**64]),
    "priority": ([0, 5], [*NO_NUMBERS, 2**31, -1]),
    "cache_salt": (["", "salt"], [*NO_TEXTS, "a\0", "x" * 257, "\ud800"]),
    "stream": ([True, False], [1, "true", {}]),
    "tools": ([None, []], [[{"type": "function"}], 1]),
    "no_such_field": ([], [None, 1, {"a": 1}]),
}
OF_PROMPTS: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["", SPEC.name], [*NO_TEXTS, "another", "\0", "x" * 100_000]),
    "messages": (
        [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": TEXTS}, {"role": "assistant", "content": "It is"}],
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [RESULT]},
            ],
        ],
        [
            *(None, [], "x", [1], [{}], [{"role": "user", "content": 1}], [{"role": "x", "content": "x"}]),
            *([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": [{"type": "image"}]}]),
            *([{"role": "user", "content": "x", "y": 1}], [{"role": "assistant", "content": "It is "}]),
            *([{"role": "user", "content": [CALL]}], [{"role": "assistant", "content": [CALL]}]),
            [{"role": "user", "content": [RESULT | {"content": 1}]}],
        ],
    ),
    "system": (["", "s", TEXTS], [1, [1], [{"type": "image"}], {}]),
    "thinking": (
        [None, {"type": "disabled"}, {"type": "adaptive"}],
        [
            *(1, {}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "between_tools"}),
            *({"type": "disabled", "display": "omitted"}, {"type": "adaptive", "budget_tokens": 1024}),
        ],
    ),
    "tool_choice": (
        [{"type": "none"}, {"type": "auto"}],
        [1, {}, {"type": "any"}, {"type": "tool"}, {"type": "auto", "name": "x"}, {"type": "tool", "name": "x"}],
    ),
    **{name: COMMON[name] for name in ("tools", "no_such_field")},
}
FIELDS: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    MESSAGES: {
        **COMMON,
        **OF_PROMPTS,
        "max_tokens": ([1, 5, 10**400], [*(bad for bad in NO_NUMBERS if bad != 10**400), None, 0, -1, 1.5]),
        "temperature": ([0, 0.5, 1, None], [*NO_NUMBERS, -0.1, 1.1]),
        "top_k": ([-1, 0, 1], [*NO_NUMBERS, -2, SPEC.vocab_size + 1, 1.5]),
        "stop_sequences": (["x", [], ["ab", "é"]], [1, [1], ["x"] * 17, [""], "x" * 257, "a\0", "\udc80"]),
        "metadata": ([{}, {"user_id": "me"}], [1, "x", {"user_id": 1}, {"a": "b"}]),
        "output_config": (
            [None, {}, {"effort": "low"}],
            [1, {"effort": 1}, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}],
        ),
    },
    COUNT: OF_PROMPTS,
    RESPONSES: {
        **COMMON,
        "model": (["", SPEC.name, None], OF_PROMPTS["model"][1]),
        "input": (
            [
                "hi",
                [{"role": "user", "content": [PART]}],
                [{"type": "message", "role": "assistant", "content": "x"}] * 2,
                [{"type": "reasoning", "summary": []}, {**CALLED, "call_id": "c"}],
            ],
            [
                *(None, 1, [], {}, [1], [{}], "\ud800", "x" * 200, [{"role": "user"}]),
                *([{"role": "x", "content": "x"}], [{"type": "reasoning", "content": 1}], [CALLED]),
                *([{**CALLED, "call_id": "c"}, {"type": "function_call_output", "call_id": "d", "output": "x"}],),
                *([{"role": "user", "content": [{}]}], [{"type": "item_reference", "id": "x"}]),
                *([{"role": "user", "content": "x", "y": 1}], [{"role": "user", "content": [{**PART, "y": 1}]}]),
            ],
        ),
        "instructions": ([None, "s"], NO_TEXTS),
        "max_output_tokens": ([1, 5, 24], [*NO_NUMBERS, 0, -1, 128, 2**31, 1.5]),
        "temperature": ([0, 2, None], [*NO_NUMBERS, -0.1, 2.1]),
        "include": ([[], ["message.output_text.logprobs"], ["reasoning.encrypted_content"]], [1, "x", ["x"]]),
        "top_logprobs": ([0], [*NO_NUMBERS, -1, 21]),
        "metadata": ([{}, {"a": "\ud800"}], [1, "x", {"a": 1}, {"a": "x" * 513}]),
        "store": ([True, False], [1, "true"]),
        "previous_response_id": ([None], [*NO_TEXTS, "resp_x", "\ud800", "x" * 100_000]),
        "text": (
            [{}, {"format": {"type": "text"}}, {"verbosity": "low"}],
            [1, {"format": {}}, {"format": {"type": "json_schema"}}],
        ),
        "truncation": (["disabled"], ["auto", 1]),
        "background": ([False], [True, 1]),
        "reasoning": ([None, {}, {"effort": "low"}, {"summary": "detailed"}], [{"effort": "max"}, 1]),
        "tool_choice": (["none", "auto", None], ["required", {"type": "function", "name": "f"}, {"type": "x"}, 1, {}]),
        "parallel_tool_calls": ([True, False], [1, "x", {}]),
        "user": (["\udfff"], NO_TEXTS),
    },
}
NEEDED: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": SPEC.name, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    COUNT: {"model": SPEC.name, "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi", "max_output_tokens": 5},
}
PATHS = st.sampled_from(sorted(FIELDS))


@st.composite
def valid_bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    fields = {name: good for name, (good, _) in FIELDS[path].items() if good}
    names = draw(st.sets(st.sampled_from(sorted(fields)), max_size=6))
    return {**NEEDED[path], **{name: draw(st.sampled_from(fields[name])) for name in sorted(names)}}


def error_of(path: str, exchange: Exchange) -> tuple[str, str]:
    """The field that a refusal names, and its message."""
    if path == RESPONSES:
        return str(exchange.error["param"]), exchange.error["message"]
    assert set(exchange.json) == {"type", "error", "request_id"}
    assert set(exchange.json["error"]) == {"type", "message"}
    message = exchange.json["error"]["message"]
    return message.partition(":")[0], message


def posted(run: Run, path: str, body: dict[str, Any]) -> Exchange:
    exchange: Exchange = run(lambda cluster: post(cluster, path, json.dumps(body).encode(), {}))
    return exchange


def check_refusal(run: Run, path: str, body: dict[str, Any], spoilt: str) -> None:
    """The body is refused by the name of the one field that is wrong in it."""
    exchange = posted(run, path, body)
    is_unknown = spoilt in ("model", "previous_response_id") and isinstance(body[spoilt], str)
    assert exchange.status == (404 if is_unknown else 400), (spoilt, body[spoilt], exchange.body)
    named, message = error_of(path, exchange)
    assert len(message) < 20_000
    assert named.partition(".")[0].partition("[")[0] == spoilt, (spoilt, message)


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_each_wrong_value_is_refused_by_the_name_of_its_field(run: Run, path: str) -> None:
    for name, (_, wrong) in FIELDS[path].items():
        for value in wrong:
            check_refusal(run, path, {**NEEDED[path], name: value}, name)


@fuzzed
@given(data=st.data())
def test_good_bodies_are_served_and_one_wrong_field_is_named(run: Run, data: st.DataObject) -> None:
    path = data.draw(PATHS)
    body = data.draw(valid_bodies(path))
    spoilt = data.draw(st.sampled_from([None, *sorted(FIELDS[path])]))
    event(f"{path} {'refused' if spoilt else 'served'}")
    if spoilt is not None:
        body[spoilt] = data.draw(st.sampled_from(FIELDS[path][spoilt][1]))
        check_refusal(run, path, body, spoilt)
        return
    exchange = posted(run, path, body)
    assert exchange.status == 200, exchange.body
    if body.get("stream"):
        last = {"message_stop", "response.completed", "response.incomplete"}
        assert exchange.events[-1].name in last, exchange.body


@fuzzed
@given(data=st.data(), leaves=st.sampled_from([False, False, False, True]))
def test_every_body_gets_an_answer(run: Run, data: st.DataObject, leaves: bool) -> None:
    path = data.draw(PATHS)
    valid = valid_bodies(path)
    body = data.draw(mutations(valid) | wild_bodies(valid, FIELDS[path]) | st.binary(max_size=40))
    exchange = run(lambda cluster: post(cluster, path, body, {}, leaves))
    if leaves:
        return
    event(f"{path} {exchange.status}")
    assert exchange.status in (200, 400, 404), exchange.body
    if exchange.status != 200:
        error_of(path, exchange)
