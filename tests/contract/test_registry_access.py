"""What the Redis user of a cluster may not do, and Redis behind TLS."""

from __future__ import annotations

import asyncio
import datetime
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import asyncio as redis_client
from redis.exceptions import NoPermissionError, ResponseError

from baton.errors import Unreachable
from baton.registry.connection import with_authority
from baton.registry.registry import Registry
from baton.security.authority import make_certificates
from baton.security.tls_files import certificate_files
from tests.support.redis_server import RedisProcess


@pytest.fixture
async def server() -> AsyncIterator[RedisProcess]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as run_dir:
        made = RedisProcess(Path(run_dir))
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


@asynccontextmanager
async def behind_tls(socket: Path, certs: Path) -> AsyncIterator[int]:
    """Yield a port that speaks TLS in front of a Redis without TLS."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_redis = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, to_redis[1]), copy(to_redis[0], writer), return_exceptions=True)

    context = certificate_files(certs, "router").server_context()
    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with proxy:
        yield proxy.sockets[0].getsockname()[1]


async def test_the_user_of_a_cluster_may_use_no_other_commands_and_keys(server: RedisProcess) -> None:
    async with redis_client.Redis.from_url(server.url_of("c")) as client:
        assert await client.ping()
        for words in (
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("SCAN", "0"),
            ("CONFIG", "GET", "*"),
            ("EVALSHA", "0" * 40, "0"),
            ("SCRIPT", "FLUSH"),
            ("ACL", "LIST"),
            ("SHUTDOWN",),
            ("MONITOR",),
            ("CLIENT", "LIST"),
            ("GET", "baton:one:node:a"),
            ("GET", "baton:cc:node:a"),
            ("GET", "session:1"),
            ("PUBLISH", "baton:one:changes", "x"),
        ):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*words)  # type: ignore[no-untyped-call]  # redis has no types here
        for script in ("return redis.call('KEYS', '*')", "return redis.call('GET', 'baton:one:node:a')"):
            with pytest.raises(ResponseError, match=r"permission|ACL|can't run this command|can't access"):
                await client.eval(script, 0)
        # From version 7 on, servers refuse it to everyone before they look at permissions.
        with pytest.raises(ResponseError, match=r"permissions|not allowed"):
            await client.execute_command("DEBUG", "SLEEP", "0")  # type: ignore[no-untyped-call]


async def test_redis_behind_tls_is_trusted_only_by_the_clusters_authority(server: RedisProcess, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for name in ("ours", "theirs"):
        make_certificates(tmp_path / name, "c", ["localhost"], 1, now)
    async with behind_tls(server.redis.socket, tmp_path / "ours") as port:
        url = f"rediss://c:secret@localhost:{port}/0"
        ours, theirs = (with_authority(url, tmp_path / name / "ca.crt") for name in ("ours", "theirs"))
        registry = Registry.connect(ours, "c")
        await registry.ping()
        await registry.close()
        for wrong in (theirs, ours.replace("localhost", "127.0.0.1"), url, url.replace("rediss:", "redis:")):
            stranger = Registry.connect(wrong, "c")
            with pytest.raises(Unreachable) as caught:
                await stranger.ping()
            assert "secret" not in str(caught.value)
            await stranger.close()


def test_an_authority_is_added_where_the_url_names_none() -> None:
    ca = Path("/etc/our ca.crt")
    assert with_authority("rediss://h/0", ca) == "rediss://h/0?ssl_ca_certs=/etc/our%20ca.crt"
    assert with_authority("rediss://h?a=b", ca) == "rediss://h?a=b&ssl_ca_certs=/etc/our%20ca.crt"
    for left in ("redis://h", "unix:///s", "rediss://h?ssl_ca_certs=/x"):
        assert with_authority(left, ca) == left
    assert with_authority("rediss://h", None) == "rediss://h"
