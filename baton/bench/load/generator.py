"""Sends a share of a workload at its arrival times, and records the outcome of each request.

It is one event loop with callbacks; there is no task per request.

Open loop: a request is sent at its arrival time, whatever became of those before it. If the generator is late, the
request's latency counts from the planned time all the same. Closed loop (all requests are due at once, and their
concurrency is limited): a request's planned time is when a request before it has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.bench.load.endpoint import UNREACHABLE, Cancel, Endpoint, Usage
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.workloads.workload import WorkloadRequest

Session = list[WorkloadRequest]
"""Requests that follow one another; most sessions are one request."""
_MAX_UNREACHABLE_IN_A_ROW = 20
"""The run ends after this many requests in a row that could not connect."""
_MAX_LATE_SENDS_IN_A_ROW = 8
"""The event loop reads answers after this many late requests were sent in a row."""


def sessions(requests: Iterable[WorkloadRequest]) -> Iterator[Session]:
    """Groups a workload's requests by session, in the order of the workload."""
    session: Session = []
    for request in requests:
        if session and (request.session is None or request.session != session[0].session):
            yield session
            session = []
        session.append(request)
    if session:
        yield session


def share_of(all_sessions: Iterable[Session], process: int, processes: int) -> Iterator[Session]:
    """The sessions that one of several processes sends: every `processes`-th one."""
    return (session for number, session in enumerate(all_sessions) if number % processes == process)


@dataclass(slots=True)
class Progress:
    """What a generator has sent and received so far."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    is_unreachable: bool = False
    """Many requests in a row could not connect, so the run was ended."""

    @property
    def open(self) -> int:
        return self.sent - self.completed - self.failed


class Generator:
    """Sends one share of a workload, once."""

    def __init__(self, endpoint: Endpoint, max_open: int | None, request_timeout_s: float | None = None) -> None:
        """`max_open`: largest number of concurrent sessions; None: no limit."""
        self._endpoint = endpoint
        self._max_open = max_open
        self._timeout_s = request_timeout_s
        self._loop = asyncio.get_running_loop()
        self._begin_s = 0.0
        self._open: set[_OpenRequest] = set()
        self._num_sessions = 0
        self._freed_s: deque[float] = deque()
        """When each free place became free, longest ago first."""
        self._changed = asyncio.Event()
        self._stopped = False
        self._unreachable_in_a_row = 0
        self.outcomes = Outcomes()
        """Times are seconds from the run's start."""
        self.progress = Progress()

    async def run(self, share: Iterable[Session], begin_s: float) -> None:
        """Sends everything and waits for every answer; `begin_s` is the workload's start on the loop's clock."""
        self._begin_s = begin_s
        self._freed_s.extend([begin_s] * (self._max_open or 0))
        burst = 0
        for session in share:
            message = self._endpoint.prepare(session[0])
            due_s = begin_s + session[0].arrival_s
            is_late = await self._wait_until(due_s)
            if self._max_open is not None:
                free_s = await self._wait_for_free_place(self._max_open)
                due_s = max(due_s, free_s) if session[0].arrival_s <= 0 else due_s
            if self._stopped:
                break
            burst = burst + 1 if is_late else 0
            if burst >= _MAX_LATE_SENDS_IN_A_ROW:
                burst = 0
                await asyncio.sleep(0)
            self._num_sessions += 1
            self._send(session, 0, message, due_s)
        while self._num_sessions and not self._stopped:
            self._changed.clear()
            await self._changed.wait()

    def now(self) -> float:
        """Seconds on the clock of all outcomes."""
        return self._loop.time()

    def stop(self) -> None:
        """Ends the run now: open requests are dropped and not counted as failed."""
        self._stopped = True
        self._changed.set()

    async def _wait_until(self, due_s: float) -> bool:
        """Returns True if that time was past already."""
        left = due_s - self._loop.time()
        if left <= 0:
            return True
        while left > 0 and not self._stopped:
            self._changed.clear()
            timer = self._loop.call_later(left, self._changed.set)
            await self._changed.wait()
            timer.cancel()
            left = due_s - self._loop.time()
        return False

    async def _wait_for_free_place(self, max_open: int) -> float:
        """Waits until fewer than `max_open` sessions run; returns when the place became free."""
        while self._num_sessions >= max_open and not self._stopped:
            self._changed.clear()
            await self._changed.wait()
        # There is no free place only when the run was stopped.
        return self._freed_s.popleft() if self._freed_s else self._begin_s

    def _send(self, session: Session, turn: int, message: bytes, planned_s: float) -> None:
        opened = _OpenRequest(self, session, turn, planned_s, self._loop.time())
        self._open.add(opened)
        self.progress.sent += 1
        if self._timeout_s is not None:
            opened.timer = self._loop.call_later(self._timeout_s, opened.on_timeout)
        opened.cancel = self._endpoint.send(message, opened)

    def on_request_end(self, opened: _OpenRequest, error: str | None, usage: Usage | None) -> None:
        """Records the request's outcome and sends the next turn of its session."""
        self._open.discard(opened)
        if self._stopped:
            return
        now = self._loop.time()
        request = opened.session[opened.turn]
        if error is None and not opened.num_messages:
            error = "no token arrived"
        self.outcomes.append(self._outcome(opened, request, now, error, usage))
        self._count(opened, error)
        following = opened.turn + 1
        if error is None and following < len(opened.session):
            later = opened.session[following]
            due_s = max(now + later.think_s, self._begin_s + later.arrival_s)
            self._loop.call_at(due_s, self._send_turn, opened.session, following, due_s)
        else:
            self._num_sessions -= 1
            if self._max_open is not None:
                self._freed_s.append(now)
            self._changed.set()

    def _send_turn(self, session: Session, turn: int, due_s: float) -> None:
        if not self._stopped:
            self._send(session, turn, self._endpoint.prepare(session[turn]), due_s)

    def _outcome(
        self, opened: _OpenRequest, request: WorkloadRequest, now: float, error: str | None, usage: Usage | None
    ) -> Outcome:
        begin_s = self._begin_s
        usage = usage or Usage()
        return Outcome(
            request.index,
            opened.planned_s - begin_s,
            opened.sent_s - begin_s,
            None if opened.first_s is None else opened.first_s - begin_s,
            (now if error is not None or opened.latest_s is None else opened.latest_s) - begin_s,
            usage.prompt_tokens or request.input_length,
            usage.completion_tokens or opened.num_tokens,
            opened.gaps,
            usage.cached_tokens,
            usage.attempts,
            error,
            usage.prefill_node,
            usage.decode_node,
            usage.queue_ms / 1e3,
            usage.prefill_ms / 1e3,
            usage.retry_after_s,
        )

    def _count(self, opened: _OpenRequest, error: str | None) -> None:
        progress = self.progress
        if error is None:
            progress.completed += 1
            self._unreachable_in_a_row = 0
            return
        progress.failed += 1
        if not error.startswith(UNREACHABLE):
            self._unreachable_in_a_row = 0
            return
        self._unreachable_in_a_row += 1
        if self._unreachable_in_a_row >= _MAX_UNREACHABLE_IN_A_ROW:
            progress.is_unreachable = True
            self.stop()


