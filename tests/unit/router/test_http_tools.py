"""Tools and reasoning of chats: what the core gets to do, what is refused, and what clients get of the text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.messages.generation import Chunk, GenerateEvent, GenerateRequest, KnownText, SequenceFinished
from baton.messages.request_limits import MAX_TOOLS
from baton.messages.sampling import TokenLogprobs
from baton.text.constraints.schema_compiling import check_constraint
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.byte_matching import takes
from tests.support.http_client import Event, Exchange
from tests.support.http_rig import CARD, CHATS, HttpRig, chunk, finished, text_of
from tests.support.tool_formats import MARKERS, THINKING, template, written

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
STRICT: dict[str, Any] = {"name": "f", "description": "It fs.", "parameters": SCHEMA, "strict": True}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


F, G, NAMED = tool(**STRICT), tool("g"), tool("f")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "tools": [F, G], **fields}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    listed = {"mode": mode, "tools": [tool(name) for name in names]}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": listed}}


async def asked(
    rig: HttpRig, body: dict[str, Any], text: str = "so", reason: str = "stop"
) -> tuple[GenerateRequest, Any]:
    """The request that the core gets, and the answer when it writes this text."""
    exchange = rig.post(CHATS, body)
    call = await rig.next_call()
    call.tell(chunk(0, text), finished(reason))
    answer = await exchange.end()
    assert answer.status == 200, answer.json
    return call.request, answer.json["choices"][0]


def prompt_of(request: GenerateRequest) -> str:
    assert request.prompt is not None
    return text_of(request.prompt)


async def test_templates_get_tools_without_what_they_were_not_made_for() -> None:
    request, _ = await asked(HttpRig(template=template("hermes")), chat())
    shown = {"type": "function", "function": {"name": "f", "description": "It fs.", "parameters": SCHEMA}}
    assert prompt_of(request) == f"<tool>{json.dumps(shown)}</tool><tool>{json.dumps(G)}</tool>[user]hi[assistant]"


@pytest.mark.parametrize(
    ("choice", "checked"), [("auto", [0]), ("none", []), ("required", [0, 1]), (NAMED, [0]), (None, [0])]
)
async def test_schemas_are_compiled_only_of_tools_in_the_grammar(choice: Any, checked: list[int]) -> None:
    request, _ = await asked(HttpRig(template=template("hermes")), chat(tool_choice=choice))
    assert list(request.schemas) == [f"tools[{place}].function.parameters" for place in checked]
    if checked:
        assert json.loads(request.schemas["tools[0].function.parameters"]) == SCHEMA


@pytest.mark.parametrize("name", ["hermes", "smollm2"])
@pytest.mark.parametrize("choice", ["auto", None])
@pytest.mark.parametrize("is_parallel", [True, False])
async def test_calls_of_strict_tools_that_may_come_are_a_grammar(name: str, choice: Any, is_parallel: bool) -> None:
    text = "So. " + written(name, [("f", {"x": 5})])
    rig = HttpRig(template=template(name, THINKING))
    fields = chat(tool_choice=choice, parallel_tool_calls=is_parallel)
    for reasoning in ("Let me <tool_call>.</think>", ""):
        effort = {} if reasoning else {"reasoning_effort": "none"}
        request, got = await asked(rig, fields | effort, reasoning + text)
        assert request.constraint_field == "tools[0].function.strict"
        assert request.grammar is not None
        assert takes(request.grammar, reasoning + text)
        assert takes(request.grammar, "Hi")
        assert not takes(request.grammar, reasoning + text.replace('"x": ', '"y": '))
        called = [one["function"] for one in got["message"]["tool_calls"]]
        assert called == [{"name": "f", "arguments": '{"x": 5}'}]


@pytest.mark.parametrize("name", MARKERS)
async def test_strict_tools_are_no_grammar_where_it_would_forbid_their_markers(name: str) -> None:
    class WithSpecialMarkers(FakeTokenizer):
        def special_ids(self, texts: Iterable[str]) -> list[int]:
            return [7 for text in texts if text == "<tool_call>"]

    request, _ = await asked(HttpRig(vocabulary=WithSpecialMarkers(), template=template(name)), chat())
    assert (request.grammar, request.constraint_field, request.schemas) == (None, "", {})
    request, _ = await asked(HttpRig(template=template(name)), chat())
    assert (request.grammar is not None) == (name in ("hermes", "smollm2"))


@pytest.mark.parametrize("obstacle", ["size", "no end"])
async def test_strict_tools_are_no_grammar_that_the_core_would_refuse(obstacle: str) -> None:
    large = SCHEMA | ({"description": "x" * 40_000} if obstacle == "size" else {})
    tools = [tool(name, parameters=large, strict=True) for name in "fh"]
    rig = HttpRig(template=template("hermes"), card=replace(CARD, has_end=obstacle == "size", max_model_len=300_000))
    request, _ = await asked(rig, chat(tools=tools))
    assert (request.grammar, request.constraint_field, request.schemas) == (None, "", {})


async def test_another_constraint_is_kept_beside_strict_tools_that_may_be_called() -> None:
    rig = HttpRig(template=template("hermes"))
    request, _ = await asked(rig, chat(response_format={"type": "json_object"}), "{}")
    assert (request.grammar, request.constraint_field, request.schemas) == (None, "response_format", {})
    assert request.json_schema is not None
    request, _ = await asked(rig, chat(tool_choice="required"), written("hermes", [("g", {})]))
    assert request.constraint_field == "tool_choice"


@pytest.mark.parametrize("name", ["mistral", "mistral-args"])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_that_begins_in_the_prompt_has_no_reasoning(name: str, choice: Any) -> None:
    rig = HttpRig(template=template(name, THINKING))
    await rig.refused(CHATS, chat(tool_choice=choice), "tool_choice", "opens reasoning")
    closed = chat(tool_choice=choice, reasoning_effort="none")
    text = {"mistral": '[{"name": "f", "arguments": {"x": 1}}]', "mistral-args": 'f{"x": 1}'}[name]
    if name == "mistral-args" and choice == NAMED:
        text = text.removeprefix("f")
    request, got = await asked(rig, closed, text)
    assert takes(request.grammar or "", text)
    assert [one["function"]["arguments"] for one in got["message"]["tool_calls"]] == ['{"x": 1}']


async def test_messages_with_calls_reach_the_template_with_arguments_as_objects() -> None:
    broken = {**CALL, "function": {"name": "f", "arguments": "{x"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL, broken], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    request, _ = await asked(HttpRig(template=template("hermes")), chat(messages=messages))
    assert prompt_of(request).endswith(
        '[user]hi[assistant]<call c1 f {"x": 1}><call c1 f "{x">[tool]2<of c1>[assistant]'
    )


NO_PLACE = "{# <tool_call> #}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


async def test_a_template_without_a_place_for_tools_gets_them_as_text() -> None:
    rig = HttpRig(template=NO_PLACE, card=replace(CARD, max_model_len=9000))
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [*HELLO, called, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    request, answer = await asked(rig, chat(messages=messages), written("hermes", [("g", {})]))
    prompt = prompt_of(request)
    assert prompt.startswith("[system]# Tools\n")
    assert f"<tools>\n{json.dumps(F | {'function': {key: STRICT[key] for key in list(STRICT)[:3]}})}\n" in prompt
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    turns = f"[user]hi[assistant]{call}[user]<tool_response>\n2\n</tool_response>"
    assert prompt.endswith(turns)
    assert [one["function"]["name"] for one in answer["message"]["tool_calls"]] == ["g"]
    tokenized = await rig.post("/tokenize", {"messages": messages, "tools": [F, G]}).end()
    assert tokenized.json["tokens"] == request.prompt
    request, _ = await asked(rig, chat(messages=messages, tool_choice="none"))
    assert prompt_of(request) == turns


async def test_a_chat_in_which_the_template_leaves_tools_out_gets_them_as_text() -> None:
    shown = "{% if messages | length == 1 %}{{ tools | tojson }}{% endif %}"
    rig = HttpRig(template=NO_PLACE + shown, card=replace(CARD, max_model_len=9000))
    request, _ = await asked(rig, chat())
    assert prompt_of(request).startswith('[user]hi[{"type":')
    request, _ = await asked(rig, chat(messages=HELLO * 2))
    assert prompt_of(request).startswith("[system]# Tools\n")


async def test_tokenize_refuses_tools_as_the_chat_does_and_writes_calls_of_earlier_turns() -> None:
    rig = HttpRig(template=NO_PLACE.replace("<tool_call>", ""))
    for path in (CHATS, "/tokenize"):
        await rig.refused(path, chat(), "tools")
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    request, _ = await asked(rig, {"messages": [*HELLO, called]})
    assert '{"name": "f", "arguments": {"x": 1}}' in prompt_of(request)


async def test_with_the_choice_none_the_model_knows_no_tools_and_nothing_is_parsed() -> None:
    text = written("hermes", [("f", {})])
    request, choice = await asked(HttpRig(template=template("hermes")), chat(tool_choice="none"), text)
    assert prompt_of(request) == "[user]hi[assistant]"
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert not request.is_parsed


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("is_parallel", [True, False])
async def test_a_demanded_call_is_a_grammar(name: str, choice: Any, is_parallel: bool) -> None:
    rig = HttpRig(template=template(name))
    fields = chat(tool_choice=choice, parallel_tool_calls=is_parallel)
    calls = [("f", {"x": 5})] if choice == NAMED or name == "mistral-args" else [("g", {})]
    may_be_several = is_parallel and choice != NAMED
    if may_be_several and name != "mistral-args":
        calls = [*calls, ("f", {"x": 6})]
    text = written(name, calls)
    if name == "llama3":
        text = text.removeprefix("<|python_tag|>")
    if name.startswith("mistral"):
        text = text.removeprefix("[TOOL_CALLS]").lstrip()
    if name == "mistral-args":
        text = text.removeprefix("f[ARGS]") if choice == NAMED else text.replace("[ARGS]", "")
    request, got = await asked(rig, fields, text)
    assert request.grammar is not None
    check_constraint(request.grammar, "grammar")
    assert takes(request.grammar, text)
    assert [
        (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in got["message"]["tool_calls"]
    ] == calls
    assert (got["message"]["content"], got["finish_reason"]) == (None, "tool_calls")
    # Neither other text, nor another tool, nor arguments that don't fit, nor more calls than are wanted.
    wrong = ["so", text.replace('"x": ', '"y": ') if "x" in text else "{}", text.replace("f", "h").replace("g", "h")]
    for other in wrong if may_be_several else [*wrong, text + ("; " if name == "llama3" else "\n") + text]:
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(request.grammar))
        assert matcher.try_consume_tokens(list(other.encode())) < len(other) or other == text


async def test_the_model_knows_and_calls_the_allowed_tools_alone() -> None:
    rig = HttpRig(template=template("hermes"))
    auto, _ = await asked(rig, chat(**allowed("auto", "g")))
    assert prompt_of(auto) == f"<tool>{json.dumps(G)}</tool>[user]hi[assistant]"
    assert auto.grammar is None
    text = written("hermes", [("g", {})])
    required, got = await asked(rig, chat(**allowed("required", "g")), text)
    assert (required.prompt, got["finish_reason"]) == (auto.prompt, "tool_calls")
    assert takes(required.grammar or "", text)
    assert not takes(required.grammar or "", written("hermes", [("f", {"x": 1})]))


@pytest.mark.parametrize(("name", "text"), [("mistral", '[{"na'), ("mistral-args", "f")])
async def test_a_call_that_is_cut_in_its_head_gives_the_models_text_alone(name: str, text: str) -> None:
    _, got = await asked(HttpRig(template=template(name)), chat(tool_choice="required"), text, "length")
    assert got["message"]["content"] == text


async def test_reasoning_may_come_before_a_demanded_call() -> None:
    text = "so\n</think>\n\n" + written("hermes", [("f", {"x": 1})])
    rig = HttpRig(template=template("hermes", THINKING))
    request, choice = await asked(rig, chat(tool_choice="required"), text)
    assert takes(request.grammar or "", text)
    assert choice["message"]["reasoning_content"] == "so"
    assert len(choice["message"]["tool_calls"]) == 1


MANY_LARGE = [tool(f"f{place}", parameters={"x": "y" * 60_000}) for place in range(5)]
ONLY_CONSTRAINT = "each says what the whole answer must be"
TWICE_REASONED = {"role": "assistant", "reasoning": "x", "reasoning_content": "y"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [F, F]}, "tools: has f twice"),
        ({"tools": [F] * (MAX_TOOLS + 1)}, "tools: has 129 entries; at most 128 are taken"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type: must be 'function'"),
        ({"tools": [tool("a b")]}, "tools[0].function.name: must be 1 to 64 letters, digits or _ -"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: is required"),
        (
            {"tools": [G, tool("f", parameters={"type": "array"})]},
            "tools[1].function.parameters: must be the schema of an object",
        ),
        (
            {"tools": [tool("f", parameters={"x": "y" * 70_000})]},
            "tools[0].function.parameters: has 70027 bytes; at most 65536 are taken",
        ),
        (
            {"tools": MANY_LARGE},
            "tools[4].function.parameters: has, with those before, 300135 bytes; all together may have 262144",
        ),
        ({"tool_choice": "required", "tools": None}, "tool_choice: needs tools"),
        (
            {"tool_choice": "always"},
            "tool_choice: must be none, auto, required, or an object of the type function or allowed_tools",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice: function: is required"),
        ({"tool_choice": tool("h")}, "tool_choice.function.name: is h, which is none of the tools"),
        (allowed("auto"), "tool_choice.allowed_tools.tools: is empty: let tool_choice be none"),
        (allowed("auto", "f", "h"), "tool_choice.allowed_tools.tools: has h, which is none of the tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice: allowed_tools: is required"),
        ({"tool_choice": NAMED, "guided_regex": "a"}, f"tool_choice: does not go with guided_regex: {ONLY_CONSTRAINT}"),
        (
            {"tool_choice": NAMED, "structured_outputs": {"json": {}}},
            f"tool_choice: does not go with structured_outputs: {ONLY_CONSTRAINT}",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].tool_call_id: and the role tool need each other",
        ),
        (
            {"messages": [{"role": "user", "tool_call_id": "x"}]},
            "messages[0].tool_call_id: and the role tool need each other",
        ),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages[0].tool_calls: needs the role assistant"),
        ({"messages": [{"role": "user", "reasoning": "x"}]}, "messages[0].reasoning: needs the role assistant"),
        ({"messages": [TWICE_REASONED]}, "messages[0].reasoning: is another than reasoning_content: send one of them"),
        (
            {"chat_template_kwargs": {"tools": "x"}},
            "chat_template_kwargs: may not name tools, which the request itself sets",
        ),
        (
            {"reasoning_effort": "most"},
            "reasoning_effort: must be 'none', 'minimal', 'low', 'medium', 'high' or 'xhigh'",
        ),
    ],
)
async def test_what_is_wrong_is_refused_by_its_name(fields: dict[str, Any], message: str) -> None:
    exchange = await HttpRig(template=template("hermes")).refused(CHATS, chat(**fields), message.partition(": ")[0])
    assert exchange.error["message"] == message


ENABLED = {"chat_template_kwargs": {"enable_thinking": True}}


async def test_tools_are_refused_for_a_model_whose_template_has_none() -> None:
    rig = HttpRig()
    await rig.refused(CHATS, chat(), "tools", "--tool-call-parser")
    await asked(rig, chat(tool_choice="none"))


@pytest.mark.parametrize(
    ("fields", "end", "text", "expected"),
    [
        ({}, "<think>\n", "so\n</think>\n\nHi", ("so", "Hi")),
        ({"reasoning_effort": "none"}, "</think>\n\n", "Hi", (None, "Hi")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n", "Hi", (None, "Hi")),
        ({"reasoning_effort": "none", **ENABLED}, "<think>\n", "so", ("so", "")),
        # A constraint holds from the first token on, so there is no reasoning.
        ({"response_format": {"type": "json_object"}}, "<think>\n", "{}", (None, "{}")),
    ],
)
async def test_reasoning_is_split_off(
    fields: dict[str, Any], end: str, text: str, expected: tuple[str | None, str]
) -> None:
    rig = HttpRig(template=template("none", THINKING))
    request, choice = await asked(rig, {"messages": HELLO, **fields}, text)
    assert prompt_of(request).endswith(end)
    assert (choice["message"].get("reasoning_content"), choice["message"]["content"]) == expected
    is_open = end == "<think>\n"
    assert request.reasoning == ("none" if "response_format" in fields else "open" if is_open else "closed")


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]])
async def test_reasoning_of_earlier_turns_has_either_name(names: list[str]) -> None:
    rig = HttpRig(template="{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}")
    said = {"role": "assistant", "content": "y", **dict.fromkeys(names, "because ")}
    request, _ = await asked(rig, {"messages": [said, *HELLO]})
    assert prompt_of(request) == "because yhi"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("so</think>Hi", 10), ("</think>\n\nHi", 8), ("so on", 5), ("", 0), ("a</think>b</think>", 9)],
)
async def test_tokens_of_reasoning_are_counted(text: str, expected: int) -> None:
    """In a whole answer, in a stream, and in one that is resumed."""
    rig = HttpRig(template=template("none", THINKING))
    ends = [SequenceFinished(index, "stop", None, len(text)) for index in range(2)]
    cut = len(text) // 2

    async def usage(stream: bool, *events: GenerateEvent, **headers: str) -> dict[str, Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        exchange = rig.post(CHATS, {"messages": HELLO, "n": 2, **options}, {"x-request-id": "r1", **headers})
        (await rig.next_call()).tell(*events, *ends, finished("stop", 2 * len(text)))
        answer = await exchange.end()
        found = answer.events[-2].json["usage"] if stream else answer.json["usage"]
        return dict(found["completion_tokens_details"])

    both = [one for index in range(2) for one in (chunk(0, text[:cut], index), chunk(cut, text[cut:], index))]
    for stream in (False, True):
        assert (await usage(stream, *both))["reasoning_tokens"] == 2 * expected
    known = KnownText(cut - 1, (), text[:cut], known_token_ids=tuple(map(ord, text[:cut])))
    resumed = [known, chunk(cut, text[cut:]), *both[2:]] if cut else both
    last_event = {"last-event-id": f"{cut}.0", "baton-seed": "1"}
    assert (await usage(True, *resumed, **last_event))["reasoning_tokens"] == 2 * expected


async def test_calls_in_reasoning_are_no_calls() -> None:
    call = written("hermes", [("f", {"x": 1})])
    rig = HttpRig(template=template("hermes", THINKING))
    _, choice = await asked(rig, chat(), f"I could {call}.</think>No. {call}")
    message = choice["message"]
    assert message["reasoning_content"] == f"I could {call}."
    assert (message["content"], len(message["tool_calls"])) == ("No.", 1)


async def test_one_call_is_delivered_without_parallel_calls() -> None:
    calls = written("hermes", [("g", {}), ("f", {"x": 1})])
    _, choice = await asked(HttpRig(template=template("hermes")), chat(parallel_tool_calls=False), calls)
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["g"]
    assert choice["message"]["content"].startswith('<tool_call>\n{"name": "f"')


def events_of(exchange: Exchange) -> list[Event]:
    return [event for event in exchange.events if not event.is_done]


def folded(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message of a stream's events, as clients put it together."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "reason": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for field in ("content", "reasoning_content"):
                found[field] += delta.get(field) or ""
            for part in delta.get("tool_calls", ()):
                call = found["calls"].setdefault(part["index"], {"arguments": ""})
                call |= {key: part[key] for key in ("id",) if key in part}
                call |= {key: part["function"][key] for key in ("name",) if key in part["function"]}
                call["arguments"] += part["function"]["arguments"]
            found["reason"] = found["reason"] or choice["finish_reason"]
    return found


TEXT = "so</think>Hm. " + written("hermes", [("f", {"x": 12}), ("g", {})]) + "\nEnd <tool"


async def test_a_stream_goes_on_from_each_of_its_events() -> None:
    rig = HttpRig(template=template("hermes", THINKING))
    body = chat(stream=True)
    headers = {"x-request-id": "r1"}
    exchange = rig.post(CHATS, body, headers)
    call = await rig.next_call()
    pieces = [TEXT[place : place + 3] for place in range(0, len(TEXT), 3)]
    call.tell(*(Chunk(place, (7,), piece) for place, piece in enumerate(pieces)), finished("stop", len(pieces)))
    whole = events_of(await exchange.end())
    expected = folded([event.json for event in whole])
    assert expected["content"] == "Hm.End <tool"
    assert expected["reason"] == "tool_calls"
    assert [one["name"] for one in expected["calls"].values()] == ["f", "g"]
    for place, event in enumerate(whole):
        if event.id is None:
            continue
        position = int(event.id)
        again = rig.post(CHATS, body, {**headers, "last-event-id": event.id})
        call = await rig.next_call()
        assert call.positions == (position,)
        known = [KnownText(index, (), piece) for index, piece in enumerate(pieces) if index < position]
        call.tell(
            *known,
            *(Chunk(index, (7,), piece) for index, piece in enumerate(pieces) if index >= position),
            finished("stop", len(pieces)),
        )
        rest = events_of(await again.end())
        assert folded([one.json for one in [*whole[: place + 1], *rest]]) == expected, event.id


async def test_text_that_came_without_tokens_is_not_sent_twice() -> None:
    """A stop string that was not completed is held until the end, where it may complete a call."""
    rig = HttpRig(template=template("hermes"))
    body, headers = chat(stream=True), {"x-request-id": "r1"}
    text = written("hermes", [("f", {"x": 1})])

    async def events(position: str | None, *chunks: Chunk) -> list[Any]:
        more = {} if position is None else {"last-event-id": position}
        return events_of(await rig.answered(CHATS, body, *chunks, finished("stop", 1), headers=headers | more))

    rest = Chunk(1, (), text[30:])
    whole = await events(None, Chunk(0, (7,), text[:30]), rest)
    expected = folded([event.json for event in whole])
    assert json.loads(expected["calls"][0]["arguments"]) == {"x": 1}
    assert whole[-1].id == "2"
    again = await events("1", KnownText(0, (), text[:30]), rest)
    assert folded([event.json for event in [*whole[:-1], *again]]) == expected
    again = await events("2", KnownText(0, (), text[:30]), rest)
    assert folded([event.json for event in [*whole, *again]]) == expected


async def test_each_sequence_has_its_own_calls_and_ids() -> None:
    rig = HttpRig(template=template("hermes"))
    text = written("hermes", [("f", {"x": 1})])
    ends = [SequenceFinished(index, "stop", None, len(text)) for index in range(2)]
    found = []
    for stream in (True, False):
        exchange = rig.post(CHATS, chat(n=2, stream=stream), {"x-request-id": "r1"})
        call = await rig.next_call()
        call.tell(*(chunk(0, text, index) for index in range(2)), *ends, finished("stop"))
        answer = await exchange.end()
        if stream:
            events = [event.json for event in events_of(answer)]
            found.append([folded(events, index)["calls"][0]["id"] for index in range(2)])
        else:
            found.append([choice["message"]["tool_calls"][0]["id"] for choice in answer.json["choices"]])
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


async def test_logprobs_and_token_ids_of_all_tokens_are_delivered() -> None:
    rig = HttpRig(template=template("hermes"))
    text = written("hermes", [("f", {"x": 1})])
    body = chat(stream=True, logprobs=True, return_token_ids=True)
    exchange = rig.post(CHATS, body)
    call = await rig.next_call()
    for place, letter in enumerate(text):
        call.tell(Chunk(place, (ord(letter),), letter, (TokenLogprobs(ord(letter), -1.0, 1, ()),)))
    call.tell(finished("stop"))
    choices = [choice for event in events_of(await exchange.end()) for choice in event.json["choices"]]
    tokens = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert "".join(tokens) == text
    assert [token for choice in choices for token in choice.get("token_ids", ())] == list(map(ord, text))
