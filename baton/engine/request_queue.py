"""The order in which waiting requests are tried."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from baton.engine.request import Leg, Request, RequestStatus


def tokens_to_compute(request: Request) -> int:
    """What a waiting request will have computed here, as far as is known before it looks for KV that is there.

    The same as long as it waits. A sequence or beam beside others shares what they have.
    """
    if request.status is RequestStatus.PREEMPTED:
        return request.num_tokens
    if request.leg is Leg.DECODE:
        return 0
    return request.num_tokens if request.is_root else 1


class RequestQueue(Protocol):
    """Waiting requests under one policy."""

    num_tokens: int
    """Tokens that they will have computed here."""

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

    def last_in_turn(self, running: Iterable[Request]) -> Request | None:
        """Of running requests, in order of admission: the one that gives way first; None when there is none."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self.num_tokens += tokens_to_compute(request)
        self._requests.append(request)

    def pop(self) -> Request:
        request = self._requests.popleft()
        self.num_tokens -= tokens_to_compute(request)
        return request

    def prepend(self, request: Request) -> None:
        self.num_tokens += tokens_to_compute(request)
        self._requests.appendleft(request)

    def prepend_many(self, requests: Sequence[Request]) -> None:
        self.num_tokens += sum(map(tokens_to_compute, requests))
        self._requests.extendleft(reversed(requests))

    def remove_many(self, request_ids: Collection[str]) -> None:
        gone = [request for request in self._requests if request.request_id in request_ids]
        if gone:
            self.num_tokens -= sum(map(tokens_to_compute, gone))
            self._requests = deque(request for request in self._requests if request.request_id not in request_ids)

    def last_in_turn(self, running: Iterable[Request]) -> Request | None:
        last = deque(running, maxlen=1)
        return last.pop() if last else None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue:
    """Smaller priorities first, equal ones by arrival; waiting makes up for priority, so that nobody starves."""

    def __init__(self, ageing_s: float) -> None:
        """`ageing_s`: how many seconds of waiting weigh as much as one step of priority; 0: none ever do."""
        self.num_tokens = 0
        self._ageing_s = ageing_s
        self._heap: list[tuple[float, float, int, Request]] = []
        self._youngest = 0
        self._oldest = 0

    def add(self, request: Request) -> None:
        self._youngest += 1
        self.num_tokens += tokens_to_compute(request)
        heapq.heappush(self._heap, (*self._rank(request), self._youngest, request))

    def pop(self) -> Request:
        request = heapq.heappop(self._heap)[-1]
        self.num_tokens -= tokens_to_compute(request)
        return request

    def prepend(self, request: Request) -> None:
        # First among its equals.
        self._oldest -= 1
        self.num_tokens += tokens_to_compute(request)
        heapq.heappush(self._heap, (*self._rank(request), self._oldest, request))

    def prepend_many(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):
            self.prepend(request)

    def remove_many(self, request_ids: Collection[str]) -> None:
        gone = [entry[-1] for entry in self._heap if entry[-1].request_id in request_ids]
        self.num_tokens -= sum(map(tokens_to_compute, gone))
        self._heap = [entry for entry in self._heap if entry[-1].request_id not in request_ids]
        heapq.heapify(self._heap)

    def last_in_turn(self, running: Iterable[Request]) -> Request | None:
        # Of equals the newest: `max` would take the first.
        return max(enumerate(running), key=lambda place: (*self._rank(place[1]), place[0]), default=(0, None))[1]

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:-1]))

    def _rank(self, request: Request) -> tuple[float, float]:
        # Everybody ages alike, so the order of two never changes while they wait: no clock is needed.
        arrived = request.arrival_time
        return (arrived + self._ageing_s * request.priority if self._ageing_s else request.priority), arrived
