"""The Redis of one test, the server that comes with Baton: started, killed, and started again with nothing in it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from baton.registry.embedded import READY_WORDS, embedded_redis


class RedisProcess:
    """Reached over a socket in a directory of its own."""

    def __init__(self, run_dir: Path) -> None:
        self.redis = embedded_redis(run_dir)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return self.redis.url

    async def start(self) -> None:
        """Return when it answers."""
        self._process = await asyncio.create_subprocess_exec(
            *self.redis.command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self._process.stdout is not None
        said = b""
        async for line in self._process.stdout:
            said += line
            if READY_WORDS in line.lower():
                return
        raise AssertionError(said.decode())

    async def stop(self) -> None:
        """kill -9. Idempotent."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.communicate()
