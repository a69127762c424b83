"""`baton events`: what several routers saw is one story."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from baton.cli.views.followed_routers import follow_events
from baton.cli.views.merged_events import SAME_S, EventMerger
from baton.errors import Unreachable
from baton.messages.steering import ClusterEvent
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer
from baton.wire.services.operator_service import OperatorHandler, OperatorServicer, Steers
from router.operations.event_ring import EventRing


def event(seq: int, time: float, reason: str, router: str, subject: str = "d0") -> ClusterEvent:
    return ClusterEvent(seq, time, "Normal", reason, subject, router=router)


def test_what_two_routers_saw_is_told_once_and_by_time() -> None:
    a = [event(1, 1.0, "NodeJoined", "a"), event(2, 9.0, "NodeLost", "a"), event(3, 10.0, "Failover", "a", "")]
    b = [event(1, 1.4, "NodeJoined", "b"), event(2, 2.0, "BreakerOpened", "b"), event(3, 8.8, "NodeLost", "b")]
    told = [(each.reason, each.router) for each in EventMerger().merge([*a, *b])]
    assert told == [("NodeJoined", "a"), ("BreakerOpened", "b"), ("NodeLost", "b"), ("Failover", "a")]


def test_what_happens_again_is_replayed_but_not_what_a_newcomer_sees() -> None:
    merge = EventMerger()
    later = 2 * SAME_S
    assert merge.is_new(event(1, 0.0, "Cordoned", "a"))
    assert merge.is_new(event(2, 0.5, "Cordoned", "a")), "a router does not say the same twice"
    assert not merge.is_new(event(1, 0.6, "Cordoned", "b"))
    assert merge.is_new(event(2, later, "Cordoned", "b"))
    assert merge.is_new(event(3, 0.0, "NodeJoined", "a"))
    assert not merge.is_new(event(3, later, "NodeJoined", "b"))


class Router:
    """As far as it tells what it sees."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.ring = EventRing(name, lambda: self.now)
        self._server = RpcServer((), FaultBarrier())
        self.address = f"127.0.0.1:{self._server.bind('127.0.0.1', 0)}"

    def events(self, after: int, follow: bool) -> AsyncIterator[ClusterEvent]:
        return self.ring.follow(after) if follow else self._told(after)

    async def _told(self, after: int) -> AsyncIterator[ClusterEvent]:
        for each in self.ring.after(after):
            yield each

    def saw(self, time: float, reason: str) -> None:
        self.now = time
        self.ring.record(reason, "d0")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        OperatorServicer(cast(OperatorHandler, None), cast(Steers, self)).add_to_server(self._server.server)
        await self._server.start()
        yield
        await self._server.stop(0)


async def test_routers_come_and_go_while_they_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = Router("a"), Router("b"), Router("c")
    places = [a.address, b.address]
    story: Iterator[ClusterEvent] = follow_events(lambda: places, 0)

    async def heard() -> tuple[str, str]:
        found = await asyncio.to_thread(next, story)
        return found.reason, found.router

    async with a.running():
        async with b.running():
            a.saw(1.0, "NodeJoined")
            a.saw(3.0, "Failover")
            b.saw(1.2, "NodeJoined")
            b.saw(2.0, "BreakerOpened")
            assert [await heard() for _ in range(3)] == [("NodeJoined", "a"), ("BreakerOpened", "b"), ("Failover", "a")]
            b.saw(4.0, "BreakerClosed")
            assert await heard() == ("BreakerClosed", "b")
        async with c.running():
            places.append(c.address)
            c.saw(5.0, "NodeJoined")
            c.saw(6.0, "NodeLost")
            assert await heard() == ("NodeLost", "c")
        a.saw(7.0, "Uncordoned")
        assert await heard() == ("Uncordoned", "a")
    with pytest.raises(Unreachable):
        await heard()
    said = capsys.readouterr().err
    assert said.count("going on with the events of other routers") == 2, said
