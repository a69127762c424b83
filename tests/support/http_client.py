"""An HTTP client without sockets: speaks ASGI to an application, event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message


class Exchange:
    """One request and its answer, as the client sees them."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        is_whole: bool = True,
        query: str = "",
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self.is_stuck = asyncio.Event()
        """Set while the application waits to send something because of `stop_reading`."""
        self._changed = asyncio.Event()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._to_read: asyncio.Queue[Message] = asyncio.Queue()
        self._to_read.put_nowait({"type": "http.request", "body": body, "more_body": not is_whole})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": list(headers),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        answering: Coroutine[Any, Any, None] = app(scope, self._to_read.get, self._take)  # type: ignore[assignment]  # ASGI says Awaitable
        self.task = asyncio.create_task(answering)

    async def _take(self, message: Message) -> None:
        if not self._may_send.is_set():
            self.is_stuck.set()
            await self._may_send.wait()
        if message["type"] == "http.response.start":
            assert not self.status, "two answers"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status, "a body without a status"
            assert not self.is_complete, "something behind the end"
            self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
        self._changed.set()

    def send_rest(self, body: bytes) -> None:
        """Send the rest of a body of which a part was sent."""
        self._to_read.put_nowait({"type": "http.request", "body": body, "more_body": False})

    def disconnect(self) -> None:
        """Close the connection."""
        self._to_read.put_nowait({"type": "http.disconnect"})

    def stop_reading(self) -> None:
        """Read nothing more until `resume_reading`."""
        self.is_stuck.clear()
        self._may_send.clear()

    def resume_reading(self) -> None:
        self._may_send.set()

    async def end(self) -> Exchange:
        """Wait for the end of the answer and return self."""
        await self.task
        assert self.is_complete
        return self

    async def wait_for_events(self, count: int) -> list[Event]:
        """Wait until `count` events of a stream have arrived, and return them."""
        await self.wait_until_sent(lambda: len(self.events) >= count)
        return self.events

    async def wait_for_body(self, expected: bytes) -> None:
        """Wait until the body of the answer begins with these bytes."""
        while not self.body.startswith(expected):
            assert expected.startswith(self.body), self.body
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_sent(self, is_enough: Callable[[], bool]) -> None:
        """Wait until what was sent so far is enough."""
        while not is_enough():
            assert not self.task.done(), self.body
            self._changed.clear()
            await self._changed.wait()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, which must be the whole body."""
        assert set(self.json) == {"error"}
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Event]:
        """The events of a stream, without comments."""
        blocks = self.body.decode().split("\n\n")[:-1]
        return [Event(block) for block in blocks if not block.startswith(":")]


class Event:
    """One server-sent event."""

    def __init__(self, block: str) -> None:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) <= {"id", "event", "data"}
        self.id = fields.get("id")
        self.name = fields.get("event")
        self.data = fields["data"]

    @property
    def is_done(self) -> bool:
        return self.data == "[DONE]"

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def choice(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["choices"][0]
        return found

    @property
    def text(self) -> str:
        """The text that the event adds to its sequence."""
        if self.is_done or not self.json.get("choices"):
            return ""
        choice = self.choice
        return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


class AsgiClient:
    """Sends requests to one application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def post(self, path: str, body: Mapping[str, object] | bytes, headers: Mapping[str, str] | None = None) -> Exchange:
        """Start an exchange with a JSON body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"content-type": "application/json", **(headers or {})})

    def get(self, path: str, query: str = "") -> Exchange:
        return self.request("GET", path, b"", {}, query=query)

    def request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        is_whole: bool = True,
        query: str = "",
    ) -> Exchange:
        """Start an exchange; `is_whole`: no more of the body follows."""
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        return Exchange(self._app, method, path, body, pairs, is_whole=is_whole, query=query)
