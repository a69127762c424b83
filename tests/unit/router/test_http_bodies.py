"""HTTP bodies: every field, its bounds, and the name with which it is refused."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import MAX_BODY_CONTAINERS, MAX_BODY_DEPTH
from baton.messages.sampling import RepetitionDetection
from router.http.completions.bodies import ChatBody, CompletionBody
from router.http.completions.generation import GenerationBody, read_generation
from router.http.json_body import MAX_BODY_BYTES, parse_json
from tests.support.http_rig import CHATS, COMPLETIONS, EMBEDDINGS, HELLO, HttpRig

PROMPT = {"prompt": "ab"}

ALL = {
    "model": "demo",
    "n": 2,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": -1,
    "min_p": 0.25,
    "top_n_sigma": 1.5,
    "seed": 2**53,
    "presence_penalty": -1.5,
    "frequency_penalty": 1,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": -100, "8": 2.5},
    "allowed_token_ids": [7, 8],
    "bad_words": ["a", " b"],
    "prompt_logprobs": 3,
    "max_tokens": 5,
    "min_tokens": 1,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "best_of": 3,
    "beam_width": 4,
    "length_penalty": 0.5,
    "early_stopping": False,
    "repetition_detection": {"max_pattern_size": 8, "min_count": 5},
    "speculation": False,
    "priority": -3,
    "cache_salt": "salt",
    "ttft_slo_ms": 100,
    "tpot_slo_ms": 7.5,
}


def test_every_field_of_a_request_can_be_set_over_http() -> None:
    request = read_generation(CompletionBody, PROMPT | ALL).request("ab", "id", 5)
    expected = {
        **ALL,
        "logit_bias": {7: -100.0, 8: 2.5},
        "stop": ("a", "b"),
        "bad_words": ("a", " b"),
        "prompt": "ab",
        "request_id": "id",
        "logprobs": 5,
        "json_schema": None,
        "regex": None,
        "choice": (),
        "grammar": None,
        "repetition_detection": RepetitionDetection(8, 1, 5),
        # Who asks, and how urgently it may, is known from the key, and its trace from a header.
        "tenant": "",
        "min_priority": None,
        "service_class": "",
        "weight": 1.0,
        "is_further_part": False,
        "traceparent": "",
        # HTTP has no field for it: a stream that goes on is asked for with last-event-id.
        "call": 0,
        # Read by the endpoint, which knows how many bytes are taken.
        "prompt_embeds": (),
        # Follows from the endpoint and from `stream`.
        "delivery": "stream",
        # Parts of chats alone.
        "images": (),
        # Only forms have it.
        "audio": b"",
        # Asked for at a path of its own.
        "pooling": None,
        # Of chats with tools, or with reasoning, alone.
        "shown_tokens": (),
        "is_parsed": False,
        "reasoning": "none",
        "schemas": {},
        "constraint_field": "",
    }
    assert {field.name: getattr(request, field.name) for field in fields(GenerateRequest)} == expected


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_null_means_not_set(kind: type[GenerationBody]) -> None:
    """Clients in other languages send null for fields that are not set."""
    least = PROMPT if kind is CompletionBody else HELLO
    names = {field.alias or name for name, field in kind.model_fields.items()} - set(least)
    body = read_generation(kind, {**dict.fromkeys(names), **least})
    assert (
        body.request("ab", "id", None)
        == read_generation(kind, least).request("ab", "id", None)
        == GenerateRequest("ab", "id")
    )


WRONG: dict[str, list[object]] = {
    "max_tokenz": [1],
    "prompts": [["x"]],
    "n": [1.5, "1", True, [1]],
    "stream": [1],
    "temperature": ["1", True],
    "seed": [1.0],
    "logit_bias": [[1], {"x": 1}, {"": 1}, {"-1": 1}, {"²": 1}, {"1": "1"}, {"1": True}],
    "stop": [1, ["a", 1]],
    "stop_token_ids": [[True]],
    "allowed_token_ids": [[], [True]],
    "bad_words": ["a", [1]],
    "echo": [1],
    "prompt_logprobs": [True],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [1],
    "guided_json": [["x"]],
    "response_format": [{"type": "xml"}, "json"],
    "ttft_slo_ms": [0],
    "stream_options": [{"include_usage": True}],
    "use_beam_search": [1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_generation(CompletionBody, PROMPT | {field: value})
    assert caught.value.field.partition(".")[0].partition("[")[0] == field
    assert "Input should" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "must be"),
        (1, "must be"),
        ([], "must be"),
        ([1, "a"], "must be"),
        ([True], "must be"),
        ([1.0], "must be"),
        ([[1], [[2]]], "must be"),
        (["a"] * 33, "at most 32"),
    ],
)
def test_an_invalid_prompt_is_refused(prompt: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt: .*{says}"):
        read_generation(CompletionBody, {"prompt": prompt})


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a", ("a",)), ([1, 2], ([1, 2],)), (["a", "b"], ("a", "b")), ([[1], [2]], ([1], [2])), (["a", [1]], ("a", [1]))],
)
def test_prompts_are_accepted_in_every_form(prompt: object, found: object) -> None:
    assert read_generation(CompletionBody, {"prompt": prompt}).prompts == found


def saying(**message: object) -> dict[str, object]:
    return {"messages": [message]}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages[0].role", saying(role="king", content="x")),
        ("messages[0].role", saying(content="x")),
        ("messages[0].content", saying(role="user", content=1)),
        ("messages[0].content", saying(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}])),
        ("messages[0].content", saying(role="user", content=["x"])),
        ("messages[0].tool_calls[0].function", saying(role="assistant", tool_calls=[{"id": "x"}])),
        ("messages[0].colour", saying(role="user", content="x", colour="red")),
        ("messages", {}),
        ("messages", {"messages": []}),
        ("tools[0].function", HELLO | {"tools": [{"type": "function"}]}),
        ("tool_choice", HELLO | {"tool_choice": "always"}),
        ("modalities[0]", HELLO | {"modalities": ["audio"]}),
        ("chat_template", HELLO | {"chat_template": ["{{ x }}"]}),
        ("logprobs", HELLO | {"logprobs": 1}),
    ],
)
def test_a_bad_chat_or_message_is_named(field: str, body: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_generation(ChatBody, body)
    assert caught.value.field == field


def test_messages_copied_from_our_answers_are_accepted() -> None:
    answer = {"role": "assistant", "content": "yo", "refusal": None, "tool_calls": None, "audio": None}
    body = read_generation(
        ChatBody, {"messages": [answer, {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]}
    )
    assert [message.content for message in body.messages] == ["yo", "a\na"]


@pytest.mark.parametrize(
    ("sent", "width", "best_of"),
    [
        ({"use_beam_search": True, "n": 3}, 3, None),
        ({"use_beam_search": True, "best_of": 4}, 4, None),
        ({"use_beam_search": True, "beam_width": 5, "n": 2}, 5, None),
        ({"use_beam_search": False, "best_of": 2}, None, 2),
    ],
)
def test_vllms_parameters_for_beam_search_are_accepted(
    sent: dict[str, object], width: int | None, best_of: int | None
) -> None:
    request = read_generation(CompletionBody, PROMPT | sent).request("ab", "id", None)
    assert (request.beam_width, request.best_of) == (width, best_of)


@pytest.mark.parametrize(
    ("sent", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "é"}}}, {"type": "é"}),
    ],
)
def test_each_response_format_becomes_a_schema(sent: dict[str, object], schema: object) -> None:
    found = read_generation(ChatBody, HELLO | {"response_format": sent}).request("ab", "id", None).json_schema
    assert (None if found is None else json.loads(found)) == schema


@pytest.mark.parametrize("sent", [{"type": "json_schema"}, {"type": "json_object", "json_schema": {"schema": {}}}])
def test_an_incomplete_response_format_is_refused(sent: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"response_format\.json_schema"):
        read_generation(ChatBody, HELLO | {"response_format": sent}).request("ab", "id", None)


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        (b"", "body", "not JSON"),
        (b"{", "body", "not JSON"),
        (b"[]", "body", "object"),
        (b"\xff", "body", "UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "body", "not JSON"),
        (b'{"a": NaN}', "body", "NaN"),
        (b'{"a": -Infinity}', "body", "Infinity"),
        (b'{"a": 1e999}', "body", "too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "body", "too long"),
        (b'{"a": 1, "a": 2}', "a", "twice"),
        (b'{"x": {"b": 1, "b": 1}}', "b", "twice"),
        (b'{"a": ' + b"[" * MAX_BODY_DEPTH + b"]" * MAX_BODY_DEPTH + b"}", "body", "nested"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "body", "nested"),
        (b"[" * MAX_BODY_CONTAINERS, "body", "nested"),
    ],
)
def test_ambiguous_json_is_refused(body: bytes, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_json(body)
    assert caught.value.field == field


def test_json_of_the_maximum_depth_is_accepted() -> None:
    inside = MAX_BODY_DEPTH - 1
    assert parse_json(b'{"a": ' + b"[" * inside + b"]" * inside + b"}").keys() == {"a"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * 500_000, "500000 objects and arrays; at most 16384"),
        (b'{"prompt": [' + b"{}," * 300_000 + b"{}]}", "300003 objects and arrays; at most 16384"),
        (b'{"prompt": [' + b"[]," * 300_000 + b"[]]}", "300003 objects and arrays; at most 16384"),
        (b'{"stop": [' + b'"",' * 300_000 + b'""]}', "300002 strings; at most 65536"),
        (b'{"messages": [' + b'{"role":"user"},' * 65_522 + b'{"role":"user"}]}', "131047 strings; at most 65536"),
        (b'{"prompt": [' + b"1," * 500_000 + b"1]}", "500000 values; at most 262144"),
        (b"{" + b",".join(b'"%x": 1' % number for number in range(129)) + b"}", "129 fields; at most 128"),
    ],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_json(body)
    assert caught.value.field == "body"


def test_characters_inside_a_string_are_not_counted() -> None:
    text = '[{,"\\' * 30_000
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


USER = {"role": "user"}
MANY = dict.fromkeys(map(str, range(301)), 1)
SOME = dict.fromkeys(map(str, range(65)))


@pytest.mark.parametrize(
    ("kind", "fields", "refusal"),
    [
        (ChatBody, {"messages": [USER] * 4097}, "messages: has 4097 messages; at most 4096 are taken"),
        (ChatBody, {"messages": [{"role": "nobody"}] * 5000}, "messages: has 5000 messages; at most 4096 are taken"),
        (CompletionBody, {"prompt": [1] * 262_145}, "prompt: has 262145 token ids; at most 262144 are taken"),
        (CompletionBody, {"prompt": ["a"] * 33}, "prompt: has 33 prompts; at most 32 are taken"),
        (CompletionBody, {"prompt": [[]] * 100}, "prompt: has 100 prompts; at most 32 are taken"),
        (CompletionBody, PROMPT | {"stop": ["a"] * 17}, "stop: has 17 strings; at most 16 are taken"),
        (
            CompletionBody,
            PROMPT | {"stop_token_ids": [1.5] * 257},
            "stop_token_ids: has 257 entries; at most 256 are taken",
        ),
        (
            CompletionBody,
            PROMPT | {"allowed_token_ids": [1] * 4097},
            "allowed_token_ids: has 4097 entries; at most 4096 are taken",
        ),
        (CompletionBody, PROMPT | {"bad_words": ["a"] * 257}, "bad_words: has 257 texts; at most 256 are taken"),
        (CompletionBody, PROMPT | {"logit_bias": MANY}, "logit_bias: has 301 entries; at most 300 are taken"),
        (
            ChatBody,
            HELLO | {"chat_template_kwargs": SOME},
            "chat_template_kwargs: has 65 variables; at most 64 are taken",
        ),
    ],
)
def test_a_field_with_too_many_items_is_refused(
    kind: type[GenerationBody], fields: dict[str, object], refusal: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_generation(kind, fields)
    assert str(caught.value) == refusal


def test_a_very_long_unknown_field_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_generation(CompletionBody, PROMPT | {"stop_tokens" + "s" * 1000: 1})
    assert caught.value.reason == "is unknown"
    assert len(caught.value.field) < 100


def test_the_maximum_number_of_messages_is_accepted() -> None:
    assert len(read_generation(ChatBody, {"messages": [USER] * 4096}).messages) == 4096


@pytest.mark.parametrize(
    ("fields", "is_large"),
    [
        (PROMPT, False),
        ({"prompt": [1] * 1000}, False),
        ({"prompt": "a" * 20_000}, True),
        (PROMPT | {"metadata": {"x": [{}] * 300}}, True),
    ],
)
async def test_a_large_body_is_parsed_in_a_thread(fields: dict[str, object], is_large: bool) -> None:
    rig = HttpRig()
    await rig.asked(COMPLETIONS, fields)
    assert (rig.handler.num_in_threads > 0) == is_large


async def test_a_large_chat_and_large_embeddings_are_parsed_in_a_thread() -> None:
    rig = HttpRig()
    await rig.asked(CHATS, saying(role="user", content="a" * 20_000))
    assert rig.handler.num_in_threads == 2
    await rig.refused(EMBEDDINGS, {"input": [""] * 5000}, "input", "input: has 5000 inputs; at most 2048")
    assert rig.handler.num_in_threads == 4


async def test_bodies_of_a_wrong_size_or_content_type_are_refused() -> None:
    rig = HttpRig()
    kind = {"content-type": "application/json"}
    for body, headers, status in (
        (b" " * (MAX_BODY_BYTES + 1), kind, 413),
        (b"", kind | {"content-length": str(MAX_BODY_BYTES + 1)}, 413),
        (b" " * MAX_BODY_BYTES, kind, 400),
        (b"{}", {}, 415),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": "Application/JSON; charset=utf-8"}, 400),
        (b"{}", kind | {"x": "y" * 8192}, 431),
    ):
        exchange = await rig.request("POST", COMPLETIONS, body, headers).end()
        assert exchange.status == status, exchange.error
        assert exchange.error["type"] == "invalid_request_error"
        assert (exchange.headers.get("connection") == "close") == (status in (413, 431))


async def test_a_chat_with_invalid_unicode_is_refused() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode()
    await HttpRig().refused(CHATS, body, "messages")
