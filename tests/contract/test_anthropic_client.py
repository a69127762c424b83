"""Anthropic's own client against the HTTP front on a real socket; it checks each answer against its models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.errors import EngineFault, QueueFull, QuotaExceeded
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, new_key, write_keys
from baton.security.matrix import CallerRole
from tests.support.http_rig import chunk, finished
from tests.support.router_parts import MODEL
from tests.support.served_http import served

if TYPE_CHECKING:
    import anthropic

HELLO: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_message_is_created() -> None:
    async with served() as one, one.anthropic_client() as client:
        answer = asyncio.create_task(client.messages.create(**HELLO))
        (await one.rig.next_call()).tell(chunk(0, "cd"), finished("stop"))
        message = await answer
        (block,) = message.content
        assert (block.type, block.text) == ("text", "cd")
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 2)
        assert message.id == f"msg_{message._request_id}"


async def test_a_message_is_streamed() -> None:
    async with served() as one, one.anthropic_client() as client:
        opening = asyncio.create_task(client.messages.stream(**HELLO).__aenter__())
        (await one.rig.next_call()).tell(chunk(0, "c"), chunk(1, "d"), finished("length"))
        stream = await opening
        assert [text async for text in stream.text_stream] == ["c", "d"]
        message = await stream.get_final_message()
        assert (message.stop_reason, message.usage.input_tokens, message.usage.cache_read_input_tokens) == (
            "max_tokens",
            2,
            1,
        )


async def test_closing_a_stream_ends_its_request() -> None:
    async with served() as one, one.anthropic_client() as client:
        opening = asyncio.create_task(client.messages.create(**HELLO, stream=True))
        call = await one.rig.next_call()
        call.tell(chunk(0, "c"))
        stream = await opening
        assert (await anext(aiter(stream))).type == "message_start"
        await stream.close()
        await call.is_closed.wait()


async def test_tokens_are_counted() -> None:
    async with served() as one, one.anthropic_client() as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO["messages"])
        assert counted.input_tokens == len("user: hi\nassistant:")


async def test_errors_are_raised_as_the_clients_exceptions() -> None:
    import anthropic

    async with served() as one, one.anthropic_client() as client:
        once = client.with_options(max_retries=0)
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await once.messages.create(**HELLO, extra_body={"temperature": 3})
        with pytest.raises(anthropic.NotFoundError) as missing:
            await once.messages.create(**HELLO | {"model": "another"})
        assert missing.value.type == "not_found_error"
        expected: list[tuple[Exception, type[anthropic.APIStatusError]]] = [
            (QuotaExceeded("too many", 0.1), anthropic.RateLimitError),
            (EngineFault("NaN"), anthropic.InternalServerError),
            (QueueFull("no room", 0.1), anthropic.InternalServerError),
        ]
        for error, kind in expected:
            answer = asyncio.create_task(once.messages.create(**HELLO))
            (await one.rig.next_call()).tell(error)
            with pytest.raises(kind) as raised:
                await answer
            assert raised.value.request_id


async def test_the_client_retries_when_told_to() -> None:
    async with served() as one, one.anthropic_client() as client:
        answer = asyncio.create_task(client.messages.create(**HELLO))
        (await one.rig.next_call()).tell(QueueFull("no room", 0.01))
        (await one.rig.next_call()).tell(chunk(0, "cd"), finished())
        assert (await answer).usage.output_tokens == 2


async def test_an_error_in_mid_stream_is_raised() -> None:
    import anthropic

    async with served() as one, one.anthropic_client() as client:
        opening = asyncio.create_task(client.messages.create(**HELLO, stream=True))
        (await one.rig.next_call()).tell(chunk(0, "c"), EngineFault("NaN"))
        stream = await opening
        with pytest.raises(anthropic.APIStatusError, match="NaN") as raised:
            async for _ in stream:
                pass
        assert raised.value.type == "api_error"


async def test_the_clients_key_is_checked(tmp_path: Path) -> None:
    import anthropic

    key, entry = new_key("acme", CallerRole.CLIENT, "")
    write_keys(tmp_path / "keys", [entry])
    async with served(authenticator=PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "keys"))) as one:
        async with one.anthropic_client(api_key=key) as client:
            assert (await client.messages.count_tokens(model=MODEL, messages=HELLO["messages"])).input_tokens
        async with one.anthropic_client(api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.count_tokens(model=MODEL, messages=HELLO["messages"])
        assert refused.value.type == "authentication_error"
