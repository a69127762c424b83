"""Certificates that are replaced while a process serves: no restart, and no connection is lost."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.security.authority import make_certificates
from baton.security.matrix import CallerRole
from baton.security.tls_files import LiveTls, certificate_files
from baton.wire.credentials import Dialer
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer, streaming_server

HOSTS = ["localhost", "127.0.0.1"]


def make(directory: Path) -> None:
    make_certificates(directory, "default", HOSTS, 1, datetime.datetime.now(datetime.UTC))


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make(tmp_path / "certs")
    return tmp_path / "certs"


@pytest.fixture
async def ports(certs: Path) -> AsyncIterator[list[int]]:
    """The ports of a server for processes and of one for clients."""
    files = certificate_files(certs, "router")
    servers = (
        RpcServer((), FaultBarrier(), files.live(), asks_certificates=True),
        streaming_server((), FaultBarrier(), files),
    )
    bound = [server.bind("127.0.0.1", 0) for server in servers]
    for server in servers:
        await server.start()
    yield bound
    for server in servers:
        await server.stop(0)


async def presented_certificate(port: int, certs: Path) -> bytes | None:
    """Return the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(certs / "ca.crt"))
    context.load_cert_chain(certs / "operator.crt", certs / "operator.key")
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    assert connection.selected_alpn_protocol() == "h2"
    writer.transport.abort()
    return connection.getpeercert(binary_form=True)


async def answers(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest()
    await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30.0)


async def test_new_connections_get_the_current_certificates(certs: Path, tmp_path: Path, ports: list[int]) -> None:
    dialer = Dialer.to_role(CallerRole.ROUTER, "default", certificate_files(certs, "node").live())
    async with dialer.channel(f"127.0.0.1:{ports[0]}") as before:
        await answers(before)
        first = [await presented_certificate(port, certs) for port in ports]
        make(certs)  # the same authority, new certificates
        second = [await presented_certificate(port, certs) for port in ports]
        assert all(one != other for one, other in zip(first, second, strict=True))
        (certs / "router.crt").write_text("still being written")
        assert [await presented_certificate(port, certs) for port in ports] == second

        make(tmp_path / "other")  # another authority: those of before could not shake hands any more
        shutil.copytree(tmp_path / "other", certs, dirs_exist_ok=True)
        async with dialer.channel(f"127.0.0.1:{ports[0]}") as after:
            await answers(after)
        assert all([await presented_certificate(port, certs) not in second for port in ports])
        await answers(before)


def test_certificates_are_read_again_only_when_they_have_changed(certs: Path) -> None:
    live = LiveTls(certificate_files(certs, "node"))
    first = live.now()
    assert live.now() is first
    make(certs)
    second = live.now()
    assert second.cert != first.cert
    assert second.ca == first.ca
    (certs / "node.key").unlink()
    assert live.now() is second
