"""The links of a router: one stream to each node incarnation, opened again and again while that may succeed.

This module knows connections and times; `router.live_requests` knows what the messages mean. A link is cut when its
stream breaks: the connection is gone, and the node may live. It is lost when the node sends nothing for three
heartbeats, or when a cut link is not open again after as long. A node that is known to have ended (no process listens
at its address, or another incarnation does) is lost at once; so is one whose streams break again and again. The
listener is called for each: after `on_attached` either `on_lost`, or `on_cut` and then `on_attached` or `on_lost`. A
lost link is tried again, with back-off and jitter, while the registry has the incarnation. A stream that works does not
end because the registry loses the incarnation.
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
"""So many streams of a link may break in a row, each soon or without a report. After that a broken stream counts as
lost, so that the same fault is not met for ever."""


class NodeStream(Protocol):
    """The stream to one incarnation; `baton.wire.clients.node_client.NodeStream` is the real one."""

    @property
    def welcome(self) -> NodeDescription: ...

    def listen(self, on_report: Callable[[StepReport], None], on_lost: Callable[[NodeLost], None]) -> None: ...

    def send(self, message: RouterMessage) -> None:
        """Never waits; raises NodeLost."""
        ...

    async def close(self) -> None: ...


class NodeClient(Protocol):
    """A client of one address; `baton.wire.clients.node_client.NodeClient` is the real one."""

    async def attach(
        self,
        router_id: str,
        incarnation: str = "",
        router_incarnation: str = "",
        keeps: Sequence[AttemptKey] = (),
    ) -> NodeStream: ...

    async def close(self) -> None: ...


class LinkListener(Protocol):
    """Receives the events of links. Called on the event loop; must return at once and never raise."""

    def attempts_on(self, incarnation: str) -> Sequence[AttemptKey]:
        """The attempts that are to continue on a node whose link was cut; called before it is attached again."""
        ...

    def on_attached(self, description: NodeDescription) -> None: ...

    def on_report(self, incarnation: str, report: StepReport) -> None: ...

    def on_cut(self, incarnation: str, reason: str) -> None:
        """Nothing can be sent. The node is either attached again soon, with the attempts that run there, or lost."""
        ...

    def on_lost(self, incarnation: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Bounds of a link's times, in seconds."""

    silence_s: float = 3 * HEARTBEAT_S
    """A node that sends nothing for so long is lost."""
    return_s: float = 3 * HEARTBEAT_S
    """A link that was cut and is not open again after so long is lost."""
    attach_s: float = 5.0
    first_retry_s: float = 0.05
    last_retry_s: float = 2.0


class NodeLinks:
    """All links of a router. `update` takes the registered nodes, `send` reaches the attached ones."""

    def __init__(
        self,
        connect: Callable[[str], NodeClient],
        router_id: str,
        timers: Timers,
        rng: Random,
        times: LinkTimes | None = None,
        router_incarnation: str = "",
    ) -> None:
        """`router_incarnation` identifies this run of the router: a node ends the attempts of an earlier stream of the
        same router, except for those that the router keeps (`LinkListener.attempts_on`).
        """
        self._connect = connect
        self._router_id = router_id
        self._router_incarnation = router_incarnation
        self._listener: LinkListener | None = None
        self._timers = timers
        self._rng = rng
        self._times = times or LinkTimes()
        self._links: dict[str, _Link] = {}
        self._closing: set[_Link] = set()
        self.watch = current_watch.get()

    def listen(self, listener: LinkListener) -> None:
        """Set the listener; to be called before the first `update`."""
        self._listener = listener

    def update(self, records: Iterable[NodeRecord]) -> None:
        """Take the registered nodes: open links to new ones, and stop those of nodes that are gone and don't answer."""
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
                    link.close()
                    self._closing.add(self._links.pop(incarnation))
        self._closing = {link for link in self._closing if not link.is_over}

    def send(self, incarnation: str, message: RouterMessage) -> bool:
        """Queue a message without waiting; False if there is no stream to that incarnation."""
        link = self._links.get(incarnation)
        return link is not None and link.send(message)

    async def close(self) -> None:
        """Close all links, and wait until their tasks have ended. Idempotent."""
        links = [*self._links.values(), *self._closing]
        self._links, self._closing = {}, set()
        for link in links:
            link.close()
        await asyncio.gather(*(link.wait_ended() for link in links))

    # --- for the links ---

    @property
    def listener(self) -> LinkListener:
        if self._listener is None:
            raise RuntimeError("the links have no listener: call listen before update")
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
        """Open a stream before the time `until`; raises BatonError."""
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
            raise ConfigError(
                f"{record.address} is served by {stream.welcome.incarnation}, not by {record.incarnation}"
            )
        return stream

    def retry_at(self, failures: int) -> float:
        """When to try again after so many failures in a row: exponential back-off, with jitter over its upper half."""
        longest = min(self._times.last_retry_s, self._times.first_retry_s * 2.0 ** min(failures, 16))
        return self._timers.monotonic() + longest * (0.5 + 0.5 * self._rng.random())


