"""How a process that may be gone is probed: its port, and whether it answers a gRPC handshake."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from baton.wire.liveness import PortState, is_running, nobody_listens, probe_port


async def test_connections_are_refused_when_the_process_has_closed_its_port() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert not await nobody_listens(address)
    server.close()
    await server.wait_closed()
    assert await nobody_listens(address)


async def test_a_process_that_accepts_nothing_is_not_gone() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert not await nobody_listens(address)
        assert await probe_port(address) is PortState.LISTENING


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:none", "127.0.0.1:99999999", "no.such.host.invalid:1"])
async def test_an_address_that_can_not_be_reached_is_silent(address: str) -> None:
    assert not await nobody_listens(address)
    assert await probe_port(address) is PortState.SILENT


BUSY_SERVER = """
import asyncio, ctypes, grpc

async def serve():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    asyncio.get_running_loop().call_later(0.2, ctypes.PyDLL(None).pause)
    await server.wait_for_termination()

asyncio.run(serve())
"""
"""A gRPC server that soon blocks its event loop and the interpreter for good."""


async def test_a_busy_process_runs_and_a_stopped_one_does_not() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY_SERVER, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        assert await is_running(address, within_s=20.0)
        process.send_signal(signal.SIGSTOP)
        # The kernel delivers the signal to one thread, and the others run on until that one has handled it.
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not await is_running(address, within_s=0.2)
        process.send_signal(signal.SIGCONT)
        assert await is_running(address, within_s=20.0)
    finally:
        process.kill()
        await process.wait()
    assert not await is_running(address, within_s=0.1)


@pytest.mark.parametrize("address", ["", "127.0.0.1:none", "no.such.host.invalid:1"])
async def test_an_address_that_can_not_be_reached_does_not_run(address: str) -> None:
    assert not await is_running(address, within_s=0.1)
