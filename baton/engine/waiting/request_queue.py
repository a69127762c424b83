"""The order in which waiting requests are tried, also where the running ones may have few different adapters.

Requests of each adapter have a queue of their own, and all queues share one order. An adapter that gets no slot in a
step is passed over for the rest of the step with a single look, however many requests wait with it.

Every running request may take part in every step, so `max_loras` bounds the different adapters of a step. A request
whose adapter would be one more is skipped, and others are tried. So that it does not wait for ever while requests with
the running adapters come and go, the next slot is kept for it once it was passed often: until it has a seat, no request
with another adapter gets one. Requests whose KV has arrived are tried first, and are not held up by requests without
blocks: they hold blocks that those may lack.

Turns: routers that share nodes among tenants tell with each request in how many seconds it is its turn (see
`router.admission.turns`). The node adds the time at which the request arrived. Time passes for all routers alike, so
the turns of different ones are comparable; one that tells none is served as if each of its requests had its turn at
once, that is, by arrival. A request is overtaken only by such as come before its turn: none of them starves. Turns
order requests that have not begun. One that has, such as a preempted one or the next beams of a search, comes before
them, or its stream would stall until its turn.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from baton.engine.request import Request, RequestStatus
from baton.engine.scheduler_config import SchedulingPolicy
from baton.messages.adapters import NO_ADAPTER
from baton.messages.node import Leg


def tokens_to_compute(request: Request) -> int:
    """How many tokens of a waiting request are to be computed here if nothing of it is found in the cache.

    The number does not change while the request waits. A further sequence or beam shares the KV of its root.
    """
    if request.status is RequestStatus.PREEMPTED:
        return request.num_tokens
    if request.leg is Leg.DECODE:
        return 0
    return request.num_tokens if request.is_root else 1


def blocks_to_take(request: Request, block_size: int) -> int:
    """How many stripes of blocks a waiting request takes for its tokens and the next one, beside those that it shares.

    The number does not change while the request is in a queue. A further sequence or beam shares the blocks of its
    root, and any request what it was seen to find in the cache when it was tried last.
    """
    is_alone = request.is_root or request.status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
    return max(1, (request.num_tokens - request.num_found_tokens) // block_size + 1) if is_alone else 1


Turn = tuple[float, ...]
"""A waiting request's sort key: smaller ones are tried first. Comparable between queues that share a policy and a
`QueuePositions`."""
NO_TURN: Turn = (math.inf,)
"""The turn of an empty queue, which sorts behind every other one."""


class QueuePositions:
    """Numbers the requests of one engine in the order of their arrival, for all of its queues.

    A request keeps its number while it is blocked or can't be admitted, so requests that arrive later stay behind it.
    """

    def __init__(self) -> None:
        self._first = self._last = 0

    def behind_all(self) -> int:
        """A position behind all that were given out, for a new request."""
        self._last += 1
        return self._last

    def before_all(self) -> int:
        """A position before all that were given out, for a request that is to be next in turn."""
        self._first -= 1
        return self._first


class RequestQueue:
    """Waiting requests in the order of one policy.

    First come, first served; or by their turns; or smaller priorities first, and equal ones by arrival. With `ageing_s`
    above 0 requests gain priority by waiting, so that none starves.
    """

    def __init__(
        self,
        positions: QueuePositions | None = None,
        policy: SchedulingPolicy = "fcfs",
        *,
        ageing_s: float = 0.0,
        block_size: int = 1,
    ) -> None:
        """`ageing_s`: for the policy `priority`, seconds of waiting that outweigh a priority difference of 1; 0:
        waiting counts for nothing. `block_size`: tokens of a block.
        """
        self.num_tokens = 0
        """The sum of `tokens_to_compute` over all requests in the queue."""
        self.num_blocks = 0
        """The sum of `blocks_to_take` over all requests in the queue."""
        self._block_size = block_size
        self._policy: SchedulingPolicy = policy
        self._ageing_s = ageing_s
        self._positions = positions if positions is not None else QueuePositions()
        self._heap: list[tuple[Turn, Request]] = []

    @property
    def next_turn(self) -> Turn:
        """The next request's turn; NO_TURN when the queue is empty."""
        return self._heap[0][0] if self._heap else NO_TURN

    @property
    def next_request(self) -> Request | None:
        """The next request, which stays in the queue; None when the queue is empty."""
        return self._heap[0][1] if self._heap else None

    def add(self, request: Request) -> None:
        """Add a new request at the end, or one that already has a position (see `QueuePositions`) there."""
        self.num_tokens += tokens_to_compute(request)
        self.num_blocks += blocks_to_take(request, self._block_size)
        if not request.queue_position:
            request.queue_position = self._positions.behind_all()
        # No two requests have one position, so requests themselves are never compared.
        heapq.heappush(self._heap, ((*self._key(request), request.queue_position), request))

    def pop(self) -> Request:
        """Remove and return the next request; raises IndexError when the queue is empty."""
        _, request = heapq.heappop(self._heap)
        self.num_tokens -= tokens_to_compute(request)
        self.num_blocks -= blocks_to_take(request, self._block_size)
        return request

    def prepend(self, request: Request) -> None:
        """Put a request that was preempted next in turn, as far as the policy allows: first among its equals."""
        request.queue_position = self._positions.before_all()
        self.add(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Return popped requests to their old positions."""
        for request in requests:
            self.add(request)

    def remove_many(self, request_ids: Collection[str]) -> None:
        """Remove these requests; unknown ids are skipped."""
        gone = [request for _, request in self._heap if request.request_id in request_ids]
        if gone:
            self.num_tokens -= sum(map(tokens_to_compute, gone))
            self.num_blocks -= sum([blocks_to_take(request, self._block_size) for request in gone])
            self._heap = [entry for entry in self._heap if entry[1].request_id not in request_ids]
            heapq.heapify(self._heap)

    def last_in_turn(self, running: Iterable[Request]) -> Request | None:
        """The running request that is preempted first; None when there is none. `running`: in order of admission."""
        if self._policy == "fcfs":
            last = deque(running, maxlen=1)
            return last.pop() if last else None
        # The newest of equals is preempted; `max` alone would take the first. By turns, none is preempted again before
        # the others: it would be computed anew for each of a tenant's requests that comes.
        spares = self._policy == "turns"

        def order(entry: tuple[int, Request]) -> tuple[float, ...]:
            place, request = entry
            return (-request.num_preemptions if spares else 0, *self.rank(request), place)

        return max(enumerate(running), key=order, default=(0, None))[1]

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))

    def rank(self, request: Request) -> tuple[float, ...]:
        """What the policy orders by, smaller ones first: the largest is preempted first."""
        arrived = request.arrival_time
        if self._policy == "fcfs":
            return ()
        if self._policy == "turns":
            return (arrived + request.turn_in_s,)
        # All requests age at the same rate, so the order of two never changes while they wait: no clock is needed.
        return (arrived + self._ageing_s * request.spec.priority if self._ageing_s else request.spec.priority), arrived

    def _key(self, request: Request) -> tuple[float, ...]:
        """What waiting requests are ordered by; of equal ones the one with the first position is next."""
        # Positions below 0 are those of requests that were put next in turn.
        return (-math.inf,) if self._policy == "turns" and request.queue_position < 0 else self.rank(request)


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
    def num_blocks(self) -> int:
        """The sum of `blocks_to_take` over all requests."""
        return sum(queue.num_blocks for queue in self._queues.values())

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

    def put_back(self, requests: Iterable[Request]) -> None:
        """Return popped requests to their old positions."""
        for request in requests:
            self._queue_of(request).add(request)

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


class AdapterSlots:
    """The slots for different adapters while one step is decided."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: set[str] | None = None
        """The adapters of the running requests; None: not counted yet in this step."""
        self._kept_for = ""
        """The adapter for which the next slot is kept; empty: none is kept."""

    def begin_step(self) -> None:
        """Forget the running adapters, and for whom a slot is kept."""
        self._used = None
        self._kept_for = ""

    def is_free_for(self, adapter: str) -> bool:
        """Whether no slot is kept for another adapter."""
        return not adapter or self._kept_for in ("", adapter)

    def fits(self, adapter: str, running: Iterable[Request]) -> bool:
        """Whether a request with this adapter may run beside those that run."""
        if not self.is_free_for(adapter):
            return False
        if self._used is None:
            self._used = {request.adapter for request in running if request.adapter}
        return adapter in self._used or len(self._used) < self._most

    def keep_for(self, adapter: str) -> None:
        """Keep the next slot for this adapter, unless one is kept already."""
        self._kept_for = self._kept_for or adapter

    def take(self, adapter: str) -> None:
        """A request with this adapter runs from now on."""
        if self._used is not None:
            self._used.add(adapter)
