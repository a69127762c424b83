"""Tools and thinking in Anthropic's API: what templates get, what is refused, and that all of it is bounded."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.generation import Chunk
from baton.messages.request_limits import MAX_MESSAGES, MAX_TOOLS
from baton.text.tool_calls.formats import FORMATS
from router.http.messages.events import MessageInProgress, MessageLabel, MessageWriter
from router.http.parsed_text import TextParsing
from tests.support.http_client import Event
from tests.support.http_rig import HttpRig, finished, text_of
from tests.support.router_parts import MODEL
from tests.support.tool_formats import template, written

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hi"}]
F = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
TEXT = {"type": "text", "text": "so"}
REASONS = "{% for message in messages %}({{ message.reasoning_content }}){% endfor %}"
BROKEN = '<tool_call>{"name": "f", "arguments": {"x": 1, oops}}</tool_call>'
CUT = '<tool_call>{"name": "f", "arguments": {"x": '
VARIABLES = "{{ enable_thinking }} {{ reasoning_effort }}</think>"


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 2000, "messages": HELLO, "tools": [F], **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


async def prompt_of(more: str = "", **fields: Any) -> str:
    """The prompt behind the tools, for a model whose template ends with `more`."""
    rig = HttpRig(template=template("hermes", more))
    rig.post(MESSAGES, ask(**fields))
    request = (await rig.next_call()).request
    assert request.prompt is not None
    return text_of(request.prompt).rpartition("</tool>")[2]


@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        ([user(TEXT), assistant(CALL), user(RESULT)], '[user]so[assistant]<call c1 f {"x": 1}>[tool]<of c1>'),
        (
            [*HELLO, assistant(TEXT, CALL, TEXT, CALL), user(RESULT, RESULT | {"content": "2"}, TEXT)],
            '[user]hi[assistant]so\nso<call c1 f {"x": 1}><call c1 f {"x": 1}>[tool]<of c1>[tool]2<of c1>[user]so',
        ),
        # What the assistant does in several messages that follow each other is one message.
        (
            [*HELLO, assistant(CALL), assistant(TEXT, CALL), user(TEXT, RESULT | {"content": [TEXT, TEXT]})],
            '[user]hi[assistant]so<call c1 f {"x": 1}><call c1 f {"x": 1}>[user]so[tool]so\nso<of c1>',
        ),
        (
            [*HELLO, assistant(CALL), user(RESULT | {"content": [], "is_error": True}), user(TEXT)],
            '[user]hi[assistant]<call c1 f {"x": 1}>[tool]error: <of c1>[user]so',
        ),
    ],
)
async def test_calls_and_results_become_messages_for_the_template(turns: list[Any], prompt: str) -> None:
    assert await prompt_of(messages=turns) == f"{prompt}[assistant]"


async def test_reasoning_goes_to_the_template() -> None:
    thoughts = [{"type": "thinking", "thinking": text, "signature": "s"} for text in ("a", "", "b")]
    redacted = {"type": "redacted_thinking", "data": "x"}
    turns = [*HELLO, assistant(*thoughts, redacted, TEXT), *HELLO]
    assert (await prompt_of(REASONS, messages=turns)).endswith("[assistant]()(a\nb)()")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, " "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True "),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "True max"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "False none"),
        ({"output_config": {"effort": "low"}}, " low"),
    ],
)
async def test_thinking_is_variables_of_the_template(fields: dict[str, Any], variables: str) -> None:
    assert (await prompt_of(VARIABLES, **fields)).endswith(f"[assistant]{variables}</think>")


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [F | fields]}


def said(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HELLO, *turns]}


FORMAT = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
ENABLED = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
DEEP: Any = {}
for _ in range(20):
    DEEP = {"properties": {"x": DEEP}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (tool(type="bash_20250124"), "tools[0].type: is 'bash_20250124'; only tools of the type 'custom'"),
        (tool(type=1), "tools[0].type: is no text"),
        (tool(name="a b"), "tools[0].name: must be 1 to 64 letters"),
        (tool(input_schema=None), "tools[0].input_schema: "),
        (tool(input_schema={"type": "array"}), "tools[0].input_schema: must be the schema of an object"),
        (tool(input_schema=DEEP), "tools[0].input_schema: "),
        (tool(input_schema={"description": "x" * (64 << 10)}), "tools[0].input_schema: "),
        (tool(parameters={}), "tools[0].parameters: is unknown"),
        (tool(input_examples=[{"x": 1}]), "tools[0].input_examples: is not served here"),
        (tool(defer_loading=True), "tools[0].defer_loading: "),
        (tool(allowed_callers=["code_execution_20250825"]), "tools[0].allowed_callers"),
        ({"tools": [F, F]}, "tools: has f twice"),
        ({"tools": [F] * (MAX_TOOLS + 1)}, f"tools: has {MAX_TOOLS + 1} entries"),
        (
            {"tools": [{"name": f"f{n}", "input_schema": {"description": "x" * 60_000}} for n in range(5)]},
            "tools[4].input_schema: has, with those before",
        ),
        ({"tools": None, "tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: and the type tool need each other"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name: and the type tool need each other"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: is g, which is none of the tools"),
        (said(user(CALL)), "messages[1]: block 0 is of the type 'tool_use'"),
        (said(assistant(RESULT)), "messages[1]: block 0 is of the type 'tool_result'"),
        (said(user({"type": "thinking", "thinking": "x"})), "messages[1]: block 0 is of the type 'thinking'"),
        (said(assistant(CALL)), "messages[1].content: has calls, so the answer can't continue it"),
        (said(assistant(CALL | {"input": "{}"})), "messages[1].content: block 0: input: "),
        (said(assistant(CALL | {"id": ""})), "messages[1].content: block 0: id: must be a string of 1 to 256"),
        (said(assistant(CALL | {"id": None})), "messages[1].content: block 0: id: must be a string"),
        (said(user(RESULT | {"tool_use_id": None})), "messages[1].content: block 0: tool_use_id: must be a string"),
        (said(assistant(CALL | {"caller": {"type": "x"}})), "messages[1].content: block 0: caller.type: "),
        (said(assistant({"type": "server_tool_use"})), "messages[1].content: block 0 is of the type 'server_tool_use'"),
        (said(assistant(*[CALL] * (MAX_TOOLS + 1))), f"messages[1].content: has more than {MAX_TOOLS} calls"),
        (
            said(assistant(CALL), user(*[RESULT] * MAX_MESSAGES)),
            "messages[2].content: has, with those before, more than 4096",
        ),
        (said(user(RESULT)), "messages[1].content: has the result of the call 'c1', which is not before it"),
        (said(user(RESULT), assistant(CALL)), "messages[1].content: has the result of the call 'c1', which is not"),
        (
            said(assistant(CALL), user(RESULT | {"tool_use_id": "x" * 256})),
            f"messages[2].content: has the result of the call '{'x' * 80}', which is not before it",
        ),
        (said(user(RESULT | {"content": [{"type": "image"}]})), "messages[1].content: block 0: content: block 0 is"),
        (said(user(RESULT | {"content": [RESULT]})), "messages[1].content: block 0: content: block 0 is"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: and the type enabled need each other"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display: "),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: "),
        (ENABLED | FORMAT, "thinking: does not go with output_config.format"),
        (ENABLED | said(assistant(TEXT)), "thinking: does not go with a last message of the assistant"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_what_is_wrong_is_refused_by_its_name(path: str, fields: dict[str, Any], says: str) -> None:
    body = {name: value for name, value in ask(**fields).items() if value is not None}
    if path == COUNT:
        del body["max_tokens"]
    exchange = await HttpRig(template=template("hermes", "{# </think> #}")).post(path, body).end()
    assert exchange.status == 400
    assert exchange.json["error"]["type"] == "invalid_request_error"
    assert exchange.json["error"]["message"].startswith(says)


async def test_a_budget_of_thinking_leaves_room_for_the_answer() -> None:
    rig = HttpRig(template=template("hermes", "{# </think> #}"))
    exchange = await rig.post(MESSAGES, ask(max_tokens=1024, **ENABLED)).end()
    assert exchange.json["error"]["message"] == "thinking.budget_tokens: must be less than max_tokens"


async def test_thinking_and_tools_are_refused_for_a_model_that_has_none() -> None:
    for fields, says in ((ENABLED, "thinking: can't be enabled"), ({}, "tools: are not served for this model")):
        exchange = await HttpRig().post(MESSAGES, ask(**fields)).end()
        assert exchange.json["error"]["message"].startswith(says)


def folded(stream: bytes) -> list[dict[str, Any]]:
    """The blocks that a stream's events make; they must follow each other, and an input is a text."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in [Event(block) for block in stream.decode().split("\n\n") if block]:
        found = event.json
        if event.name == "content_block_start":
            assert (is_open, found["index"]) == (False, len(blocks))
            blocks.append(found["content_block"])
            if found["content_block"]["type"] == "tool_use":
                blocks[-1]["input"] = ""
            is_open = True
            continue
        assert (is_open, found["index"]) == (True, len(blocks) - 1)
        if event.name == "content_block_stop":
            is_open = False
            continue
        for name, text in found["delta"].items():
            if name != "type":
                field = "input" if name == "partial_json" else name
                blocks[-1][field] += text
    assert not is_open
    return blocks


