"""Fields of a request that this front serves by itself: token ids, truncation, structured outputs, the fingerprint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import EngineFault
from baton.messages.generation import Chunk, SequenceFinished
from baton.messages.sampling import TokenLogprobs
from baton.text.constraints.structural_tags import lark_of_structural_tag
from tests.support.http_rig import (
    CARD,
    CHATS,
    COMPLETIONS,
    EMBEDDINGS,
    HELLO,
    HttpRig,
    chunk,
    finished,
    text_of,
    vector,
)

RENDERED = "user: hi\nassistant:"
SCHEMA: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_the_ids_of_prompt_and_output_are_returned() -> None:
    body: dict[str, object] = {"prompt": "ab", "return_token_ids": True}
    answer = (await HttpRig().answered(COMPLETIONS, body, chunk(0, "cd"), finished())).json
    assert (answer["choices"][0]["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([97, 98], [99, 100])
    chat = (await HttpRig().answered(CHATS, {**HELLO, "return_token_ids": True}, chunk(0, "cd"), finished())).json
    assert text_of(chat["prompt_token_ids"]) == RENDERED
    assert "prompt_token_ids" not in chat["choices"][0]


async def test_a_stream_returns_the_prompts_ids_once() -> None:
    pieces = (chunk(0, "c"), chunk(0, "x", 1), chunk(1, "d"), SequenceFinished(0, "stop", None, 2))
    ends = SequenceFinished(1, "stop", None, 1)
    body: dict[str, object] = {"stream": True, "n": 2, "return_token_ids": True}
    *events, _ = (await HttpRig().answered(COMPLETIONS, {"prompt": "ab", **body}, *pieces, ends, finished())).events
    assert [event.choice.get("prompt_token_ids") for event in events] == [[97, 98], None, None, None, None]
    for usage in (True, False):
        options = {"stream_options": {"include_usage": usage}}
        *events, _ = (await HttpRig().answered(CHATS, {**HELLO, **body, **options}, *pieces, ends, finished())).events
        told = [event.json["prompt_token_ids"] for event in events if "prompt_token_ids" in event.json]
        assert [text_of(ids) for ids in told] == [RENDERED]
        assert "prompt_token_ids" in events[0].json


async def test_each_of_several_prompts_has_its_ids_in_its_first_choice() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, {"prompt": ["a", [98]], "n": 2, "return_token_ids": True})
    for _ in range(2):
        (await rig.next_call()).tell(
            chunk(0, "c"), chunk(0, "d", 1), *(SequenceFinished(n, "stop", None, 1) for n in (0, 1)), finished()
        )
    choices = (await exchange.end()).json["choices"]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[97], None, [98], None]


async def test_log_probabilities_may_name_tokens_by_their_ids() -> None:
    positions = (TokenLogprobs(99, -0.5, 1, ((99, -0.5), (100, -1.5))),)
    body: dict[str, object] = {"prompt": "ab", "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = (await HttpRig().answered(COMPLETIONS, body, Chunk(0, (99,), "c", positions), finished())).json[
        "choices"
    ][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:99"]
    assert logprobs["top_logprobs"] == [{"token_id:99": -0.5, "token_id:100": -1.5}]
    chat = {**HELLO, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "stream": True}
    events = (await HttpRig().answered(CHATS, chat, Chunk(0, (99,), "c", positions), finished())).events
    assert events[1].choice["logprobs"]["content"][0]["token"] == "token_id:99"
    assert events[1].choice["delta"] == {"content": "c"}


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "abc", "truncate_prompt_tokens": 2}, "bc"),
        ({"prompt": [97, 98, 99], "truncate_prompt_tokens": 2}, "bc"),
        ({"prompt": "abc", "truncate_prompt_tokens": 3}, "abc"),
        ({"prompt": "abc", "truncate_prompt_tokens": 1000}, "abc"),
        ({"prompt": "a" * 100 + "b", "truncate_prompt_tokens": -1, "max_tokens": 60}, "aaab"),
        ({"prompt": "a" * 100 + "b", "truncate_prompt_tokens": -1}, "a" * 47 + "b"),
        ({"prompt": "a" * 100 + "b", "truncate_prompt_tokens": -1, "max_tokens": 0, "echo": True}, "a" * 62 + "b"),
        ({**HELLO, "truncate_prompt_tokens": 4}, "ant:"),
        ({**HELLO, "truncate_prompt_tokens": -1, "max_completion_tokens": 60}, "ant:"),
    ],
)
async def test_only_the_last_tokens_of_a_prompt_are_used(body: dict[str, object], prompt: str) -> None:
    request = await HttpRig().asked(CHATS if "messages" in body else COMPLETIONS, body)
    assert text_of(request.prompt) == prompt


async def test_only_the_last_tokens_of_an_input_are_embedded() -> None:
    for body, prompt in (
        ({"input": "abc", "truncate_prompt_tokens": 2}, [98, 99]),
        ({"input": [1] * 70, "truncate_prompt_tokens": -1}, [1] * 64),
    ):
        assert (await HttpRig().asked(EMBEDDINGS, body, end=vector(1, 0))).prompt == prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "response_format": {"type": "text"}},
    ],
)
async def test_vllms_names_constrain_an_answer_to_a_schema(fields: dict[str, object]) -> None:
    assert json.loads((await HttpRig().asked(COMPLETIONS, {"prompt": "a", **fields})).json_schema or "") == SCHEMA


@pytest.mark.parametrize(("kind", "value"), [("regex", "a+"), ("choice", ("a", "b", "a")), ("grammar", 'start: "a"')])
async def test_vllms_names_constrain_an_answer_in_other_ways(kind: str, value: object) -> None:
    sent = list(value) if isinstance(value, tuple) else value
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHATS, HELLO)):
        for fields in ({"structured_outputs": {kind: sent}}, {f"guided_{kind}": sent}):
            request = await HttpRig().asked(path, {**prompt, **fields})
            assert getattr(request, kind) == value
            assert request.json_schema is None


TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "b"}}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}


@pytest.mark.parametrize("tag", [TAG, OLDER_TAG], ids=["new", "older"])
async def test_a_structural_tag_becomes_a_grammar(tag: dict[str, object]) -> None:
    ways: list[dict[str, object]] = [
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": tag}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ]
    for fields in ways:
        request = await HttpRig().asked(CHATS, {**HELLO, **fields})
        assert request.grammar == lark_of_structural_tag(json.dumps(tag), "")
        assert request.json_schema is None


async def test_any_json_object_may_be_wanted_in_vllms_words() -> None:
    request = await HttpRig().asked(CHATS, {**HELLO, "structured_outputs": {"json_object": True}})
    assert json.loads(request.json_schema or "") == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "grammar": 'start: "a"'}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 10_001}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 1}}, "structured_outputs.grammar"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": 1}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": TAG, "regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"response_format": TAG | {"format": {"type": "token"}}}, "response_format.format.type"),
        ({"response_format": TAG | {"type": "text"}}, "response_format.format"),
        ({"response_format": TAG | {"json_schema": {"schema": SCHEMA}}}, "response_format.json_schema"),
        ({"response_format": OLDER_TAG | {"triggers": []}}, "response_format.triggers"),
        ({"response_format": TAG, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": 1}, "guided_json"),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}}, "guided_json"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ],
)
async def test_a_wrong_value_is_named(fields: dict[str, Any], param: str) -> None:
    await HttpRig().refused(COMPLETIONS, {"prompt": "a", **fields}, param)


async def test_every_answer_and_event_has_the_fingerprint_of_the_nodes() -> None:
    assert CARD.fingerprint
    asked_of: list[tuple[str, dict[str, object]]] = [(COMPLETIONS, {"prompt": "a"}), (CHATS, HELLO)]
    for path, body in asked_of:
        assert (await HttpRig().answered(path, body, chunk(0, "b"), finished())).json[
            "system_fingerprint"
        ] == CARD.fingerprint
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, _ = (await HttpRig().answered(path, {**body, **options}, chunk(0, "b"), finished())).events
        assert {event.json["system_fingerprint"] for event in events} == {CARD.fingerprint}


async def test_many_sequences_are_asked_for_and_answered() -> None:
    many = 128
    pieces = [chunk(0, "ab", index) for index in range(many)]
    ends = [SequenceFinished(index, "length", None, 2) for index in range(many)]
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHATS, HELLO)):
        body = {**prompt, "n": many, "max_tokens": 2}
        assert (await HttpRig().asked(path, body)).n == many
        answer = (await HttpRig().answered(path, body, *pieces, *ends, finished())).json
        assert [choice["index"] for choice in answer["choices"]] == list(range(many))
        exchange = await HttpRig().answered(path, {**body, "stream": True}, *pieces, *ends, finished())
        *events, _ = exchange.events
        assert {event.choice["index"] for event in events} == set(range(many))
        assert events[-1].id == ".".join(["2"] * many)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 3, "n": 86}, "n"),
        ({"prompt": ["a"] * 3, "best_of": 86}, "best_of"),
        ({"prompt": ["a"] * 32, "n": 8, "max_tokens": 8193}, "max_tokens"),
        ({"prompt": ["a"] * 32, "n": 8, "max_tokens": 1024, "logprobs": 20}, "max_tokens"),
    ],
)
async def test_a_call_is_refused_before_it_begins_if_its_output_may_be_too_large(
    fields: dict[str, object], param: str
) -> None:
    exchange = await HttpRig().post(COMPLETIONS, {"prompt": "a", **fields}).end()
    assert (exchange.status, exchange.json["error"]["param"]) == (400, param)


async def test_a_chat_of_many_sequences_has_a_default_length_within_the_bound() -> None:
    request = await HttpRig().asked(CHATS, {**HELLO, "n": 128})
    assert request.max_tokens == min(CARD.max_model_len - len(request.prompt or ()), (1 << 21) // 128)


@pytest.mark.parametrize("path", [CHATS, "/tokenize"])
async def test_an_answer_may_continue_the_last_message(path: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, I"}]
    body: dict[str, object] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    if path == CHATS:
        found = (await HttpRig().asked(path, body)).prompt
    else:
        found = (await HttpRig().post(path, body).end()).json["tokens"]
    assert text_of(found) == "user: hi\nassistant: Well, I"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
async def test_what_has_no_text_is_not_continued(fields: dict[str, Any], param: str) -> None:
    await HttpRig().refused(CHATS, {**HELLO, "continue_final_message": True, **fields}, param)


async def test_several_prompts_are_streamed_as_one() -> None:
    rig = HttpRig()
    options = {"stream": True, "n": 2, "echo": True, "return_token_ids": True}
    exchange = rig.post(COMPLETIONS, {"prompt": ["ab", "c"], **options, "stream_options": {"include_usage": True}})
    calls = await rig.next_calls(2)
    for call in reversed(calls):
        for place in range(2):
            call.tell(chunk(0, call.request_id[-1] + "xy"[place], place), SequenceFinished(place, "stop", None, 2))
        call.tell(finished("stop", 4))
    *events, usage, done = (await exchange.end()).events
    texts, reasons = dict.fromkeys(range(4), ""), {}
    for event in events:
        texts[event.choice["index"]] += event.text
        reasons[event.choice["index"]] = event.choice["finish_reason"]
    name = exchange.headers["x-request-id"]
    assert [call.request_id for call in calls] == [f"{name}-0", f"{name}-1"]
    assert texts == {0: "ab0x", 1: "ab0y", 2: "c1x", 3: "c1y"}
    assert reasons == dict.fromkeys(range(4), "stop")
    told = {one.choice["index"]: ids for one in events if (ids := one.choice.get("prompt_token_ids"))}
    assert told == {0: [97, 98], 2: [99]}
    assert (usage.json["usage"]["completion_tokens"], usage.json["usage"]["prompt_tokens"]) == (8, 6)
    assert done.is_done


async def test_the_ends_of_single_sequences_of_several_prompts_are_told() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": True})
    for place in range(2):
        (await rig.next_call()).tell(chunk(0, "xy"[place]), finished("length"))
    *events, _ = (await exchange.end()).events
    ends = {event.choice["index"]: event.choice["finish_reason"] for event in events if event.choice["finish_reason"]}
    assert ends == {0: "length", 1: "length"}


@pytest.mark.parametrize("end", [EngineFault("broken"), None])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_one_failed_prompt_ends_the_stream_of_several(has_begun: bool, end: EngineFault | None) -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": True})
    calls = await rig.next_calls(2)
    if has_begun:
        calls[0].tell(chunk(0, "x"))
        await exchange.wait_for_events(1)
    calls[1].tell(end)
    await exchange.end()
    found = exchange.events[-1].json["error"] if has_begun else exchange.error
    assert found["message"] == ("the stream ended before its request did" if end is None else "broken")
    assert exchange.status == (200 if has_begun else 500)
    await calls[0].is_closed.wait()
