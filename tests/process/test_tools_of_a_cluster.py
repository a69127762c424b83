"""A running cluster whose bundled model, which was trained on no tools, is made to call them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from baton.config import bundled_model_dir
from tests.support.process_cluster import process_cluster

if TYPE_CHECKING:
    from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {"color": {"enum": ["red", "blue"]}, "coats": {"type": "integer", "maximum": 9}},
                "required": ["color", "coats"],
            },
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]
NAMED: Any = {"type": "function", "function": {"name": "paint"}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--threads", "1", "--tool-call-parser", "smollm2")
    run_dir = tmp_path_factory.mktemp("cluster") / "run"
    with process_cluster(run_dir, bundled_model_dir(), *flags) as cluster:
        yield f"http://{cluster.state.http_address}"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def asked(client: OpenAI, **fields: Any) -> dict[str, Any]:
    model = client.models.list().data[0].id
    hello = [{"role": "user", "content": "hello"}]
    return {"model": model, "messages": hello, "tools": TOOLS, "max_tokens": 200, "seed": 3, **fields}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_demanded_call_fits_the_schema_of_its_tool_streamed_or_not(client: OpenAI, choice: Any) -> None:
    fields = asked(client, tool_choice=choice, parallel_tool_calls=False)
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "paint":
        assert arguments.keys() == {"color", "coats"}
        assert arguments["color"] in ("red", "blue")
    else:
        assert (choice, call.function.name, arguments) == ("required", "wait", {})
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls is not None
    (again,) = streamed.message.tool_calls
    assert again.type == "function"
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)


def test_a_schema_that_constrains_nothing_is_refused_only_where_it_is_demanded(client: OpenAI) -> None:
    import openai

    properties = {"x": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(**asked(client, tools=odd, tool_choice="required"))
    assert caught.value.param == "tools[0].function.parameters"
    for choice in ("auto", "none"):
        fields = asked(client, tools=odd, tool_choice=choice) | {"max_tokens": 4}
        assert client.chat.completions.create(**fields).choices


def test_a_response_has_the_call_of_the_chat_and_goes_on_from_it(client: OpenAI) -> None:
    from openai.types.responses import ResponseFunctionToolCall

    fields = asked(client, tool_choice=NAMED, parallel_tool_calls=False)
    message = client.chat.completions.create(**fields).choices[0].message
    assert message.tool_calls is not None
    (expected,) = message.tool_calls
    assert expected.type == "function"
    wanted: dict[str, Any] = {
        **{name: fields[name] for name in ("model", "parallel_tool_calls")},
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        "extra_body": {"seed": fields["seed"]},
    }
    choice = {"type": "function", "name": "paint"}
    demanded: dict[str, Any] = {"input": "hello", "tool_choice": choice, "max_output_tokens": fields["max_tokens"]}
    made = client.responses.create(**wanted, **demanded)
    with client.responses.stream(**wanted, **demanded) as stream:
        streamed = stream.get_final_response()
    items = [*made.output, *streamed.output]
    calls = [item for item in items if isinstance(item, ResponseFunctionToolCall)]
    assert len(calls) == len(items) == 2
    assert {(call.name, call.arguments) for call in calls} == {(expected.function.name, expected.function.arguments)}
    output: Any = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "done"}]
    more = client.responses.create(
        **wanted, input=output, tool_choice="none", previous_response_id=made.id, max_output_tokens=4
    )
    # With none the prompt has no tools, but the call and its result, as in a chat.
    told = [*fields["messages"], message, {"role": "tool", "tool_call_id": expected.id, "content": "done"}]
    chat = client.chat.completions.create(**{**fields, "messages": told, "tool_choice": "none", "max_tokens": 4})
    hello = client.chat.completions.create(**{**fields, "tool_choice": "none", "max_tokens": 4})
    assert more.usage is not None
    assert chat.usage is not None
    assert hello.usage is not None
    assert more.usage.input_tokens == chat.usage.prompt_tokens > hello.usage.prompt_tokens


def test_a_call_that_is_demanded_of_a_message_is_the_chats(client: OpenAI, url: str) -> None:
    from anthropic import Anthropic

    # A message has to say that a tool takes nothing, so with the other tool its prompt is another one.
    tools = TOOLS[:1]
    fields = asked(client, tools=tools, tool_choice=NAMED, parallel_tool_calls=False)
    calls = client.chat.completions.create(**fields).choices[0].message.tool_calls
    assert calls is not None
    (expected,) = calls
    assert expected.type == "function"
    functions = [tool["function"] for tool in tools]
    ask: Any = {name: fields[name] for name in ("model", "messages", "max_tokens")} | {
        "tools": [{"name": function["name"], "input_schema": function["parameters"]} for function in functions],
        "tool_choice": {"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
        "extra_body": {"seed": fields["seed"]},
    }
    with Anthropic(base_url=url, api_key="any", max_retries=0, _strict_response_validation=True) as other:
        message = other.messages.create(**ask)
        with other.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
    answers: list[Any] = [message, streamed]
    for one in answers:
        (block,) = one.content
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("paint", json.loads(expected.function.arguments))
        assert one.stop_reason == "tool_use"