class _StreamEnd(NamedTuple):
    """How a stream ended, and why."""

    reason: str
    is_cut: bool
    """Whether only the connection broke: the node may live, and be reached again."""


class _CutLink(NamedTuple):
    """The state of a link that was cut."""

    reason: str
    until: float
    """When it is lost, if it is not open again before."""


class _Link:
    """The link to one incarnation: its stream, and the task that opens the stream again when it is cut or lost."""

    def __init__(self, owner: NodeLinks, record: NodeRecord) -> None:
        self.registered = True
        self._owner = owner
        self._record = record
        self._stream: NodeStream | None = None
        self._last_message = 0.0
        self._has_reported = False
        """Whether the stream has brought a report."""
        self._stream_end: asyncio.Future[_StreamEnd] | None = None
        """The end of the stream, once it has ended."""
        self._cut: _CutLink | None = None
        self._num_broken = 0
        """Number of streams in a row that brought no report or broke soon."""
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
            self._end_stream(str(error), is_cut=True)
        except Exception as fault:
            self._end_after_fault(fault)
        return True

    def close(self) -> None:
        self._task.cancel()

    async def wait_ended(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        client, timers = self._owner.client(self._record.address), self._owner.timers
        failures, retries_at_once = 0, False
        try:
            while self.registered or self._cut is not None:
                if failures and not retries_at_once:
                    await sleep_until(timers, self._retry_at(failures))
                    self._lose_if_due()
                retries_at_once = False
                try:
                    stream = await self._attach(client)
                    await self._serve(stream)
                    failures = self._num_broken
                    # Most cuts are over when they are noticed, and a killed node is noticed by trying.
                    retries_at_once = self._cut is not None and failures <= 1
                except BatonError as error:
                    failures += 1
                    if _proves_end(error):
                        self._lose_cut_link()
                except Exception as fault:
                    # Without a link no request could use the node any more.
                    self._owner.watch.note("node-link", fault, "the link is opened again")
                    failures += 1
                self._lose_if_due()
        finally:
            self._lose_cut_link()
            await client.close()

    async def _attach(self, client: NodeClient) -> NodeStream:
        self._has_reported = False
        until = self._owner.timers.monotonic() + self._owner.times.attach_s
        if self._cut is None:
            return await self._owner.attach(client, self._record, (), until)
        keeps = self._owner.listener.attempts_on(self._record.incarnation)
        return await self._owner.attach(client, self._record, keeps, min(until, self._cut.until))

    def _retry_at(self, failures: int) -> float:
        at = self._owner.retry_at(failures)
        return at if self._cut is None else min(at, self._cut.until)

    def _lose_if_due(self) -> None:
        if self._cut is not None and self._owner.timers.monotonic() >= self._cut.until:
            self._lose_cut_link()

    def _lose_cut_link(self) -> None:
        """If the link is cut, it is lost now. Idempotent."""
        cut, self._cut = self._cut, None
        if cut is not None:
            self._report_lost(cut.reason)

    def _report_lost(self, reason: str) -> None:
        # Requests that are not told of the loss would wait for ever, so a router whose listener raises must end.
        listener, incarnation = self._owner.listener, self._record.incarnation
        self._owner.watch.guarded(lambda: listener.on_lost(incarnation, reason), "node-lost")()

    def _report_cut(self, reason: str) -> None:
        listener, incarnation = self._owner.listener, self._record.incarnation
        self._cut = _CutLink(reason, self._owner.timers.monotonic() + self._owner.times.return_s)
        self._owner.watch.guarded(lambda: listener.on_cut(incarnation, reason), "node-lost")()

    async def _serve(self, stream: NodeStream) -> None:
        """Serve a stream until it ends. The listener is told of the end before anything is awaited."""
        timers, listener, incarnation = self._owner.timers, self._owner.listener, self._record.incarnation
        self._stream, self._cut = stream, None
        began = timers.monotonic()
        self._last_message = timers.monotonic()
        self._stream_end = asyncio.get_running_loop().create_future()
        silence = self._owner.watch.start(
            self._await_silence, "link-silence", incarnation, on_fault=OnFault.RESTART, may_end=True
        )
        loss = _StreamEnd("the router closed its link", is_cut=False)
        try:
            listener.on_attached(stream.welcome)
            stream.listen(self._on_report, lambda lost: self._end_stream(str(lost), is_cut=True))
            loss = await self._stream_end
        except Exception as fault:
            loss = _StreamEnd(f"the router failed while it handled a message: {fault}", is_cut=False)
            raise
        finally:
            self._stream = None
            # A stream that brings nothing or breaks soon is no better than none, and that may go on for ever.
            is_good = self._has_reported and timers.monotonic() - began >= self._owner.times.silence_s
            self._num_broken = 0 if is_good else self._num_broken + 1
            if loss.is_cut and self._num_broken <= MAX_BROKEN:
                self._report_cut(loss.reason)
            else:
                self._report_lost(loss.reason)
            silence.cancel()
            # Closed before anything else is awaited: otherwise a stop of the link would leave it open.
            with contextlib.suppress(BatonError):
                await stream.close()
            await asyncio.gather(silence, return_exceptions=True)

    def _on_report(self, report: StepReport) -> None:
        if self._stream_end is None or self._stream_end.done():
            return
        self._has_reported = True
        self._last_message = self._owner.timers.monotonic()
        try:
            self._owner.listener.on_report(self._record.incarnation, report)
        except Exception as fault:
            self._end_after_fault(fault)

    def _end_after_fault(self, fault: Exception) -> None:
        """End the stream after a fault of the router itself, which must not be met again at once and for ever."""
        self._owner.watch.note("node-link", fault, "the link is opened again")
        self._has_reported = False
        self._end_stream(f"the router failed while it handled a message: {fault}", is_cut=False)

    def _end_stream(self, reason: str, *, is_cut: bool) -> None:
        """End the stream. Only the first reason counts."""
        if self._stream_end is not None and not self._stream_end.done():
            self._stream_end.set_result(_StreamEnd(reason, is_cut))

    async def _await_silence(self) -> None:
        timers, bound = self._owner.timers, self._owner.times.silence_s
        while True:
            deadline = self._last_message + bound
            await sleep_until(timers, deadline)
            if self._last_message + bound > deadline:
                continue
            if timers.monotonic() - deadline > bound / 4:
                # This process was not run for a while, and the node's messages of that time are still unread.
                self._last_message = timers.monotonic() - bound / 2
                continue
            self._end_stream(f"node {self._record.name} sent nothing for {bound:g} s", is_cut=False)
            return


def _proves_end(error: BatonError) -> bool:
    """Whether an error shows that the incarnation has ended or is ending: its address has another one, or none."""
    return isinstance(error, NobodyListens | ConfigError | Draining)


def _cancel(future: asyncio.Future[NodeStream]) -> None:
    future.cancel()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