def with_text(block: dict[str, Any]) -> dict[str, Any]:
    """A block of a whole message, whose input is a text."""
    if block["type"] != "tool_use":
        return block
    is_broken = "INVALID_JSON" in block["input"]
    return block | {"input": block["input"]["INVALID_JSON"] if is_broken else json.dumps(block["input"])}


PIECES = st.sampled_from(
    ["<", "{", " ", "\n", "<think>", "so", "</think>", "Hi ", written("hermes", [("f", {"x": 1})]), BROKEN, CUT]
)


@given(st.lists(PIECES, max_size=8), st.data())
def test_a_stream_has_the_blocks_of_the_whole_message(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    parsing = TextParsing(FORMATS["hermes"], ["f"], reasons=True)
    label, end = MessageLabel("r", MODEL, False), finished("length")
    whole, streamed = (MessageInProgress(label, parsing.sequence("r", 0), shows_thinking=True) for _ in range(2))
    whole.keep(whole.take(Chunk(0, (1,), text)))
    finish_reason = data.draw(st.sampled_from(["stop", "length"]))
    whole.keep(whole.finish(finish_reason, None))
    writer = MessageWriter(streamed, 1)
    parts = [text[first:last] for first, last in pairwise([0, *cuts, len(text)])]
    stream = b"".join(writer.chunk(Chunk(0, (1,), part)) for part in parts) + writer.end(0, finish_reason, None)
    assert folded(stream) == [with_text(block) for block in json.loads(whole.whole(end))["content"]]
