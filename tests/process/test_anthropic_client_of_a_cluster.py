"""The anthropic client against a running cluster, as its users write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.process_cluster import ProcessCluster

if TYPE_CHECKING:
    from anthropic import Anthropic

MODEL = "tiny"
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    url = f"http://{cluster.state.http_address}"
    with Anthropic(base_url=url, api_key="any", max_retries=0, _strict_response_validation=True) as opened:
        yield opened


def test_a_message_is_the_chats_answer(client: Anthropic, cluster: ProcessCluster) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"http://{cluster.state.http_address}/v1", api_key="any") as other:
        chat = other.chat.completions.create(model=MODEL, messages=GREEDY["messages"], max_tokens=8, temperature=0)
    message = client.messages.create(**GREEDY)
    assert [block.text for block in message.content if block.type == "text"] == [chat.choices[0].message.content]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    counted = client.messages.count_tokens(model=MODEL, messages=GREEDY["messages"])
    assert chat.usage is not None
    assert counted.input_tokens == chat.usage.prompt_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_a_streamed_message_equals_the_whole_one(client: Anthropic) -> None:
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content if block.type == "text"] == [text]
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_errors_are_raised_as_the_anthropic_clients_exceptions(client: Anthropic) -> None:
    import anthropic

    image: Any = [{"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="not fetched from elsewhere"):
        client.messages.create(**GREEDY | {"messages": [{"role": "user", "content": image}]})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**GREEDY | {"model": "another"})
    with pytest.raises(anthropic.InternalServerError) as late:
        client.messages.create(**GREEDY | {"max_tokens": 300}, extra_headers={"x-request-timeout-ms": "1"})
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")


async def test_closing_a_stream_frees_all_blocks(client: Anthropic, cluster: ProcessCluster) -> None:
    with client.messages.stream(**GREEDY | {"max_tokens": 400}) as stream:
        assert next(iter(stream)).type == "message_start"
    async with cluster.session() as session:
        await session.wait_until_idle()
