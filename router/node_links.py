"""One stream per node incarnation, kept for as long as there is hope. Bytes and time only; what they mean is elsewhere.

A link is lost when its stream breaks or when the node says nothing for three heartbeats; the listener hears of it at
once, and only once per attachment. Then the link tries again, with back-off and jitter, for as long as the registry
names the incarnation. What the registry forgets does not end a stream that works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from baton.background import OnFault, current_watch
from baton.errors import BatonError, NodeLost
from baton.registry import NodeRecord
from baton.rpc.messages import HEARTBEAT_S, NodeDescription, RouterMessage, StepReport
from router.timers import Timers, sleep_until


class NodeStream(Protocol):
    """One attached incarnation; `baton.rpc.node_client.NodeStream` is the real one."""

    @property
    def welcome(self) -> NodeDescription: ...

    def listen(self, on_report: Callable[[StepReport], None], on_lost: Callable[[NodeLost], None]) -> None: ...

    def send(self, message: RouterMessage) -> None:
        """Never waits; raises NodeLost."""
        ...

    async def close(self) -> None: ...


class NodeClient(Protocol):
    """Speaks to one address; `baton.rpc.node_client.NodeClient` is the real one."""

    async def attach(self, router_id: str, incarnation: str = "", router_incarnation: str = "") -> NodeStream: ...

    async def close(self) -> None: ...


class LinkListener(Protocol):
    """Who hears of links. Called on the event loop; must return at once and never raise."""

    def on_attached(self, description: NodeDescription) -> None: ...

    def on_report(self, incarnation: str, report: StepReport) -> None: ...

    def on_lost(self, incarnation: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Bounds in seconds."""

    silence_s: float = 3 * HEARTBEAT_S
    attach_s: float = 5.0
    first_retry_s: float = 0.05
    last_retry_s: float = 2.0


class NodeLinks:
    """Every link of this router. `update` says who is registered, `send` reaches who is attached."""

    def __init__(
        self,
        connect: Callable[[str], NodeClient],
        router_id: str,
        timers: Timers,
        rng: Random,
        times: LinkTimes | None = None,
        router_incarnation: str = "",
    ) -> None:
        """`router_incarnation`: which run of the router this is; a node ends what an earlier stream of it asked for."""
        self._connect = connect
        self._router_id = router_id
        self._router_incarnation = router_incarnation
        self._listener: LinkListener | None = None
        self._timers = timers
        self._rng = rng
        self._times = times or LinkTimes()
        self._links: dict[str, _Link] = {}
        self._stopping: set[_Link] = set()
        self.watch = current_watch.get()

    def listen(self, listener: LinkListener) -> None:
        """Who hears of links; to be set before the first `update`."""
        self._listener = listener

    def update(self, records: Iterable[NodeRecord]) -> None:
        """These incarnations are registered now: open links to the new, give up the gone ones that don't answer."""
        current = {record.incarnation: record for record in records}
        for incarnation, record in current.items():
            link = self._links.get(incarnation)
            if link is None or link.is_over:
                self._links[incarnation] = _Link(self, record)
            else:
                link.registered = True
        for incarnation, link in list(self._links.items()):
            if incarnation not in current:
                link.registered = False
                if not link.is_attached:
                    link.stop()
                    self._stopping.add(self._links.pop(incarnation))
        self._stopping = {link for link in self._stopping if not link.is_over}

    def send(self, incarnation: str, message: RouterMessage) -> bool:
        """Queue a message, never waits. False when there is no stream to that incarnation."""
        link = self._links.get(incarnation)
        return link is not None and link.send(message)

    async def close(self) -> None:
        """End every link and wait until nothing of it runs. Idempotent."""
        links = [*self._links.values(), *self._stopping]
        self._links, self._stopping = {}, set()
        for link in links:
            link.stop()
        await asyncio.gather(*(link.ended() for link in links))

    # What a link needs of its owner.

    @property
    def listener(self) -> LinkListener:
        if self._listener is None:
            raise RuntimeError("nobody listens to the links")
        return self._listener

    @property
    def timers(self) -> Timers:
        return self._timers

    @property
    def times(self) -> LinkTimes:
        return self._times

    def client(self, address: str) -> NodeClient:
        return self._connect(address)

    async def attach(self, client: NodeClient, record: NodeRecord) -> NodeStream:
        """Open the stream within the bound; raises BatonError."""
        attaching = asyncio.ensure_future(client.attach(self._router_id, record.incarnation, self._router_incarnation))
        bound = self._timers.call_at(self._timers.monotonic() + self._times.attach_s, lambda: _cancel(attaching))
        try:
            stream = await attaching
        except asyncio.CancelledError:
            if not attaching.cancel() and not attaching.cancelled() and attaching.exception() is None:
                await attaching.result().close()
            if _is_being_cancelled():
                raise
            raise NodeLost(f"node {record.name} did not answer within {self._times.attach_s:g} s") from None
        finally:
            bound.cancel()
        if stream.welcome.incarnation != record.incarnation:
            await stream.close()
            raise NodeLost(f"{record.address} is {stream.welcome.incarnation}, not {record.incarnation}")
        return stream

    def retry_at(self, failures: int) -> float:
        """When to try again after this many failures in a row: exponential, with full jitter over its upper half."""
        longest = min(self._times.last_retry_s, self._times.first_retry_s * 2.0 ** min(failures, 16))
        return self._timers.monotonic() + longest * (0.5 + 0.5 * self._rng.random())


