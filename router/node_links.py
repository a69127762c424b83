"""One stream per node incarnation, kept for as long as there is hope. Bytes and time only; what they mean is elsewhere.

A link is cut when its stream breaks: the connection is gone, and the node may live. It is lost when the node says
nothing for three heartbeats, or when a cut link is not there again after as long. A node that is known to have ended
(nobody listens at its address, or another incarnation does) is lost at once; so is one whose streams break again and
again. The listener hears of each at once: after `on_attached` either `on_lost`, or `on_cut` and then `on_attached` or
`on_lost`. A lost link tries again, with back-off and jitter, for as long as the registry names the incarnation. What
the registry forgets does not end a stream that works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from baton.background import OnFault, current_watch
from baton.errors import BatonError, ConfigError, Draining, NobodyListens, NodeLost
from baton.messages.ids import AttemptKey
from baton.messages.node import HEARTBEAT_S, NodeDescription, RouterMessage, StepReport
from baton.registry import NodeRecord
from router.timers import Timers, sleep_until

MAX_BROKEN = 3
"""Streams of a link that may break in a row, each at once or before it brought anything, until the next one that breaks
counts as lost: else the same trouble could be met for ever."""


class NodeStream(Protocol):
    """One attached incarnation; `baton.wire.clients.node_client.NodeStream` is the real one."""

    @property
    def welcome(self) -> NodeDescription: ...

    def listen(self, on_report: Callable[[StepReport], None], on_lost: Callable[[NodeLost], None]) -> None: ...

    def send(self, message: RouterMessage) -> None:
        """Never waits; raises NodeLost."""
        ...

    async def close(self) -> None: ...


class NodeClient(Protocol):
    """Speaks to one address; `baton.wire.clients.node_client.NodeClient` is the real one."""

    async def attach(
        self,
        router_id: str,
        incarnation: str = "",
        router_incarnation: str = "",
        keeps: Sequence[AttemptKey] = (),
    ) -> NodeStream: ...

    async def close(self) -> None: ...


class LinkListener(Protocol):
    """Who hears of links. Called on the event loop; must return at once and never raise."""

    def attempts_on(self, incarnation: str) -> Sequence[AttemptKey]:
        """What is to go on at a node whose link was cut; asked when the node is about to be attached again."""
        ...

    def on_attached(self, description: NodeDescription) -> None: ...

    def on_report(self, incarnation: str, report: StepReport) -> None: ...

    def on_cut(self, incarnation: str, reason: str) -> None:
        """Nothing can be sent. Either the node is attached again soon, with what it ran, or it is lost."""
        ...

    def on_lost(self, incarnation: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Bounds in seconds."""

    silence_s: float = 3 * HEARTBEAT_S
    return_s: float = 3 * HEARTBEAT_S
    """How long a link that was cut has to be there again."""
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
        """`router_incarnation`: which run of the router this is; a node ends what an earlier stream of it asked for,
        but for what the router says that it keeps.
        """
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
                if not link.is_attached and not link.is_cut:
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

    async def attach(
        self, client: NodeClient, record: NodeRecord, keeps: Sequence[AttemptKey], until: float
    ) -> NodeStream:
        """Open the stream by then; raises BatonError."""
        attaching = asyncio.ensure_future(
            client.attach(self._router_id, record.incarnation, self._router_incarnation, keeps)
        )
        bound = self._timers.call_at(until, lambda: _cancel(attaching))
        try:
            stream = await attaching
        except asyncio.CancelledError:
            if not attaching.cancel() and not attaching.cancelled() and attaching.exception() is None:
                await attaching.result().close()
            if _is_being_cancelled():
                raise
            raise NodeLost(f"node {record.name} did not answer in time") from None
        finally:
            bound.cancel()
        if stream.welcome.incarnation != record.incarnation:
            await stream.close()
            raise ConfigError(f"{record.address} is {stream.welcome.incarnation}, not {record.incarnation}")
        return stream

    def retry_at(self, failures: int) -> float:
        """When to try again after this many failures in a row: exponential, with full jitter over its upper half."""
        longest = min(self._times.last_retry_s, self._times.first_retry_s * 2.0 ** min(failures, 16))
        return self._timers.monotonic() + longest * (0.5 + 0.5 * self._rng.random())


class _Loss(NamedTuple):
    """How a stream ended."""

    reason: str
    is_cut: bool
    """The connection broke: the node may live, and be reached again."""


class _Cut(NamedTuple):
    """A link that waits for its node to be there again."""

    reason: str
    until: float
    """When it is lost."""


