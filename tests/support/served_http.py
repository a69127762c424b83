"""The HTTP front over a scripted request handler, served on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.security.http_access import PageAuthenticator
from baton.security.tls_files import TlsFiles
from baton.text.chat_template import DEFAULT_TEMPLATE
from router.http.server import HttpServer
from tests.support.http_rig import HttpRig

if TYPE_CHECKING:
    import anthropic
    import openai


class Served:
    """An HTTP rig that listens on a port."""

    def __init__(self, rig: HttpRig, server: HttpServer, port: int) -> None:
        self.rig = rig
        self.server = server
        self.port = port

    @asynccontextmanager
    async def client(self) -> AsyncIterator[openai.AsyncOpenAI]:
        import openai

        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="any") as client:
            yield client

    @asynccontextmanager
    async def anthropic_client(self, api_key: str = "any") -> AsyncIterator[anthropic.AsyncAnthropic]:
        """Anthropic's client, which also refuses answers that its models do not describe."""
        import anthropic

        url = f"http://127.0.0.1:{self.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key=api_key, _strict_response_validation=True) as client:
            yield client

    async def connect(self, **settings: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a plain connection."""
        return await asyncio.open_connection("127.0.0.1", self.port, **settings)

    async def post(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        await writer.drain()


@asynccontextmanager
async def served(
    stall_s: float = 30.0,
    head_s: float = 20.0,
    authenticator: PageAuthenticator | None = None,
    tls: TlsFiles | None = None,
    template: str = DEFAULT_TEMPLATE,
    rig: HttpRig | None = None,
) -> AsyncIterator[Served]:
    """`rig`: instead of one of text alone with this authenticator."""
    rig = rig or HttpRig(authenticator=authenticator)
    server = HttpServer(rig.front(rig.handler, 1000.0, template), stall_s, tls, head_s)
    port = server.bind("127.0.0.1", 0)
    before = asyncio.all_tasks()
    await server.start()
    try:
        yield Served(rig, server, port)
    finally:
        await server.stop(1.0)
    assert asyncio.all_tasks() == before
