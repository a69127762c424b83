"""Waiting requests with a queue for each adapter, so that requests whose adapter has no slot hold up no others.

All queues share one order. An adapter that gets no slot in a step is passed over for the rest of the step with a single
look, however many requests wait with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from baton.engine.request import Request
from baton.engine.waiting.request_queue import NO_TURN, RequestQueue, Turn
from baton.messages.adapters import NO_ADAPTER


class AdapterQueues:
    """Waiting requests, ordered by one policy as in a single `RequestQueue`; adapters can be passed over."""

    def __init__(self, make_queue: Callable[[], RequestQueue]) -> None:
        """`make_queue`: makes an empty queue; all of them share their policy and their `QueuePositions`."""
        self._make_queue = make_queue
        self._base = make_queue()
        self._queues = {NO_ADAPTER: self._base}
        """The queues by adapter; those of adapters are not empty."""
        self._passed_over: set[str] = set()

    def begin_step(self) -> None:
        """Pass over no adapter any more."""
        self._passed_over.clear()

    def pass_over(self, adapter: str) -> None:
        """Leave out this adapter's requests in `next_turn`, `next_request` and `pop` until the next step begins."""
        self._passed_over.add(adapter)

    @property
    def num_tokens(self) -> int:
        """The sum of `tokens_to_compute` over all requests."""
        return sum(queue.num_tokens for queue in self._queues.values())

    @property
    def next_turn(self) -> Turn:
        """The next request's turn; NO_TURN when there is none."""
        queue = self._next_queue()
        return NO_TURN if queue is None else queue.next_turn

    @property
    def next_request(self) -> Request | None:
        """The next request, which stays; None when there is none."""
        queue = self._next_queue()
        return None if queue is None else queue.next_request

    def add(self, request: Request) -> None:
        """Add a new request at the end, or one that already has a position there."""
        self._queue_of(request).add(request)

    def pop(self) -> Request:
        """Remove and return the next request; raises IndexError when there is none."""
        queue = self._next_queue()
        if queue is None:
            raise IndexError("no request that is not passed over")
        request = queue.pop()
        self._drop_empty(request.adapter)
        return request

    def prepend(self, request: Request) -> None:
        """Put a request that was preempted next in turn, as far as the policy allows."""
        self._queue_of(request).prepend(request)

    def prepend_many(self, requests: Sequence[Request]) -> None:
        """Put these requests next in turn, in this order, as far as the policy allows."""
        for request in reversed(requests):
            self.prepend(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return popped requests to their old positions. `requests`: in the order in which they were popped."""
        by_adapter: dict[str, list[Request]] = {}
        for request in requests:
            by_adapter.setdefault(request.adapter, []).append(request)
        for some in by_adapter.values():
            self._queue_of(some[0]).put_back(some)

    def remove_many(self, request_ids: Collection[str]) -> None:
        """Remove these requests; unknown ids are skipped."""
        for adapter, queue in list(self._queues.items()):
            queue.remove_many(request_ids)
            self._drop_empty(adapter)

    def last_in_turn(self, running: Iterable[Request]) -> Request | None:
        """The running request that is preempted first; None when there is none. `running`: in order of admission."""
        return self._base.last_in_turn(running)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def _next_queue(self) -> RequestQueue | None:
        """The queue with the next request; it may be empty. None: all are passed over."""
        if len(self._queues) == 1 and not self._passed_over:
            return self._base
        visible = [queue for adapter, queue in self._queues.items() if adapter not in self._passed_over]
        return min(visible, key=lambda queue: queue.next_turn, default=None)

    def _queue_of(self, request: Request) -> RequestQueue:
        queue = self._queues.get(request.adapter)
        if queue is None:
            queue = self._queues[request.adapter] = self._make_queue()
        return queue

    def _drop_empty(self, adapter: str) -> None:
        if adapter and not self._queues[adapter]:
            del self._queues[adapter]
