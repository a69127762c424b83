"""The client of one HTTP exchange while it is answered: sends to it, and notices when it disconnects."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive, Send

from baton.background import OnFault, start_background
from router.http.errors import Headers

COMMENT = b": waiting\n\n"
"""Sent while there is nothing else to send, so that proxies and clients see a live connection."""
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Asks proxies that buffer answers not to do so.
    (b"x-accel-buffering", b"no"),
]


class Client:
    """A context in which the current task is cancelled when the client disconnects; it then goes on after the context.

    A separate task watches the client, so sending costs nothing more. In a stream it also sends `keep_alive`, a
    comment, when nothing was sent for `keep_alive_s` (at most twice that); None: never. The body must have been read
    before.
    """

    def __init__(
        self, receive: Receive, send: Send, keep_alive_s: float | None = None, keep_alive: bytes = COMMENT
    ) -> None:
        self._receive = receive
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._owner: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._headers: Headers = []
        """The headers of an answer that is sent in pieces."""
        self._takes_comments = False
        self._is_sending = False
        self._was_idle = True
        self.has_begun = False
        """Whether the status was sent, so that a later error can't change it any more."""
        self.is_gone = False

    async def __aenter__(self) -> Client:
        self._owner = asyncio.current_task()
        self._watcher = start_background(self._watch, "http-client", on_fault=OnFault.GO_ON, may_end=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._owner is not None
        assert self._watcher is not None
        self._watcher.cancel()
        owner, self._owner, self._watcher = (
            self._owner,
            None,
            None,
        )  # a cancelled task keeps its frames, which refer to this
        return self.is_gone and owner.uncancel() == 0 and isinstance(error, asyncio.CancelledError)

    def will_stream(self, headers: Headers) -> None:
        """Answer with a stream with these headers, which begins with the first piece that is sent."""
        self._headers, self._takes_comments = [*STREAM_HEADERS, *headers], True

    def will_answer_in_pieces(self, headers: Headers) -> None:
        """Answer with these headers and with pieces of a body whose length is not known."""
        self._headers = headers

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the answer; returns once the connection takes more."""
        self._is_sending = True
        self._was_idle = False
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_sending = False

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        self.has_begun = True
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _watch(self) -> None:
        """Wait until the client leaves. A fault in here ends the exchange, since nothing else would notice that."""
        try:
            await self._wait_for_disconnect()
        except OSError:
            pass  # the connection failed while a comment was sent
        except Exception:
            self._leave()
            raise
        self._leave()

    def _leave(self) -> None:
        self.is_gone = True
        if self._owner is not None:
            self._owner.cancel()

    async def _wait_for_disconnect(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    message = await self._receive()
            except TimeoutError:
                if self._was_idle and self._takes_comments and not self._is_sending:
                    await self.write(self._keep_alive)
                self._was_idle = True
                continue
            if message["type"] == "http.disconnect":
                return
