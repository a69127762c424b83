"""The loop of processes that live from gRPC: its wake-ups don't pile up, and no event is missed."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from baton.rpc.event_loop import RpcEventLoop, warn_if_unrecognised


class Poller:
    """Wakes and takes as grpc.aio does: one byte a time, all events. Its name is that of the real one's module."""

    def __init__(self, expected: int) -> None:
        self.reads, self.writes = socket.socketpair()
        self.events: list[int] = []
        self.taken: list[int] = []
        self.num_calls = 0
        self.woken = asyncio.Event()
        self.all_taken = asyncio.Event()
        self._expected = expected

    def leave(self, event: int) -> None:
        self.events.append(event)
        self.writes.send(b"1")

    def handle(self) -> None:
        assert self.reads.recv(1)
        self.num_calls += 1
        self.woken.set()
        self.taken += self.events
        self.events.clear()
        if len(self.taken) == self._expected:
            self.all_taken.set()

    def __repr__(self) -> str:
        return "cygrpc.Poller"


def test_many_wake_ups_are_one_turn() -> None:
    async def run() -> None:
        poller = Poller(300)
        poller.reads.setblocking(False)
        loop = asyncio.get_running_loop()
        for event in range(100):
            poller.leave(event)
        loop.add_reader(poller.reads, poller.handle)
        await poller.woken.wait()
        assert (poller.num_calls, len(poller.taken)) == (1, 100)
        for event in range(100, 300):
            loop.call_soon(poller.leave, event)
        await poller.all_taken.wait()
        assert poller.taken == list(range(300))
        loop.remove_reader(poller.reads)
        poller.reads.close()
        poller.writes.close()

    with asyncio.Runner(loop_factory=RpcEventLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop_factory", [RpcEventLoop, asyncio.SelectorEventLoop])
def test_this_version_of_grpc_is_recognised_and_one_that_is_not_is_told_of(
    loop_factory: type[asyncio.SelectorEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        warn_if_unrecognised(asyncio.get_running_loop())
        await server.stop(None)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    told = [record.message for record in caplog.records if "wake-ups are not recognised" in record.message]
    assert len(told) == (0 if loop_factory is RpcEventLoop else 1)
