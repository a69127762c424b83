"""A Redis server for one test, the one that comes with Baton; it can be killed and started again empty."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

from baton.registry.embedded import READY_WORDS, acl_rules, embedded_redis

CLUSTERS = ("c", "one", "two", "other", "another")
_PASSWORD = "secret"


def _users() -> Iterator[str]:
    for cluster in CLUSTERS:
        yield from ("--user", cluster, *acl_rules(cluster, _PASSWORD))


class RedisProcess:
    """One Redis server on a socket in its own directory. The user of each cluster may do no more than it needs."""

    def __init__(self, run_dir: Path) -> None:
        self.redis = embedded_redis(run_dir)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """The URL as the user who may do anything."""
        return self.redis.url

    def url_of(self, cluster: str) -> str:
        """Return the URL as the user of one cluster of CLUSTERS."""
        return self.redis.url.replace("unix://", f"unix://{cluster}@") + f"?password={_PASSWORD}"

    async def start(self) -> None:
        """Start the server and return once it answers."""
        self._process = await asyncio.create_subprocess_exec(
            *self.redis.command, *_users(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self._process.stdout is not None
        output = b""
        async for line in self._process.stdout:
            output += line
            if READY_WORDS in line.lower():
                return
        raise AssertionError(output.decode())

    async def stop(self) -> None:
        """Kill the server (SIGKILL). Idempotent."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.communicate()
