"""The queue of events that wait for one client, in order, and then their end.

Clients take turns: a limited number of them is written to in each turn of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from baton.errors import BatonError
from baton.messages.generation import Chunk, GenerateEvent, TakeChunk, joined
from baton.messages.request_limits import MAX_SEQUENCES

PER_TURN = 64

_log = logging.getLogger(__name__)


class FairQueue:
    """Lets the readers of client queues continue, first come, first served, and a limited number in each turn.

    Between two turns the loop reads the nodes' sockets. Under overload, tokens therefore gather in their clients'
    queues and leave as one message, instead of waiting one by one in the sockets; and a message costs the same however
    many tokens it carries. All clients of a router share one instance. All calls come from one event loop.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._per_turn = per_turn
        self._left = per_turn
        """Readers that may still continue in this turn of the loop."""
        self._waiting: deque[Callable[[], bool]] = deque()
        self._ends: asyncio.Handle | None = None

    def future(self) -> asyncio.Future[None]:
        """A future on which a reader waits for its turn."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # kept: asking for it is a system call
        return self._loop.create_future()

    def may_go(self) -> bool:
        """Whether a reader with something to read may continue now. Otherwise it calls `serve`."""
        if not self._left or self._waiting:
            return False
        self._take_one()
        return True

    def serve(self, go: Callable[[], bool]) -> None:
        """Call `go` when it is the reader's turn, perhaps at once. `go` returns whether the reader used its turn."""
        if not self._left or self._waiting:
            self._waiting.append(go)
        elif self._goes(go):
            self._take_one()

    async def wait(self) -> None:
        """Return when it is the caller's turn; what it does before it waits for anything else belongs to that turn."""
        if self.may_go():
            return
        waiter = self.future()

        def go() -> bool:
            if waiter.done():
                return False
            waiter.set_result(None)
            return True

        self.serve(go)
        await waiter

    def charge(self, count: int) -> None:
        """Count work for a reader whose turn it is as that of so many more readers."""
        self._left = max(0, self._left - count)
        self._end_later()

    def _take_one(self) -> None:
        self._left -= 1
        self._end_later()

    def _end_later(self) -> None:
        if self._ends is None:
            loop = self._loop or asyncio.get_running_loop()
            self._ends = loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._ends = None
        self._left = self._per_turn
        while self._waiting and self._left:
            if self._goes(self._waiting.popleft()):
                self._take_one()

    def _goes(self, go: Callable[[], bool]) -> bool:
        """Whether the reader used its turn. If it raises, that is logged, and the next reader has its turn."""
        try:
            return go()
        except Exception:
            _log.exception("a client's reader raised in its turn")
            return True


MAX_JOINED_TOKENS = 256
MAX_JOINED_LOGPROBS = 64
"""So many tokens at most are joined if they have log-probabilities, which take ten times as long to write as text."""
LONG_TEXT = 512
"""From so many characters on, a chunk may take long to write, since its text may be parsed: other readers then have a
turn behind it."""
MANY_LOGPROBS = 16
"""With more tokens that have log-probabilities than this, a chunk takes long to write, too."""
MAX_SEPARATE_EVENTS = 64
"""From so many waiting events on, a chunk is joined to the last one of its sequence, although others lie between."""


def _most_joined(first: Chunk) -> int:
    """How many tokens a chunk may have that is joined to this one."""
    return MAX_JOINED_LOGPROBS if first.logprobs else MAX_JOINED_TOKENS


