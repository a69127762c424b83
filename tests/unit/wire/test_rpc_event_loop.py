"""The event loop of processes with gRPC: its wake-ups do not pile up, and no event is missed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest

from baton.wire.server.event_loop import RpcEventLoop, warn_if_unrecognised


class Poller:
    """Wakes and polls as grpc.aio does: one byte each time, all events. It has the module name of the real one."""

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


def test_many_wake_ups_cause_one_turn() -> None:
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
def test_the_installed_version_of_grpc_is_recognised_and_another_is_logged(
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
    said = "does not recognise this version of grpcio"
    told = [record.message for record in caplog.records if said in record.message]
    assert len(told) == (0 if loop_factory is RpcEventLoop else 1)


class EndsWhenAllIsSent(asyncio.Protocol):
    """Closes its connection in `resume_writing`, as asyncio's TLS may."""

    def __init__(self, fault: Exception | None) -> None:
        self.num_ends = 0
        self.is_over = asyncio.Event()
        self._fault = fault
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(0)
        transport.write(bytes(8 << 20))

    def resume_writing(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.num_ends += 1
        self.is_over.set()
        if self._fault is not None:
            raise self._fault


@pytest.mark.parametrize("fault", [None, AttributeError("ours")])
def test_errors_of_connections_that_have_ended_are_no_faults_except_our_own(fault: Exception | None) -> None:
    told: list[dict[str, Any]] = []

    async def run() -> None:
        loop, server = asyncio.get_running_loop(), EndsWhenAllIsSent(fault)
        loop.set_exception_handler(lambda _, context: told.append(context))
        listening = await loop.create_server(lambda: server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        assert len(await reader.read()) == 8 << 20
        await server.is_over.wait()
        writer.close()
        await writer.wait_closed()
        listening.close()
        await listening.wait_closed()
        assert server.num_ends == 1

    with asyncio.Runner(loop_factory=RpcEventLoop) as runner:
        runner.run(run())
    assert [context["exception"] for context in told] == ([] if fault is None else [fault])
