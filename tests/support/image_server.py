"""An HTTP server of images, and of what servers do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager


class ImageServer:
    """Answers HTTP/1.1 on loopback from `images`; other paths have what their names say."""

    def __init__(self, images: Mapping[str, bytes]) -> None:
        self.images = dict(images)
        self.requested: list[str] = []
        self.heads: list[bytes] = []
        self._changed = asyncio.Condition()

    async def wait_until_requested(self, count: int) -> None:
        """Wait until so many requests have come."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requested) >= count)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                async with self._changed:
                    self.requested.append(path)
                    self._changed.notify_all()
                self.heads.append(head)
                match path:
                    case _ if path.startswith("/open/hang"):
                        await asyncio.Event().wait()
                    case "/open/moved":
                        writer.write(b"HTTP/1.1 302 x\r\nlocation: /open/a.png\r\ncontent-length: 0\r\n\r\n")
                    case "/open/zipped":
                        writer.write(b"HTTP/1.1 200 x\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx")
                    case "/open/cut":
                        writer.write(b"HTTP/1.1 200 x\r\ncontent-length: 9\r\n\r\nx")
                        return
                    case "/open/endless":
                        writer.write(b"HTTP/1.1 200 x\r\n\r\n")
                        while True:
                            writer.write(bytes(65_536))
                            await writer.drain()
                    case _ if path in self.images:
                        data = self.images[path]
                        named = b"content-type: Image/GIF; x=y\r\n" if path.endswith("b") else b""
                        writer.write(b"HTTP/1.1 200 x\r\n%bcontent-length: %d\r\n\r\n%b" % (named, len(data), data))
                    case _:
                        writer.write(b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def image_server(images: Mapping[str, bytes]) -> AsyncIterator[tuple[ImageServer, str]]:
    """A server on loopback, and the beginning of its URLs."""
    made = ImageServer(images)
    listener = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    try:
        yield made, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
