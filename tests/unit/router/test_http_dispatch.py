"""The HTTP front with the dispatcher and scripted nodes: what a client does reaches the nodes at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.errors import TransferCause
from baton.messages.node import Outcome, RequestDelta
from baton.messages.sampling import Constraint, TokenLogprobs
from baton.text.chat_template import DEFAULT_TEMPLATE
from router.admission.limits import DispatchLimits
from router.front import GenerationHandler
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.http_client import AsgiClient, Exchange
from tests.support.http_rig import CARD, HttpRig
from tests.support.router_parts import MODEL, decode, prefill
from tests.support.router_rig import RouterRig, router_rig

COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "hello", "max_tokens": 4}


@asynccontextmanager
async def rigs(
    limits: DispatchLimits | None = None,
    chat_template: str = DEFAULT_TEMPLATE,
    num_blocks: int = 64,
    codec: FakeTokenizer | None = None,
) -> AsyncIterator[tuple[RouterRig, AsgiClient]]:
    nodes = [node(num_blocks=num_blocks) for node in (prefill, decode)]
    codec = codec or FakeTokenizer()
    async with router_rig(*nodes, limits=limits, codec=codec) as rig:
        handler = GenerationHandler(rig.dispatcher, codec, lambda: CARD)
        yield rig, AsgiClient(HttpRig(vocabulary=codec).front(handler, 1000.0, chat_template))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_at_both_nodes_at_once(stream: bool) -> None:
    async with rigs() as (rig, client):
        exchange = client.post(COMPLETIONS, PROMPT | {"stream": stream})
        attempt = await rig.next_attempt("p1", "d1")
        rig.report("p1", attempt, 0, "a")
        await rig.nodes["p1"].all_read()
        exchange.disconnect()
        assert await rig.next_aborts("p1", "d1") == attempt
        await exchange.task
        assert rig.requests.num_live == 0


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_receives_the_cause_of_a_failed_kv_transfer(has_begun: bool) -> None:
    async with rigs() as (rig, client):
        exchange = client.post(COMPLETIONS, PROMPT | {"stream": True})
        attempt = await rig.next_attempt("p1", "d1")
        if has_begun:
            rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        lost = RequestDelta(attempt, outcome=Outcome.ERROR, error="gone", transfer_cause=TransferCause.PEER_GONE)
        rig.nodes["d1"].report(lost)
        answer = await exchange.end()
        if has_begun:
            *_, last = answer.events
            found = last.json["error"]
        else:
            assert answer.status == 503
            found = answer.json["error"]
        assert (found["code"], found["message"]) == ("kv_transfer_peer_gone", "KV transfer failed: peer_gone (gone)")


@pytest.mark.parametrize("how", ["whole", "stream", "echo"])
async def test_texts_and_offsets_of_completions_continue_their_prompts(how: str) -> None:
    """The tokenizer leaves out the blank with which a text begins, and token 0 is special: a text begins behind it."""
    prompts = [[32, 97, 98], [99, 0]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "logprobs": 0}
    more = {"whole": {}, "stream": {"stream": True}, "echo": {"echo": True}}[how]
    async with rigs(codec=FakeTokenizer(drops_blank=True)) as (rig, client):
        exchange = client.post(COMPLETIONS, body | more)
        for prompt in prompts:
            attempt = await rig.next_attempt("p1", "d1")
            of_prompt = [TokenLogprobs(token, -1.0, 1, ()) for token in prompt[1:]] if how == "echo" else []
            rig.report("p1", attempt, 0, " ", Outcome.HANDED_OFF, logprob=-1.0, prompt_logprobs=of_prompt)
            for index in range(2):
                rig.report("d1", attempt, 0, " x", Outcome.LENGTH, logprob=-1.0, sequence_index=index)
        await exchange.end()
    choices = [event.choice for event in exchange.events[:-1]] if how == "stream" else exchange.json["choices"]
    texts, offsets = ["", "", "", ""], [list[int](), [], [], []]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"] if choice["logprobs"] is not None else []
    if how == "echo":
        assert texts == ["ab x"] * 2 + ["c\0x"] * 2
        assert offsets == [[0, 0, 1, 2, 3]] * 2 + [[0, 1, 2, 2]] * 2
    else:
        assert texts == [" x"] * 2 + ["x"] * 2
        assert offsets == [[0, 1]] * 2 + [[0, 0]] * 2


async def test_a_client_that_reads_nothing_is_given_up_and_frees_the_nodes() -> None:
    limits = DispatchLimits(max_backlog_tokens=2, stall_s=30.0)
    async with rigs(limits) as (rig, client):
        exchange = client.post(COMPLETIONS, PROMPT | {"stream": True, "max_tokens": 16})
        attempt = await rig.next_attempt("p1", "d1")
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        await exchange.wait_for_events(1)
        exchange.stop_reading()
        rig.report("d1", attempt, 1, "b")
        await exchange.is_stuck.wait()
        rig.report("d1", attempt, 2, "cde")
        await rig.nodes["d1"].all_read()
        rig.timers.advance(31.0)
        await rig.next_abort("d1")
        exchange.resume_reading()
        await exchange.end()
        assert exchange.events[-1].json["error"]["code"] == "slow_reader"


LONG = "x" * 70
TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": (COMPLETIONS, {"prompt": LONG}, "prompt"),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    "response": ("/v1/responses", {"input": LONG}, "input"),
    "embedding": ("/v1/embeddings", {"input": LONG}, "input"),
    "output": (COMPLETIONS, {"prompt": "hello", "max_tokens": 60}, "max_tokens"),
    "output of a response": ("/v1/responses", {"input": "hi", "max_output_tokens": 60}, "max_output_tokens"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", TOO_LONG)
async def test_agents_see_by_openais_words_that_they_have_to_shorten_a_conversation(case: str, stream: bool) -> None:
    path, body, param = TOO_LONG[case]
    async with rigs() as (_, client):
        answer = await client.post(path, body | ({"stream": True} if stream and case != "embedding" else {})).end()
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "context_length_exceeded")
    assert "This model's maximum context length is 64 tokens" in answer.error["message"]
    # LangChain looks for the code in the text of the error of OpenAI's client, which is the message alone.
    assert "context_length_exceeded" in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "num_blocks", "words"),
    [
        (LONG, 5, 64, "prompt is too long: 87 tokens > 63 maximum"),
        ("x" * 24, 5, 8, "prompt is too long: 41 tokens > 32 maximum"),
        ("x", 40, 8, "input length and `max_tokens` exceed context limit: 18 + 40 > 32, decrease"),
    ],
)
async def test_agents_see_by_anthropics_words_what_they_have_to_shorten(
    prompt: str, max_tokens: int, num_blocks: int, words: str, stream: bool
) -> None:
    body = {"max_tokens": max_tokens, "messages": [{"role": "user", "content": prompt}], "stream": stream}
    async with rigs(num_blocks=num_blocks) as (_, client):
        answer = await client.post("/v1/messages", {"model": MODEL, **body}).end()
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json["error"]["message"].startswith(words)


MESSAGES = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
STREAMS: list[tuple[str, dict[str, object], str]] = [
    ("/v1/messages", MESSAGES, "content_block_delta"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, "response.output_text.delta"),
]


@pytest.mark.parametrize(("path", "body", "delta"), STREAMS)
async def test_a_stream_of_every_api_goes_on_after_its_node_is_lost(
    path: str, body: dict[str, object], delta: str
) -> None:
    async with rigs() as (rig, client):
        rig.register(prefill("p1"), decode("d1"), decode("d2"))
        await rig.wait_until_attached(3)
        exchange = client.post(path, body | {"stream": True})
        attempt = await rig.next_attempt("p1")
        lost = next(name for name in ("d1", "d2") if not rig.nodes[name].inbox.empty())
        other = "d2" if lost == "d1" else "d1"
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        rig.report(lost, attempt, 1, "b")
        await exchange.wait_until_sent(lambda: text_of(exchange, delta) == "ab")
        rig.nodes[lost].die()
        second = await rig.next_submit(other)
        assert list(second.output_token_ids) == [97, 98]
        rig.report(other, second.attempt, 2, "cd", Outcome.LENGTH)
        await exchange.end()
        assert text_of(exchange, delta) == "abcd"


def text_of(exchange: Exchange, kind: str) -> str:
    """The text that a stream has so far; `kind`: the events that have it as their delta."""
    deltas = [event.json["delta"] for event in exchange.events if event.name == kind]
    return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)


CONSTRAINTS: dict[str, tuple[dict[str, object], Constraint, str]] = {
    "regex": ({"structured_outputs": {"regex": "[a-d]{4}"}}, Constraint("[a-d]{4}", "regex"), "abcd"),
    "choice": ({"structured_outputs": {"choice": ["abcd", "ab"]}}, Constraint('["abcd", "ab"]', "choice"), "abcd"),
    "grammar": ({"guided_grammar": 'start: "ab" /c/ "d"'}, Constraint('start: "ab" /c/ "d"', "grammar"), "abcd"),
    "json_schema": ({"guided_json": {"type": "string"}}, Constraint('{"type":"string"}'), '"ab"'),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_a_constrained_stream_goes_on_under_its_constraint_after_its_node_is_lost(kind: str) -> None:
    """The node that continues gets the constraint and the whole text so far, so that it can go on within both."""
    fields, constraint, text = CONSTRAINTS[kind]
    async with rigs() as (rig, client):
        rig.register(prefill("p1"), decode("d1"), decode("d2"))
        await rig.wait_until_attached(3)
        exchange = client.post(COMPLETIONS, PROMPT | {"stream": True, "max_tokens": 9, **fields})
        first = await rig.next_submit("p1")
        lost = next(name for name in ("d1", "d2") if not rig.nodes[name].inbox.empty())
        other = "d2" if lost == "d1" else "d1"
        rig.report("p1", first.attempt, 0, text[0], Outcome.HANDED_OFF)
        rig.report(lost, first.attempt, 1, text[1])
        await exchange.wait_until_sent(lambda: "".join(event.text for event in exchange.events) == text[:2])
        submits = [first, await rig.next_submit(lost)]
        rig.nodes[lost].die()
        submits.append(await rig.next_submit(other))
        assert [submit.spec.sampling_params.constraint for submit in submits] == [constraint] * 3
        assert list(submits[2].output_token_ids) == list(map(ord, text[:2]))
        rig.report(other, submits[2].attempt, 2, text[2:] + "\x03", Outcome.STOP, stop_token_id=3)
        *events, done = (await exchange.end()).events
        assert "".join(event.text for event in events) == text
        assert events[-1].choice["finish_reason"] == "stop"
        assert done.is_done
        rig.dispatcher.close()


STRICT = {"name": "f", "strict": True}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
SHORT_PROMPT = (
    "{# <tool_call> #}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
)
HELLO = [{"role": "user", "content": "hi"}]
STRICT_CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HELLO,
        "tools": [{"type": "function", "function": STRICT | {"parameters": SCHEMA}}],
    },
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", "parameters": SCHEMA} | STRICT]},
    "/v1/messages": {"model": MODEL, "max_tokens": 9, "messages": HELLO, "tools": [STRICT | {"input_schema": SCHEMA}]},
}
STRICT_FIELDS = {"/v1/chat/completions": "tools[0].function.strict"}
DEMANDS = {"/v1/messages": {"type": "any"}}
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"guided_choice": ["x" * 200]}, "guided_choice"),
    "/v1/responses": ({"text": {"format": {"type": "json_schema", "schema": {"title": "x" * 200}}}}, "text.format"),
    "/v1/messages": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"title": "x" * 200}}}},
        "output_config.format",
    ),
}


@pytest.mark.parametrize("asks_for", ["strict", "call", "format"])
@pytest.mark.parametrize("checked_by", ["router.admission.sampling", "baton.text.constraint_checker"])
@pytest.mark.parametrize("path", STRICT_CALLS)
async def test_a_refused_constraint_is_named_as_the_client_asked_for_it(
    path: str, checked_by: str, asks_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{checked_by}.MAX_SCHEMA_BYTES", 100)
    monkeypatch.setattr(f"{checked_by}.MAX_CHOICE_JSON_BYTES", 100, raising=False)
    more, field = {
        "strict": ({}, STRICT_FIELDS.get(path, "tools[0].strict")),
        "call": ({"tool_choice": DEMANDS.get(path, "required")}, "tool_choice"),
        "format": FORMATS[path],
    }[asks_for]
    async with rigs(chat_template=SHORT_PROMPT) as (rig, client):
        refused = await client.post(path, STRICT_CALLS[path] | more).end()
        assert refused.status == 400
        error = refused.json["error"]
        named, _, reason = error["message"].partition(": ")
        assert (named, error.get("param", field)) == (field, field)
        assert "at most 100 are taken" in reason
        rig.dispatcher.close()


TEXT_FORMATS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}},
    ],
    "/v1/responses": [FORMATS["/v1/responses"][0]],
    "/v1/messages": [FORMATS["/v1/messages"][0]],
}


@pytest.mark.parametrize("path", STRICT_CALLS)
async def test_a_demanded_call_takes_the_place_of_the_format_of_the_text(path: str) -> None:
    for form in ({}, *TEXT_FORMATS[path]):
        body = STRICT_CALLS[path] | {"tool_choice": DEMANDS.get(path, "required")} | form
        request = await HttpRig(template=SHORT_PROMPT).asked(path, body)
        assert (request.json_schema, request.constraint_field) == (None, "tool_choice")
        assert "<tool_call>" in (request.grammar or "")
