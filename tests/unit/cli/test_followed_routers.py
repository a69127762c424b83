"""`baton events`: merges the events of several routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from baton.cli.views.followed_routers import SAME_S, EventMerger, follow_events
from baton.errors import Unreachable
from baton.messages.operator import ClusterEvent
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer
from baton.wire.services.operator_service import (
    AdapterHandler,
    MoveHandler,
    OperatorHandler,
    OperatorServicer,
    SteeringHandler,
)
from router.operations.cluster_events import EventRing


def event(seq: int, time: float, reason: str, router: str, subject: str = "d0") -> ClusterEvent:
    return ClusterEvent(seq, time, "Normal", reason, subject, router=router)


def test_an_event_of_two_routers_is_listed_once_and_by_time() -> None:
    a = [event(1, 1.0, "NodeJoined", "a"), event(2, 9.0, "NodeLost", "a"), event(3, 10.0, "Failover", "a", "")]
    b = [event(1, 1.4, "NodeJoined", "b"), event(2, 2.0, "BreakerOpened", "b"), event(3, 8.8, "NodeLost", "b")]
    listed = [(each.reason, each.router) for each in EventMerger().merge([*a, *b])]
    assert listed == [("NodeJoined", "a"), ("BreakerOpened", "b"), ("NodeLost", "b"), ("Failover", "a")]


def test_a_repeated_event_is_listed_again_but_not_the_first_events_of_a_late_router() -> None:
    merge = EventMerger()
    later = 2 * SAME_S
    assert merge.is_new(event(1, 0.0, "Cordoned", "a"))
    assert merge.is_new(event(2, 0.5, "Cordoned", "a")), "a router does not report an event twice"
    assert not merge.is_new(event(1, 0.6, "Cordoned", "b"))
    assert merge.is_new(event(2, later, "Cordoned", "b"))
    assert merge.is_new(event(3, 0.0, "NodeJoined", "a"))
    assert not merge.is_new(event(3, later, "NodeJoined", "b"))


class Router:
    """The part of a router that sends its events."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.ring = EventRing(name, lambda: self.now)
        self._server = RpcServer((), FaultBarrier())
        self.address = f"127.0.0.1:{self._server.bind('127.0.0.1', 0)}"

    def events(self, after: int, follow: bool) -> AsyncIterator[ClusterEvent]:
        return self.ring.follow(after) if follow else self._past(after)

    async def _past(self, after: int) -> AsyncIterator[ClusterEvent]:
        for each in self.ring.after(after):
            yield each

    def saw(self, time: float, reason: str) -> None:
        self.now = time
        self.ring.record(reason, "d0")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        OperatorServicer(
            cast(OperatorHandler, None),
            cast(SteeringHandler, self),
            cast(AdapterHandler, None),
            cast(MoveHandler, None),
        ).add_to_server(self._server.server)
        await self._server.start()
        yield
        await self._server.stop(0)


async def test_events_are_followed_while_routers_start_and_stop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.views.followed_routers._CHECK_INTERVAL_S", 0.1)
    a, b, c = Router("a"), Router("b"), Router("c")
    addresses = [a.address, b.address]
    events: Iterator[ClusterEvent] = follow_events(lambda: addresses, 0)

    async def next_event() -> tuple[str, str]:
        found = await asyncio.to_thread(next, events)
        return found.reason, found.router

    async with a.running():
        async with b.running():
            a.saw(1.0, "NodeJoined")
            a.saw(3.0, "Failover")
            b.saw(1.2, "NodeJoined")
            b.saw(2.0, "BreakerOpened")
            assert [await next_event() for _ in range(3)] == [
                ("NodeJoined", "a"),
                ("BreakerOpened", "b"),
                ("Failover", "a"),
            ]
            b.saw(4.0, "BreakerClosed")
            assert await next_event() == ("BreakerClosed", "b")
        async with c.running():
            addresses.append(c.address)
            c.saw(5.0, "NodeJoined")
            c.saw(6.0, "NodeLost")
            assert await next_event() == ("NodeLost", "c")
        a.saw(7.0, "Uncordoned")
        assert await next_event() == ("Uncordoned", "a")
    with pytest.raises(Unreachable):
        await next_event()
    notes = capsys.readouterr().err
    # The stopped routers are asked again and again, and one that stays away is reported once. The last one to end may
    # be reported, too: while another one is being asked, it may still come back.
    reported = [notes.count(f"{router.address} does not answer") for router in (a, b, c)]
    assert reported[1] == 1, notes
    assert max(reported) == 1, notes
    assert sum(reported) == notes.count("going on with the events of other routers") >= 2, notes
