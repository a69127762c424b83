"""An OpenAI endpoint that answers every request at once with given bytes, sent in pieces that the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


def sse_answer(tokens: int, *, is_chat: bool = False, error: str = "") -> bytes:
    """Return a whole HTTP answer of server-sent events with this number of tokens, in chunked encoding."""
    events = []
    if is_chat:
        events.append('{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')
    for _ in range(tokens):
        text = '"delta":{"content":"x"}' if is_chat else '"text":"x"'
        events.append(f'{{"choices":[{{"index":0,{text},"finish_reason":null}}],"usage":null}}')
    if error:
        events.append(f'{{"error":{{"message":"{error}"}}}}')
    else:
        last = '"delta":{}' if is_chat else '"text":""'
        events.append(f'{{"choices":[{{"index":0,{last},"finish_reason":"length"}}],"usage":null}}')
        details = '"prompt_tokens_details":{"cached_tokens":5}'
        events.append(f'{{"choices":[],"usage":{{"prompt_tokens":9,"completion_tokens":{tokens},{details}}}}}')
        events.append("[DONE]")
    chunks = [f"data: {event}\n\n" for event in events]
    body = "".join(f"{len(chunk):x}\r\n{chunk}\r\n" for chunk in chunks) + "0\r\n\r\n"
    return f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{body}".encode()


def plain_answer(status: int, body: str) -> bytes:
    """Return an HTTP answer with a content length."""
    return f"HTTP/1.1 {status} Sorry\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


class CannedHttp:
    """Answers requests and records them: `requests` has their bytes, `connections` counts the connections."""

    def __init__(self, answer: bytes, cuts: Sequence[int], closes: bool) -> None:
        self._pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        self._closes = closes
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                self.requests.append(head + await reader.readexactly(length))
                for piece in self._pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._closes:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()


@asynccontextmanager
async def canned_http(
    answer: bytes, cuts: Sequence[int] = (), *, closes: bool = False
) -> AsyncIterator[tuple[str, CannedHttp]]:
    """Yield HOST:PORT and the endpoint. The answer is sent in pieces, cut at these byte positions."""
    canned = CannedHttp(answer, cuts, closes)
    server = await asyncio.start_server(canned.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", canned
    finally:
        server.close()