class EventQueue:
    """A queue that never blocks its writer; `backlog` says how far its one reader is behind.

    Chunks that wait are joined to one: a reader that falls behind gets fewer and larger ones, so it costs less the more
    there is to do. Chunks without tokens (text that was held back until the end) are not joined.

    Waking a reader that is a chain of generators costs several times what its message does. So while the reader waits
    in `get`, chunks are passed to its `take` function, until that refuses one or another event comes.
    """

    __slots__ = ("_error", "_events", "_is_due", "_is_over", "_take", "_turns", "_waiter", "backlog")

    def __init__(self, turns: FairQueue | None = None) -> None:
        """`turns`: the fair queue that all clients of a router share."""
        self._take: TakeChunk | None = None
        self._turns = turns or FairQueue()
        self._events: list[GenerateEvent] = []
        """Few, since chunks are joined; a deque would be 700 bytes for each stream."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_due = False
        """Whether the fair queue will call `_go`."""
        self._is_over = False
        self._error: BatonError | None = None
        self.backlog = 0
        """Number of tokens that the reader has not taken."""

    def put(self, event: GenerateEvent) -> None:
        """Append an event, and wake the reader if it waits."""
        if isinstance(event, Chunk):
            self.backlog += len(event.token_ids)
            if len(self._events) >= MAX_SEPARATE_EVENTS and self._join_to_last(event):
                return
        self._events.append(event)
        if self._waiter is not None:
            self._wake()

    def _join_to_last(self, chunk: Chunk) -> bool:
        """Join a chunk to the last waiting one of its sequence. False: there is none near, or it is long.

        With many sequences hardly any chunk lies behind one of its own sequence, so the list of those that wait for a
        slow reader would grow with each token. The order of different sequences' chunks means nothing to a client.
        """
        events, index = self._events, chunk.sequence_index
        last = events[-1]
        if isinstance(last, Chunk) and last.sequence_index == index:
            return False  # the reader joins these, all at once
        for position in range(len(events) - 1, max(0, len(events) - 2 * MAX_SEQUENCES) - 1, -1):
            before = events[position]
            if isinstance(before, Chunk) and before.sequence_index == index:
                num_tokens = len(before.token_ids) + len(chunk.token_ids)
                if not before.token_ids or not chunk.token_ids or num_tokens > _most_joined(before):
                    return False
                events[position] = joined((before, chunk))
                return True
        return False

    def put_all(self, events: Iterable[GenerateEvent]) -> None:
        for event in events:
            self.put(event)

    def end(self, error: BatonError | None = None) -> None:
        """End the queue; with an error, `get` raises it once all events are taken. Only the first end counts."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._wake()

    def discard(self) -> None:
        """Forget all events that the reader has not taken: nobody needs them any more."""
        self._events.clear()
        self.backlog = 0

    @property
    def error(self) -> BatonError | None:
        """The error with which the queue ends, if it does."""
        return self._error

    def pass_chunks_to(self, take: TakeChunk | None) -> None:
        """Set the function to which chunks are passed while the reader waits in `get`. It must not wait."""
        self._take = take

    async def get(self) -> GenerateEvent | None:
        """The next event, None after the last one; raises the error of the end. For one reader."""
        if not self._events or not self._turns.may_go():
            await self._turn()
        if not self._events:
            if self._error is not None:
                # What is raised has these frames, and they have this queue: with itself that would be a cycle.
                raise self._error.not_raised()
            return None
        return self._next()

    def _next(self) -> GenerateEvent:
        event = self._events[0]
        if isinstance(event, Chunk):
            event = self._joined(event)
            self.backlog -= len(event.token_ids)
            if event.logprobs:
                self._turns.charge(len(event.logprobs))
        del self._events[0]
        return event

    def _joined(self, first: Chunk) -> Chunk:
        """The first event, joined with the chunks of its sequence directly behind it; it replaces them in the queue."""
        if len(self._events) == 1 or not first.token_ids:
            return first
        chunks, num_tokens, most = [first], len(first.token_ids), _most_joined(first)
        for following in islice(self._events, 1, None):
            if not isinstance(following, Chunk) or not following.token_ids:
                break
            if following.sequence_index != first.sequence_index:
                break
            num_tokens += len(following.token_ids)
            if num_tokens > most:
                break
            chunks.append(following)
        if len(chunks) == 1:
            return first
        joined_chunk = joined(chunks)
        self._events[: len(chunks)] = [joined_chunk]
        return joined_chunk

    async def _turn(self) -> None:
        """Return when there is an event or the end, and it is this reader's turn."""
        waiter = self._waiter = self._turns.future()
        if self._events or self._is_over:
            self._wake()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._is_due:
            self._is_due = True
            self._turns.serve(self._go)

    def _go(self) -> bool:
        """Use this reader's turn. False: it has gone, was woken already, or has taken all events."""
        self._is_due = False
        waiter = self._waiter
        if waiter is None or waiter.done() or not (self._events or self._is_over):
            return False
        try:
            is_done = self._take is not None and self._hand_over(self._take)
        except Exception:  # the reader is woken, meets the same fault, and can report it
            self._take, is_done = None, False
        if not is_done:
            waiter.set_result(None)
        return True

    def _hand_over(self, take: TakeChunk) -> bool:
        """Pass waiting chunks to `take`; returns whether the reader need not be woken, since it has everything."""
        events = self._events
        while events:
            event = events[0]
            if not isinstance(event, Chunk):
                return False
            event = self._joined(event)
            is_long = len(event.text) > LONG_TEXT or (event.logprobs and len(event.logprobs) > MANY_LOGPROBS)
            if is_long or not take(event):
                return False
            del events[0]
            self.backlog -= len(event.token_ids)
        return not self._is_over
