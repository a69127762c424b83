"""Sends requests to an OpenAI endpoint by HTTP/1.1; answers are server-sent events. Connections are reused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.bench.load.endpoint import UNREACHABLE, Cancel, Listener, Target, Usage
from baton.bench.workloads.workload import WorkloadRequest
from baton.errors import Unreachable
from baton.messages.generation import GenerateRequest
from baton.text.tokenizer import Tokenizer

_MAX_HEAD = 1 << 16
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "time", "day", "way", "year")
"""Each is about one token in every tokenizer: prompts of a chat are made of them if no tokenizer is given."""


class HttpEndpoint:
    """See `baton.bench.load.endpoint.Endpoint`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        host, port = target.address.rsplit(":", 1)
        self._host, self._port = host.strip("[]"), int(port)
        self._ssl = target.tls()
        self._is_chat = target.backend == "openai-chat"
        self._tokenizer = Tokenizer.load(Path(target.tokenizer)) if target.tokenizer else None
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        try:
            self._idle.append(await self._connect())
        except OSError as error:
            raise Unreachable(f"{self._target.address} can't be reached: {error.strerror or error}") from None

    def prepare(self, request: WorkloadRequest) -> bytes:
        return self.encode(self._target.request(request, self._text(request) if self._is_chat else None))

    def encode(self, request: GenerateRequest) -> bytes:
        """The message that `send` takes, of any request with these fields alone."""
        target = self._target
        fields: dict[str, Any] = {
            "model": request.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            fields["ignore_eos"] = True
        if request.ttft_slo_ms is not None:
            fields["ttft_slo_ms"] = request.ttft_slo_ms
        if self._is_chat:
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        body = json.dumps(fields, separators=(",", ":")).encode()
        key = "".join(f"{name}: {value}\r\n" for name, value in target.key_header.items())
        head = (
            f"POST {target.path} HTTP/1.1\r\nhost: {target.address}\r\ncontent-type: application/json\r\n{key}"
            f"x-request-id: {request.request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def send(self, message: bytes, listener: Listener) -> Cancel:
        answer = _Answer(listener, self._is_chat)
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                connection.start(message, answer)
                return answer.cancel
        task = asyncio.get_running_loop().create_task(self._connect_and_send(message, answer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return answer.cancel

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in self._all:
            connection.abort()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._idle.append, self._all.discard), self._host, self._port, ssl=self._ssl
        )
        self._all.add(connection)
        return connection

    async def _connect_and_send(self, message: bytes, answer: _Answer) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            answer.end(f"{UNREACHABLE}: {self._target.address}: {error.strerror or error}")
            return
        connection.start(message, answer)

    def _text(self, request: WorkloadRequest) -> str:
        if self._tokenizer is not None:
            return self._tokenizer.decode(request.token_ids(self._target.vocab_size))
        return " ".join(_WORDS[token] for token in request.token_ids(len(_WORDS)))


class _Connection(asyncio.Protocol):
    """A connection that has one request at a time."""

    def __init__(self, on_idle: Callable[[_Connection], None], on_lost: Callable[[_Connection], None]) -> None:
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None
        self.is_lost = False

    def start(self, message: bytes, answer: _Answer) -> None:
        if answer.is_ended:  # cancelled before there was a connection
            self._on_idle(self)
            return
        self._answer, answer.connection = answer, self
        if self._transport is not None:
            self._transport.write(message)

    def abort(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.abort()  # the server sent something without a request
            return
        try:
            is_over = answer.feed(data)
        except ValueError as error:
            answer.end(f"the answer is not HTTP: {error}")
            self.abort()
            return
        if is_over:
            self._answer = None
            answer.end(None)
            if answer.keeps_connection:
                self._on_idle(self)
            else:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._on_lost(self)
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(f"the connection is lost: {exc or 'closed'}")


class _Answer:
    """Parses one answer: a head, and a body in chunks, of a known length, or up to the connection's end (RFC 9112)."""

    def __init__(self, listener: Listener, is_chat: bool) -> None:
        self._listener = listener
        self._is_chat = is_chat
        self._rest = b""
        self._status = 0
        self._is_chunked = False
        self._left: int | None = None
        """Bytes left of the body, or of this chunk with its line end."""
        self._line = b""
        self._body = b""
        """Body of an error."""
        self._error: str | None = None
        self._usage: Usage | None = None
        self._position: int | None = None
        """The latest id of an event; None: this server sends none."""
        self._counted = 0
        self._is_done = False
        self.is_ended = False
        self.keeps_connection = True
        self.connection: _Connection | None = None
        """The connection it comes from; None: not connected yet."""

    def feed(self, data: bytes) -> bool:
        """Returns True once the answer is complete; raises ValueError."""
        data = self._rest + data
        if not self._status:
            head, separator, rest = data.partition(b"\r\n\r\n")
            if not separator:
                if len(data) > _MAX_HEAD:
                    raise ValueError(f"the head is longer than {_MAX_HEAD} bytes")
                self._rest = data
                return False
            self._parse_head(head)
            data = rest
        self._rest = b""
        return self._feed_chunks(data) if self._is_chunked else self._feed_plain(data)

    def cancel(self) -> None:
        """Closes the connection: HTTP/1.1 has no other way to cancel a request."""
        if not self.is_ended:
            self.is_ended = True
            if self.connection is not None:
                self.connection.abort()

    def end(self, error: str | None) -> None:
        """Calls the listener, once."""
        if self.is_ended:
            return
        self.is_ended = True
        if self._status and self._status != 200:
            error = _error_detail(self._status, self._body)
        error = self._error or error
        if error is None and not self._is_done:
            error = "the stream ended without [DONE]"
        self._listener.on_end(error, self._usage)

    def _parse_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise ValueError(f"{first[:60]!r}")
        self._status = int(words[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("retry-after", "").isdecimal():
            self._usage = Usage(retry_after_s=float(headers["retry-after"]))
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._is_chunked and "content-length" in headers:
            self._left = int(headers["content-length"])
        self.keeps_connection = headers.get("connection", "").lower() != "close" and (
            self._is_chunked or self._left is not None
        )

    def _feed_plain(self, data: bytes) -> bool:
        if self._left is None:
            self._feed_body(data)
            return self._is_done
        self._feed_body(data[: self._left])
        self._left -= min(self._left, len(data))
        return self._left == 0

    def _feed_chunks(self, data: bytes) -> bool:
        at = 0
        while True:
            if self._left is None:
                stop = data.find(b"\r\n", at)
                if stop < 0:
                    self._rest = data[at:]
                    return False
                size = int(data[at:stop].split(b";")[0], 16)
                if size == 0:
                    # No trailers: the empty line may come with the next bytes, if it must.
                    if len(data) < stop + 4:
                        self._rest = data[at:]
                        return False
                    return True
                self._left, at = size + 2, stop + 2
            if len(data) - at < self._left:
                self._rest = data[at:]
                return False
            self._feed_body(data[at : at + self._left - 2])
            at += self._left
            self._left = None

    def _feed_body(self, data: bytes) -> None:
        if self._status != 200:
            self._body += data[: 4096 - len(self._body)]
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())
            elif line.startswith(b"id:") and line[3:].strip().isdigit():
                self._position = int(line[3:])

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self._error = _message(event["error"])
        usage = event.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self._usage = Usage(
                usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), details.get("cached_tokens") or 0
            )
        for choice in event.get("choices") or ():
            if self._is_chat:
                delta = choice.get("delta") or {}
                text = delta.get("content") or delta.get("reasoning_content") or ""
                brings_token = bool(text)
            else:
                text = choice.get("text") or ""
                brings_token = bool(text) or choice.get("finish_reason") is None
            if brings_token:
                self._listener.on_tokens(self._num_new_tokens(choice), text)

    def _num_new_tokens(self, choice: dict[str, Any]) -> int:
        """How many tokens an event brings: Baton numbers them in the events' ids, others send one each."""
        if self._position is None:
            return 1
        if choice.get("finish_reason") is not None:
            return 0  # the event has text that was kept back
        before, self._counted = self._counted, self._position
        return max(1, self._position - before)  # at least one, whatever other servers mean by an id


def _error_detail(status: int, body: bytes) -> str:
    try:
        detail = _message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        detail = body.decode("utf-8", "replace")[:200].strip()
    return f"HTTP {status}: {detail}"


def _message(error: Any) -> str:
    return str(error.get("message", error))[:300] if isinstance(error, dict) else str(error)[:300]
