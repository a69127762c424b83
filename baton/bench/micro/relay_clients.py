"""Clients that only read: thousands of streams in one process that measure the latency of each token."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

from baton.bench.load.endpoint import Cancel, Usage
from baton.bench.load.grpc_endpoint import GrpcEndpoint
from baton.bench.load.http_endpoint import HttpEndpoint
from baton.bench.micro.relay_nodes import RelayNodes, RelayStream
from baton.errors import BatonError
from baton.messages.generation import GenerateRequest

MODEL = "bench"
_CHECKED_EVERY = 64
"""Every 64th stream keeps its text and compares it with the expected one."""
_RETRY_S = 1.0


class RelayClients:
    """Opens streams and counts what they receive. `reset_counts` starts a measurement."""

    def __init__(
        self,
        endpoint: GrpcEndpoint | HttpEndpoint,
        nodes: RelayNodes,
        prompt: str,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._endpoint = endpoint
        self._nodes = nodes
        self._prompt = prompt
        self._decode = decode
        self._cancels: dict[str, Cancel] = {}
        self._opened = 0
        self._changed = asyncio.Event()
        self.max_tokens = 1 << 16
        """Length of the streams that are opened next."""
        self.is_replacing = False
        """Whether another stream is opened when one ends."""
        self.failures: list[str] = []
        self.reset_counts()

    def reset_counts(self) -> None:
        """Sets all counts to zero and drops latencies."""
        self.num_tokens = self.num_messages = self.num_finished = self.num_refused = 0
        self.latencies = array("f")
        """Latency of each token from its step's report to its client, seconds."""

    @property
    def num_open(self) -> int:
        return len(self._cancels)

    def open(self, count: int = 1) -> None:
        """Opens `count` streams."""
        for _ in range(count):
            self._open_one()

    def cancel_all(self) -> None:
        for cancel in list(self._cancels.values()):
            cancel()
        self._cancels.clear()
        self._nodes.forget()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Waits for a condition; raises BatonError if a stream fails, and TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.raise_failure()
                self._changed.clear()
                await self._changed.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.failures:
            raise BatonError(f"{len(self.failures)} streams failed; the first: {self.failures[0]}")

    def _open_if_replacing(self) -> None:
        if self.is_replacing:
            self._open_one()

    def _open_one(self) -> None:
        self._opened += 1
        name = f"bench-{self._opened}"
        stream = RelayStream(name, self._opened * 7 % len(self._nodes.script), self.max_tokens)
        self._nodes.streams[name] = stream
        request = GenerateRequest(
            self._prompt, name, model=MODEL, temperature=0.0, max_tokens=stream.max_tokens, ignore_eos=True
        )
        reader = _Reader(self, stream, keeps_text=self._opened % _CHECKED_EVERY == 0)
        self._cancels[name] = self._endpoint.send(self._endpoint.encode(request), reader)

    def on_tokens(self, stream: RelayStream, count: int) -> None:
        """A client has read more tokens of its stream."""
        now, first_index, sent_at = time.monotonic(), stream.num_read, stream.sent_at
        for index in range(first_index, first_index + count):
            self.latencies.append(now - sent_at[index])
        stream.num_read += count
        self.num_tokens += count
        self.num_messages += 1
        self._changed.set()
        node = stream.node
        if node is not None and count:
            node.unread -= count if first_index else count - 1  # the first token is the prefill node's
            if node.on_read is not None:
                node.on_read(node)

    def on_end(self, stream: RelayStream, error: str, text: str | None) -> None:
        """A stream has ended. `error`: empty if it is complete; `text`: that of its tokens, None if it was not kept."""
        self._cancels.pop(stream.request_id, None)
        self._nodes.streams.pop(stream.request_id, None)
        if error and not stream.num_read:
            # The router refused the request because of overload. It is sent again later, as a client would do.
            self.num_refused += 1
            self._changed.set()
            if self.is_replacing:
                asyncio.get_running_loop().call_later(_RETRY_S, self._open_if_replacing)
            return
        script = self._nodes.script
        if not error and stream.num_read != stream.max_tokens:
            error = f"the stream ended after {stream.num_read} tokens of {stream.max_tokens}"
        if not error and text is not None:
            tokens = [script[(stream.offset + index) % len(script)] for index in range(stream.max_tokens)]
            error = "" if text == self._decode(tokens) else f"the text is not that of its tokens: {text[:80]!r}"
        if error:
            self.failures.append(f"{stream.request_id}: {error}")
        else:
            self.num_finished += 1
        self._changed.set()
        if self.is_replacing:
            self._open_one()


class _Reader:
    """The listener of one stream; see `baton.bench.load.endpoint.Listener`."""

    __slots__ = ("_clients", "_stream", "_text")

    def __init__(self, clients: RelayClients, stream: RelayStream, *, keeps_text: bool) -> None:
        self._clients = clients
        self._stream = stream
        self._text: list[str] | None = [] if keeps_text else None

    def on_tokens(self, count: int, text: str = "") -> None:
        if self._text is not None:
            self._text.append(text)
        self._clients.on_tokens(self._stream, count)

    def on_end(self, error: str | None, usage: Usage | None) -> None:
        self._clients.on_end(self._stream, error or "", None if self._text is None else "".join(self._text))