class _Link:
    """One incarnation's stream and its task, which opens it, and opens it again when it is lost."""

    def __init__(self, owner: NodeLinks, record: NodeRecord) -> None:
        self.registered = True
        self._owner = owner
        self._record = record
        self._stream: NodeStream | None = None
        self._last_message = 0.0
        self._heard = False
        """The stream has brought a report."""
        self._loss: asyncio.Future[str] | None = None
        """Why the stream is lost, once it is."""
        self._task = owner.watch.start(
            self._run, "node-link", record.incarnation, on_fault=OnFault.RESTART, may_end=True
        )

    @property
    def is_attached(self) -> bool:
        return self._stream is not None

    @property
    def is_over(self) -> bool:
        return self._task.done()

    def send(self, message: RouterMessage) -> bool:
        if self._stream is None:
            return False
        try:
            self._stream.send(message)
        except BatonError as error:
            self._lose(str(error))
        except Exception as fault:
            self._fail(fault)
        return True

    def stop(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        client, timers = self._owner.client(self._record.address), self._owner.timers
        failures = 0
        try:
            while self.registered:
                if failures:
                    await sleep_until(timers, self._owner.retry_at(failures))
                try:
                    self._heard = False
                    stream = await self._owner.attach(client, self._record)
                    began = timers.monotonic()
                    await self._serve(stream)
                    # One that brought nothing, or broke at once, is no better than none: it may go so for ever.
                    is_good = self._heard and timers.monotonic() - began >= self._owner.times.silence_s
                    failures = 0 if is_good else failures + 1
                except BatonError:
                    failures += 1
                except Exception as fault:
                    # Whatever it was, without a link nobody could use the node any more.
                    self._owner.watch.note("node-link", fault, "the link is opened again")
                    failures += 1
        finally:
            await client.close()

    async def _serve(self, stream: NodeStream) -> None:
        """Hear it until it is lost. The listener hears of the loss before anything is awaited."""
        timers, listener, incarnation = self._owner.timers, self._owner.listener, self._record.incarnation
        self._stream = stream
        self._last_message = timers.monotonic()
        self._loss = asyncio.get_running_loop().create_future()
        silence = self._owner.watch.start(
            self._await_silence, "link-silence", incarnation, on_fault=OnFault.RESTART, may_end=True
        )
        reason = "the router let go of it"
        try:
            listener.on_attached(stream.welcome)
            stream.listen(self._on_report, lambda loss: self._lose(str(loss)))
            reason = await self._loss
        except Exception as fault:
            reason = f"the router failed at it: {fault}"
            raise
        finally:
            self._stream = None
            # Requests that did not hear of the loss would wait for ever: a router that fails at that must end.
            self._owner.watch.guarded(lambda: listener.on_lost(incarnation, reason), "node-lost")()
            silence.cancel()
            # First: whoever stops the link meanwhile would leave it open.
            with contextlib.suppress(BatonError):
                await stream.close()
            await asyncio.gather(silence, return_exceptions=True)

    def _on_report(self, report: StepReport) -> None:
        if self._loss is None or self._loss.done():
            return
        self._heard = True
        self._last_message = self._owner.timers.monotonic()
        try:
            self._owner.listener.on_report(self._record.incarnation, report)
        except Exception as fault:
            self._fail(fault)

    def _fail(self, fault: Exception) -> None:
        """The router's own fault; it must not be met again at once, for ever."""
        self._owner.watch.note("node-link", fault, "the link is opened again")
        self._heard = False
        self._lose(f"the router failed at it: {fault}")

    def _lose(self, reason: str) -> None:
        """Only the first reason counts."""
        if self._loss is not None and not self._loss.done():
            self._loss.set_result(reason)

    async def _await_silence(self) -> None:
        timers, bound = self._owner.timers, self._owner.times.silence_s
        while True:
            deadline = self._last_message + bound
            await sleep_until(timers, deadline)
            if self._last_message + bound > deadline:
                continue
            if timers.monotonic() - deadline > bound / 4:
                # We woke late: it was this process that slept, and what the node said meanwhile is still unread.
                self._last_message = timers.monotonic() - bound / 2
                continue
            self._lose(f"node {self._record.name} said nothing for {bound:g} s")
            return


def _cancel(future: asyncio.Future[NodeStream]) -> None:
    future.cancel()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
