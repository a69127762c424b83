"""The fake of the router's front for HTTP: a test decides what each call answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from baton.messages.generation import Accepted, Finished, GenerateEvent, GenerateRequest
from router.admission.quotas import RateLimit

T = TypeVar("T")


class FakeCall:
    """One call, and the events that a test sends to its client."""

    def __init__(
        self,
        request_id: str,
        positions: Sequence[int],
        timeout_s: float | None,
        request: GenerateRequest | None = None,
    ) -> None:
        self.request_id = request_id
        self.positions = positions
        """The positions from which a stream is resumed; empty for a new request."""
        self.timeout_s = timeout_s
        self._request = request
        self.is_closed = asyncio.Event()
        self._events: asyncio.Queue[GenerateEvent | Exception | None] = asyncio.Queue()

    @property
    def request(self) -> GenerateRequest:
        """The request of a call that resumes no stream."""
        assert self._request is not None, "it resumes a stream"
        return self._request

    def tell(self, *events: GenerateEvent | Exception | None) -> None:
        """Send the client these events next. An error or Finished ends the stream. None ends it without either, which
        only a broken router does."""
        for event in events:
            self._events.put_nowait(event)

    @property
    def num_unread(self) -> int:
        """Number of events that the client has not read."""
        return self._events.qsize()

    async def stream(self) -> AsyncGenerator[GenerateEvent, None]:
        try:
            yield Accepted(self.request_id, 1, 3)
            event: GenerateEvent | Exception | None = None
            while not isinstance(event, Finished):
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    return
                yield event
        finally:
            self.is_closed.set()


class FakeHandler:
    """Takes every call, and puts it into `calls` for the test."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[FakeCall] = asyncio.Queue()
        self.most: int | None = None
        """The value that `most_at_once` returns."""
        self.limits: Sequence[RateLimit] = ()
        """The value that `rate_limits` returns."""
        self.reported_size = 0
        """The value that `embedding_size` returns."""
        self.num_in_threads = 0
        """Number of functions that ran in a thread."""
        self.num_in_waiting_threads = 0
        """Number of functions that ran in a thread that may wait for a child process."""

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateEvent, None]:
        return self._begin(FakeCall(request.request_id, (), timeout_s, request))

    def most_at_once(self) -> int | None:
        return self.most

    def rate_limits(self) -> Sequence[RateLimit]:
        return self.limits

    def embedding_size(self) -> int:
        return self.reported_size

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        *,
        repeat: GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        return self._begin(FakeCall(request_id, tuple(next_token_index), timeout_s))

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        self.num_in_threads += 1
        return await asyncio.to_thread(work, *args)

    async def in_waiting_thread(self, work: Callable[..., T], *args: object) -> T:
        self.num_in_waiting_threads += 1
        return await asyncio.to_thread(work, *args)

    async def in_chat_thread(self, work: Callable[..., T], *args: object, is_long: bool) -> T:
        self.num_in_threads += is_long
        return await asyncio.to_thread(work, *args)

    def _begin(self, call: FakeCall) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.put_nowait(call)
        return call.stream()
