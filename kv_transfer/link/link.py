"""What both ends of a link do alike once they have greeted each other: send, listen, live.

Any message is a sign of life. An end that hears nothing for three of its own heartbeats takes the other for lost; it
counts beats instead of reading a clock, so that a process that was stopped itself listens once more before it judges.

Heartbeats come from a loop, and a loop can be held up: by its own work, or by a thread that keeps the interpreter. So
before an end judges it asks whether the other's process runs at all, in a way that needs neither. If it does, that
counts as a heartbeat, for a while.
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
PATIENCE = 10
"""So often in a row a silent peer is spared because its process runs: a loop that hangs for good is lost, too."""
HANDSHAKE_S = 5.0
CAUSE_KEY = "baton-transfer-cause"
"""Trailing metadata of a refusal: a `TransferCause`, so that the reader need not parse the sentence."""
_MAX_OUTBOX = 8192

Out = TypeVar("Out")
In = TypeVar("In")


class LinkStream(Generic[Out, In]):
    """One greeted link. `send` and `cut` never wait; `run` lasts as long as the link."""

    def __init__(
        self,
        read: Callable[[], Awaitable[In | None]],
        write: Callable[[Out | Heartbeat], Awaitable[None]],
        received: Callable[[In | Heartbeat], None],
        heartbeat_s: float,
        is_running: Callable[[], Awaitable[bool]],
    ) -> None:
        """`read` returns None at the stream's end; `received` is called for each message in order.

        `is_running`: whether the peer's process runs, whatever its loop does; answers within a heartbeat.
        """
        self._read = read
        self._write = write
        self._received = received
        self._heartbeat_s = heartbeat_s
        self._outbox: asyncio.Queue[Out | Heartbeat] = asyncio.Queue(_MAX_OUTBOX)
        self._cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_running = is_running
        self._asked: asyncio.Future[bool] | None = None
        self._missed = 0
        self._patience = PATIENCE

    def send(self, message: Out | Heartbeat) -> None:
        """Queue a message; a peer that does not take them is cut off."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.cut("the peer does not read")

    def cut(self, reason: str) -> None:
        """End the link; `run` returns the reason."""
        if not self._cut.done():
            self._cut.set_result(reason)

    async def run(self) -> str:
        """Carry messages until the link ends; returns why. Leaves no task behind, cancelled or not."""
        jobs: list[asyncio.Future[str]] = [
            asyncio.ensure_future(self._listen()),
            asyncio.ensure_future(self._speak()),
            asyncio.ensure_future(self._beat()),
            self._cut,
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            return next(_reason(job) for job in jobs if job in done)
        finally:
            left: list[asyncio.Future[Any]] = [*jobs, *([self._asked] if self._asked is not None else [])]
            for job in left:
                job.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _listen(self) -> str:
        while (message := await self._read()) is not None:
            self._missed, self._patience = 0, PATIENCE
            self._received(message)
        return "the peer closed the link"

    async def _speak(self) -> str:
        while True:
            await self._write(await self._outbox.get())

    async def _beat(self) -> str:
        for seq in itertools.count(1):
            self.send(Heartbeat(seq))
            await asyncio.sleep(self._heartbeat_s)
            self._missed += 1
            if self._missed == MISSED_HEARTBEATS - 1:
                if self._asked is not None:
                    # It has said something since it was asked the last time.
                    self._asked.cancel()
                self._asked = asyncio.ensure_future(self._is_running())
            elif self._missed >= MISSED_HEARTBEATS and not await self._is_only_busy():
                break
        return f"no heartbeat for {MISSED_HEARTBEATS * self._heartbeat_s:g} s"

    async def _is_only_busy(self) -> bool:
        """Whether a peer that has missed its heartbeats is spared; it has been asked a heartbeat ago."""
        asked, self._asked = self._asked, None
        is_running = asked is not None and await asked
        if self._missed < MISSED_HEARTBEATS:
            # It has said something meanwhile.
            return True
        self._patience -= 1
        if not is_running or self._patience < 0:
            return False
        self._missed = 0
        self._received(Heartbeat(0))
        return True


def _reason(job: asyncio.Future[str]) -> str:
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
