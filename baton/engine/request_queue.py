"""The order in which waiting requests are tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from baton.engine.request import Request


class RequestQueue(Protocol):
    """Waiting requests under one policy."""

    def add(self, request: Request) -> None:
        """A newcomer."""
        ...

    def pop(self) -> Request:
        """Take the next one; IndexError when empty."""
        ...

    def prepend(self, request: Request) -> None:
        """One that was running comes back: next in turn as far as the policy allows."""
        ...

    def prepend_many(self, requests: Sequence[Request]) -> None:
        """Put back what was popped, in the order in which it was popped."""
        ...

    def remove_many(self, request_ids: Collection[str]) -> None:
        """Forget these; unknown ids are skipped."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def pop(self) -> Request:
        return self._requests.popleft()

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def prepend_many(self, requests: Sequence[Request]) -> None:
        self._requests.extendleft(reversed(requests))

    def remove_many(self, request_ids: Collection[str]) -> None:
        self._requests = deque(request for request in self._requests if request.request_id not in request_ids)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
