"""OpenAI's own client against /v1/responses on a real socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from baton.errors import EngineFault, QueueFull
from tests.support.http_rig import chunk, finished
from tests.support.router_parts import MODEL
from tests.support.served_http import Served, served

if TYPE_CHECKING:
    import openai
    from openai.types.responses import Response

HELLO: dict[str, Any] = {"model": MODEL, "input": "hi"}


async def made(one: Served, client: openai.AsyncOpenAI, text: str = "cd", **fields: Any) -> Response:
    answer = asyncio.create_task(client.responses.create(**HELLO | fields))
    (await one.rig.next_call()).tell(chunk(0, text), finished("stop"))
    response: Response = await answer
    return response


async def test_a_response_is_created_continued_read_and_deleted() -> None:
    import openai
    from openai.types.responses import Response

    async with served() as one, one.client() as client:
        first = await made(one, client)
        assert (first.output_text, first.status) == ("cd", "completed")
        assert first.usage is not None
        assert (first.usage.total_tokens, first.usage.input_tokens_details.cached_tokens) == (5, 1)
        # Its model takes what we answer, field by field.
        Response.model_validate(first.model_dump(), strict=False)
        second = await made(one, client, "ef", input="more", previous_response_id=first.id)
        items = await client.responses.input_items.list(second.id, limit=2, order="asc")
        listed = [item.content[0].text async for item in items]  # type: ignore[union-attr, index]
        assert listed == ["hi", "cd", "more"]
        assert (await client.responses.retrieve(first.id)).output_text == "cd"
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=r"kept for 60 s"):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError) as lost:
            await client.responses.create(**HELLO, previous_response_id=first.id)
        assert lost.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError, match="can't be cancelled"):
            await client.responses.cancel(second.id)


async def test_a_response_is_streamed() -> None:
    async with served() as one, one.client() as client:

        async def read() -> tuple[list[str], Response]:
            async with client.responses.stream(**HELLO) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                return deltas, await stream.get_final_response()

        reading = asyncio.create_task(read())
        (await one.rig.next_call()).tell(chunk(0, "c"), chunk(1, "d"), finished("stop"))
        deltas, response = await reading
        assert (deltas, response.output_text, response.status) == (["c", "d"], "cd", "completed")


async def test_an_answer_is_parsed_by_its_schema() -> None:
    class Pair(BaseModel):
        a: int

    async with served() as one, one.client() as client:
        answer = asyncio.create_task(client.responses.parse(**HELLO, text_format=Pair))
        call = await one.rig.next_call()
        assert call.request is not None
        assert '"a"' in (call.request.json_schema or "")
        call.tell(chunk(0, '{"a": 5}'), finished("stop"))
        assert (await answer).output_parsed == Pair(a=5)


async def test_closing_a_stream_ends_its_request() -> None:
    async with served() as one, one.client() as client:
        opening = asyncio.create_task(client.responses.create(**HELLO, stream=True))
        call = await one.rig.next_call()
        call.tell(chunk(0, "c"))
        stream = await opening
        assert (await anext(aiter(stream))).type == "response.created"
        await stream.close()
        await call.is_closed.wait()
        assert one.rig.store.stats().num_responses == 0


async def test_the_client_sees_the_end_of_a_stream_that_fails() -> None:
    async with served() as one, one.client() as client:
        opening = asyncio.create_task(client.responses.create(**HELLO, stream=True))
        (await one.rig.next_call()).tell(chunk(0, "c"), EngineFault("NaN"))
        events = [event async for event in await opening]
        told, failed = events[-2:]
        assert told.type == "error"
        assert (told.code, told.message) == ("engine_fault", "NaN")
        assert failed.type == "response.failed"
        assert failed.response.error is not None
        assert (failed.response.status, failed.response.error.message) == ("failed", "NaN")


async def test_the_client_retries_when_told_to() -> None:
    async with served() as one, one.client() as client:
        answer = asyncio.create_task(client.responses.create(**HELLO))
        (await one.rig.next_call()).tell(QueueFull("no room", 0.01))
        (await one.rig.next_call()).tell(chunk(0, "cd"), finished())
        assert (await answer).status == "incomplete"
