"""The openai client against a running cluster, as its users write it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.process.shell import Shell, refusal
from tests.support.http_streams import sse, text_of, tokens_of
from tests.support.process_cluster import ProcessCluster

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "tiny"
CHAT: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"http://{cluster.state.http_address}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def test_the_served_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_completion_equals_the_output_of_the_command(client: OpenAI, shell: Shell, cluster: ProcessCluster) -> None:
    answer = client.completions.create(**GREEDY, extra_body={"return_token_ids": True})
    ask = ("generate", "hello", "--temperature", 0, "--max-tokens", 8, "-o", "json")
    printed = json.loads(shell.baton(*ask, "--run-dir", cluster.run_dir).stdout)
    (choice,) = answer.choices
    assert choice.text == printed["text"]
    assert choice.token_ids == printed["token_ids"]
    assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 8)
    assert answer.usage.prompt_tokens == printed["usage"]["prompt_tokens"] == len(choice.prompt_token_ids)
    assert re.fullmatch("fp_[0-9a-f]{12}", answer.system_fingerprint or "")


def test_a_streamed_completion_equals_the_whole_one(client: OpenAI) -> None:
    whole = client.completions.create(**GREEDY, logprobs=2)
    events = list(client.completions.create(**GREEDY, logprobs=2, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    logprobs = [event.choices[0].logprobs for event in events if event.choices and event.choices[0].logprobs]
    assert [token for piece in logprobs for token in piece.tokens] == whole.choices[0].logprobs.tokens
    assert [value for piece in logprobs for value in piece.token_logprobs] == whole.choices[0].logprobs.token_logprobs
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_streamed_chat_equals_the_whole_one(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 6, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    texts = ["", ""]
    for event in client.chat.completions.create(**asked, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert [len(choice.logprobs.content) for choice in whole.choices] == [6, 6]
    assert all(len(token.top_logprobs) == 3 for token in whole.choices[0].logprobs.content)
    # What was answered can be sent back as it is.
    again = [*CHAT, whole.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    usage = client.chat.completions.create(model=MODEL, messages=again, max_tokens=3).usage
    assert usage is not None
    assert usage.completion_tokens == 3


def test_texts_and_token_ids_have_embeddings(client: OpenAI) -> None:
    import openai

    texts = ["hello", "something longer, of more than one block: " * 4, "h"]
    answer = client.embeddings.create(model=MODEL, input=texts)
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert all(sum(x * x for x in one.embedding) == pytest.approx(1) for one in answer.data)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > sum(map(len, texts)) / 8
    # The client asks for base64 by itself; as numbers, alone and again it is the same to the bit.
    for text, one in zip(texts, answer.data, strict=True):
        again = client.embeddings.create(
            model=MODEL, input=text, encoding_format="float", dimensions=len(one.embedding), user="me"
        )
        assert again.data[0].embedding == one.embedding
    ids = [[5, 6, 7], [5, 6, 8]]
    first, second = client.embeddings.create(model=MODEL, input=ids).data
    assert first.embedding != second.embedding
    assert client.embeddings.create(model=MODEL, input=ids[1]).data[0].embedding == second.embedding
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": ["x", ""]}, "input"),
        ({"input": "x", "dimensions": 3}, "dimensions"),
    ]
    for bad, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model=MODEL, **bad)
        assert refused.value.param == param


def test_errors_are_raised_as_the_openai_clients_exceptions(client: OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="another", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=MODEL, prompt="x", extra_body={"max_tokenz": 1})
    assert unknown.value.param == "max_tokenz"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError) as no_schema:
        client.chat.completions.create(model=MODEL, messages=CHAT, response_format=schema)  # type: ignore[call-overload]
    assert no_schema.value.param == "response_format"
    late = {"x-request-timeout-ms": "1"}
    # An answer that is there when a router without a core gets one again is given, late or not: this one is long.
    long = {**GREEDY, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.InternalServerError) as deadline:
        client.completions.create(**long, extra_headers=late)
    assert deadline.value.status_code == 504


def test_a_cut_stream_continues_after_its_last_event(cluster: ProcessCluster) -> None:
    url = f"http://{cluster.state.http_address}/v1/chat/completions"
    body = {"messages": CHAT, "max_tokens": 12, "n": 2, "seed": 5, "stream": True, "return_token_ids": True}
    whole = sse(url, body, {"x-request-id": "whole"})
    for cut in (1, 5, 13, len(whole) - 2):
        name = {"x-request-id": f"cut-{cut}"}
        first = sse(url, body, name, limit=cut)
        rest = sse(url, body, {**name, "last-event-id": first[-1][0]})
        for index in (0, 1):
            assert tokens_of(first, index) + tokens_of(rest, index) == tokens_of(whole, index)
            assert text_of(first, index) + text_of(rest, index) == text_of(whole, index)
        assert rest[-1][1] == "[DONE]"


async def test_a_client_that_leaves_in_mid_stream_frees_all_blocks(client: OpenAI, cluster: ProcessCluster) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": 40,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    with client.completions.create(**asked) as stream:
        assert next(iter(stream)).choices[0].index == 0
    async with cluster.session() as session:
        await session.wait_until_idle()


def test_a_running_router_serves_its_pages(cluster: ProcessCluster, shell: Shell) -> None:
    def page(path: str) -> str:
        with urllib.request.urlopen(f"http://{cluster.state.http_address}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    assert page("/livez") == page("/readyz") == page("/health") == "ok\n"
    figures = page("/metrics")
    for name in ("num_requests_running", "num_requests_waiting", "request_success_total", "node_up"):
        assert f"\nbaton_{name}{{" in figures
    assert cluster.state.http_address in shell.baton("get", "nodes", "-o", "wide", "--run-dir", cluster.run_dir).stdout


def test_a_second_router_on_the_http_port_is_refused_with_advice(shell: Shell, cluster: ProcessCluster) -> None:
    port = cluster.state.http_address.rpartition(":")[2]
    said = refusal(shell.baton("up", "--grpc-port", 0, "--http-port", port, "--run-dir", shell.home / "another"), 78)
    assert said == f"port {port} on 127.0.0.1 is in use: choose another with --http-port, 0 takes a free one"