class _Link:
    """One incarnation's stream and its task, which opens it, and opens it again when it is cut or lost."""

    def __init__(self, owner: NodeLinks, record: NodeRecord) -> None:
        self.registered = True
        self._owner = owner
        self._record = record
        self._stream: NodeStream | None = None
        self._last_message = 0.0
        self._heard = False
        """The stream has brought a report."""
        self._loss: asyncio.Future[_Loss] | None = None
        """How the stream ended, once it has."""
        self._cut: _Cut | None = None
        self._num_broken = 0
        """Streams in a row that brought nothing or broke at once."""
        self._task = owner.watch.start(
            self._run, "node-link", record.incarnation, on_fault=OnFault.RESTART, may_end=True
        )

    @property
    def is_attached(self) -> bool:
        return self._stream is not None

    @property
    def is_cut(self) -> bool:
        return self._cut is not None

    @property
    def is_over(self) -> bool:
        return self._task.done()

    def send(self, message: RouterMessage) -> bool:
        if self._stream is None:
            return False
        try:
            self._stream.send(message)
        except BatonError as error:
            self._end(str(error), is_cut=True)
        except Exception as fault:
            self._fail(fault)
        return True

    def stop(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        client, timers = self._owner.client(self._record.address), self._owner.timers
        failures, at_once = 0, False
        try:
            while self.registered or self._cut is not None:
                if failures and not at_once:
                    await sleep_until(timers, self._retry_at(failures))
                    self._lose_if_late()
                at_once = False
                try:
                    stream = await self._attach(client)
                    await self._serve(stream)
                    failures = self._num_broken
                    # Most cuts are over when they are noticed, and who was killed says so.
                    at_once = self._cut is not None and failures <= 1
                except BatonError as error:
                    failures += 1
                    if _proves_end(error):
                        self._lose()
                except Exception as fault:
                    # Whatever it was, without a link nobody could use the node any more.
                    self._owner.watch.note("node-link", fault, "the link is opened again")
                    failures += 1
                self._lose_if_late()
        finally:
            self._lose()
            await client.close()

    async def _attach(self, client: NodeClient) -> NodeStream:
        self._heard = False
        until = self._owner.timers.monotonic() + self._owner.times.attach_s
        if self._cut is None:
            return await self._owner.attach(client, self._record, (), until)
        keeps = self._owner.listener.attempts_on(self._record.incarnation)
        return await self._owner.attach(client, self._record, keeps, min(until, self._cut.until))

    def _retry_at(self, failures: int) -> float:
        at = self._owner.retry_at(failures)
        return at if self._cut is None else min(at, self._cut.until)

    def _lose_if_late(self) -> None:
        if self._cut is not None and self._owner.timers.monotonic() >= self._cut.until:
            self._lose()

    def _lose(self) -> None:
        """A link that is cut is lost. Idempotent."""
        cut, self._cut = self._cut, None
        if cut is not None:
            self._tell_lost(cut.reason)

    def _tell_lost(self, reason: str) -> None:
        # Requests that did not hear of the loss would wait for ever: a router that fails at that must end.
        listener, incarnation = self._owner.listener, self._record.incarnation
        self._owner.watch.guarded(lambda: listener.on_lost(incarnation, reason), "node-lost")()

    def _tell_cut(self, reason: str) -> None:
        listener, incarnation = self._owner.listener, self._record.incarnation
        self._cut = _Cut(reason, self._owner.timers.monotonic() + self._owner.times.return_s)
        self._owner.watch.guarded(lambda: listener.on_cut(incarnation, reason), "node-lost")()

    async def _serve(self, stream: NodeStream) -> None:
        """Hear it until it ends. The listener hears of that before anything is awaited."""
        timers, listener, incarnation = self._owner.timers, self._owner.listener, self._record.incarnation
        self._stream, self._cut = stream, None
        began = timers.monotonic()
        self._last_message = timers.monotonic()
        self._loss = asyncio.get_running_loop().create_future()
        silence = self._owner.watch.start(
            self._await_silence, "link-silence", incarnation, on_fault=OnFault.RESTART, may_end=True
        )
        loss = _Loss("the router let go of it", is_cut=False)
        try:
            listener.on_attached(stream.welcome)
            stream.listen(self._on_report, lambda lost: self._end(str(lost), is_cut=True))
            loss = await self._loss
        except Exception as fault:
            loss = _Loss(f"the router failed at it: {fault}", is_cut=False)
            raise
        finally:
            self._stream = None
            # One that brought nothing, or broke at once, is no better than none: it may go so for ever.
            is_good = self._heard and timers.monotonic() - began >= self._owner.times.silence_s
            self._num_broken = 0 if is_good else self._num_broken + 1
            if loss.is_cut and self._num_broken <= MAX_BROKEN:
                self._tell_cut(loss.reason)
            else:
                self._tell_lost(loss.reason)
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
        self._end(f"the router failed at it: {fault}", is_cut=False)

    def _end(self, reason: str, *, is_cut: bool) -> None:
        """The stream is over. Only the first reason counts."""
        if self._loss is not None and not self._loss.done():
            self._loss.set_result(_Loss(reason, is_cut))

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
            self._end(f"node {self._record.name} said nothing for {bound:g} s", is_cut=False)
            return


def _proves_end(error: BatonError) -> bool:
    """Whether it says that the incarnation is not there any more, or about to end: another one is, or nobody."""
    return isinstance(error, NobodyListens | ConfigError | Draining)


def _cancel(future: asyncio.Future[NodeStream]) -> None:
    future.cancel()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
