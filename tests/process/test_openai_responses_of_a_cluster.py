"""The openai client's responses against a running cluster, as its users write it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.process_cluster import ProcessCluster

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "temperature": 0}


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"http://{cluster.state.http_address}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def test_a_conversation_of_responses_equals_the_chat(client: OpenAI) -> None:
    first = client.responses.create(**GREEDY)
    second = client.responses.create(**GREEDY | {"input": "more"}, previous_response_id=first.id)
    turns: list[Any] = [{"role": "user", "content": "hello"}]
    for response, said in ((first, "more"), (second, "")):
        chat = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=8, temperature=0)
        assert response.output_text == chat.choices[0].message.content
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        turns += [{"role": "assistant", "content": response.output_text}, {"role": "user", "content": said}]


def test_a_streamed_response_equals_the_whole_one(client: OpenAI) -> None:
    whole = client.responses.create(**GREEDY, include=["message.output_text.logprobs"], top_logprobs=2)
    with client.responses.stream(**GREEDY, include=["message.output_text.logprobs"], top_logprobs=2) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    content = [response.output[0].content[0] for response in (whole, last.response)]  # type: ignore[union-attr, index]
    assert content[0].model_dump(exclude={"parsed"}) == content[1].model_dump(exclude={"parsed"})
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_stored_responses_are_figures_of_the_router(client: OpenAI, cluster: ProcessCluster) -> None:
    import openai

    def stored() -> float:
        with urllib.request.urlopen(f"http://{cluster.state.http_address}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith("baton_stored_responses{")).rpartition(" ")[2])

    before = stored()
    made = client.responses.create(**GREEDY)
    assert stored() == before + 1
    client.responses.delete(made.id)
    assert stored() == before
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


async def test_closing_a_stream_frees_all_blocks(client: OpenAI, cluster: ProcessCluster) -> None:
    with client.responses.create(**GREEDY | {"max_output_tokens": 400}, stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
    async with cluster.session() as session:
        await session.wait_until_idle()
