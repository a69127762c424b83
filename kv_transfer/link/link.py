"""What both ends of a link do alike after the handshake: send, receive, and watch whether the other end lives.

Any message is a sign of life. An end that receives nothing for three of its own heartbeat intervals takes the other end
for lost. It counts its own heartbeats instead of reading a clock, so that a process that was itself stopped receives
once more before it judges.

Heartbeats come from an event loop, which can be held up by its own work or by a thread that keeps the interpreter. So
before an end judges, it asks whether the other process runs at all, in a way that needs neither loop nor interpreter.
If it does, that counts as a heartbeat, a limited number of times.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

from kv_transfer.link.link_messages import Heartbeat

HEARTBEAT_S = 1.0
MISSED_HEARTBEATS = 3
MAX_SPARED = 10
"""How often in a row a silent peer is spared because its process runs: a loop that hangs for good must be lost, too."""
SPARED = Heartbeat(0)
"""What a link receives instead of the heartbeats of a peer that is spared; those of peers are numbered from 1."""
HANDSHAKE_S = 5.0
"""How long either end waits for the other's first message."""
CAUSE_KEY = "baton-transfer-cause"
"""Key of the trailing metadata that has a refusal's `TransferCause`, so that the reader need not parse the text."""
_MAX_OUTBOX = 8192

Out = TypeVar("Out")
In = TypeVar("In")


class LinkStream(Generic[Out, In]):
    """One link after its handshake. `send` and `cut` never wait; `run` lasts as long as the link."""

    def __init__(
        self,
        read: Callable[[], Awaitable[In | None]],
        write: Callable[[Out | Heartbeat], Awaitable[None]],
        received: Callable[[In | Heartbeat], None],
        heartbeat_s: float,
        is_running: Callable[[], Awaitable[bool]],
    ) -> None:
        """`read` returns None at the stream's end; `received` is called for each message in order.

        `is_running` tells whether the peer's process runs, even if its event loop is busy; it answers within a
        heartbeat interval.
        """
        self._read = read
        self._write = write
        self._received = received
        self._heartbeat_s = heartbeat_s
        self._outbox: asyncio.Queue[Out | Heartbeat] = asyncio.Queue(_MAX_OUTBOX)
        self._cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_running = is_running
        self._running_check: asyncio.Future[bool] | None = None
        self._num_missed = 0
        """Own heartbeats since the last message of the peer."""
        self._spares_left = MAX_SPARED

    def send(self, message: Out | Heartbeat) -> None:
        """Queue a message; the link is cut if the peer has not taken thousands of them."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.cut("the peer does not take its messages")

    def cut(self, reason: str) -> bool:
        """End the link; `run` returns the reason. Only the first call counts: returns whether this one did."""
        if self._cut.done():
            return False
        self._cut.set_result(reason)
        return True

    async def run(self) -> str:
        """Send and receive until the link ends; returns why it did. Leaves no task behind, even if it is cancelled."""
        jobs: list[asyncio.Future[str]] = [
            asyncio.ensure_future(self._receive_messages()),
            asyncio.ensure_future(self._send_messages()),
            asyncio.ensure_future(self._send_heartbeats()),
            self._cut,
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            return next(_end_reason(job) for job in jobs if job in done)
        finally:
            check = self._running_check
            started: list[asyncio.Future[Any]] = [*jobs, *([check] if check is not None else [])]
            for job in started:
                job.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def _receive_messages(self) -> str:
        while (message := await self._read()) is not None:
            self._num_missed, self._spares_left = 0, MAX_SPARED
            self._received(message)
        return "the peer closed the link"

    async def _send_messages(self) -> str:
        while True:
            await self._write(await self._outbox.get())

    async def _send_heartbeats(self) -> str:
        for seq in itertools.count(1):
            self.send(Heartbeat(seq))
            await asyncio.sleep(self._heartbeat_s)
            self._num_missed += 1
            if self._num_missed == MISSED_HEARTBEATS - 1:
                if self._running_check is not None:
                    # The peer has sent something since that check was begun.
                    self._running_check.cancel()
                self._running_check = asyncio.ensure_future(self._is_running())
            elif self._num_missed >= MISSED_HEARTBEATS and not await self._is_only_busy():
                break
        return f"no heartbeat for {MISSED_HEARTBEATS * self._heartbeat_s:g} s"

    async def _is_only_busy(self) -> bool:
        """Whether a peer that has missed its heartbeats is spared, by the check that was begun one heartbeat ago."""
        check, self._running_check = self._running_check, None
        is_running = check is not None and await check
        if self._num_missed < MISSED_HEARTBEATS:
            # The peer has sent something meanwhile.
            return True
        self._spares_left -= 1
        if not is_running or self._spares_left < 0:
            return False
        self._num_missed = 0
        self._received(SPARED)
        return True


def _end_reason(job: asyncio.Future[str]) -> str:
    if job.cancelled():
        return "the stream was cancelled"
    error = job.exception()
    if error is None:
        return job.result()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, grpc.RpcError | asyncio.InvalidStateError | grpc.aio.UsageError):
        return f"the stream ended: {error}"
    raise error