class _OpenRequest:
    """A request that was sent and has not ended; see `baton.bench.load.endpoint.Listener`."""

    __slots__ = (
        *("_generator", "_is_over", "cancel", "first_s", "gaps", "latest_s", "num_messages", "num_tokens", "planned_s"),
        *("sent_s", "session", "timer", "turn"),
    )

    def __init__(self, generator: Generator, session: Session, turn: int, planned_s: float, sent_s: float) -> None:
        self._generator = generator
        self._is_over = False
        self.session = session
        self.turn = turn
        self.planned_s = planned_s
        self.sent_s = sent_s
        self.first_s: float | None = None
        self.latest_s: float | None = None
        self.gaps: list[float] = []
        self.num_messages = 0
        self.num_tokens = 0
        self.timer: asyncio.TimerHandle | None = None
        self.cancel: Cancel | None = None

    def on_tokens(self, count: int, text: str = "") -> None:
        now = self._generator.now()
        if self.latest_s is None:
            self.first_s = now
        else:
            self.gaps.append(now - self.latest_s)
        self.latest_s = now
        self.num_messages += 1
        self.num_tokens += count
        self._generator.progress.tokens += count

    def on_timeout(self) -> None:
        if self.cancel is not None:
            self.cancel()
        self.on_end("no answer in time", None)

    def on_end(self, error: str | None, usage: Usage | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self.timer is not None:
            self.timer.cancel()
        self._generator.on_request_end(self, error, usage)
