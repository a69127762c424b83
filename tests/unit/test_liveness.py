"""What the kernel says of a process that may be gone."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kv_transfer.liveness import nobody_listens


async def test_a_port_is_refused_when_its_process_has_let_go_of_it() -> None:
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
        assert not await nobody_listens(f"127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:none", "127.0.0.1:99999999", "no.such.host.invalid:1"])
async def test_what_can_not_be_asked_says_nothing(address: str) -> None:
    assert not await nobody_listens(address)
