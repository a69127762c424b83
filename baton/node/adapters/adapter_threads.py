"""The threads that read adapters, so that neither the engine nor the event loop waits for files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from baton.engine.runner import ModelRunner
from baton.errors import BatonError, DeadlineExceeded
from baton.fair_executor import FairExecutor
from baton.model_formats.adapters import AdapterInfo
from baton.node.adapters.adapter_cache import MAX_LOADING
from baton.node.adapters.adapter_files import AdapterDirectories

MAX_INSPECTING = 2
LOAD_S = 60.0
"""After so long the requests that wait for an adapter fail, and an inspection is given up; its thread goes on."""
_MAX_WAITING = 1024
_CLOSE_S = 5.0

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class AdapterThreads:
    """Inspects adapters and loads them into a runner. Methods return at once, from any thread, unless they say so."""

    def __init__(self, runner: ModelRunner, directories: AdapterDirectories, load_s: float = LOAD_S) -> None:
        self._runner = runner
        self._directories = directories
        self._load_s = load_s
        self._loads = FairExecutor("baton-adapters", MAX_LOADING, _MAX_WAITING)
        # A directory that does not answer must not hold up loads.
        self._inspections = FairExecutor("baton-adapter-checks", MAX_INSPECTING, _MAX_WAITING)
        self._may_inspect = asyncio.Semaphore(MAX_INSPECTING)

    def load(self, digest: str, directory: str, done: Callable[[str], None], too_long: Callable[[], None]) -> None:
        """Load an adapter; then `done` is called, on another thread, with why it failed, or an empty text.

        `too_long` is called, too, if that takes more than LOAD_S.
        """
        timer = threading.Timer(self._load_s, too_long)
        timer.daemon = True

        def run() -> None:
            try:
                self._directories.check_place(directory)
                self._runner.load_adapter(Path(directory), digest)
                refusal = ""
            except BatonError as error:
                refusal = str(error)
            except Exception as error:
                _log.exception("could not load an adapter: its requests fail", digest=digest, directory=directory)
                refusal = f"{directory} could not be loaded: {error!r}"
            timer.cancel()
            done(refusal)

        timer.start()
        try:
            self._loads.submit("", run)
        except BatonError as error:
            timer.cancel()
            done(str(error))

    async def inspect(self, directory: str) -> AdapterInfo:
        """Inspect an adapter, which takes a while. Raises AdapterRefused, DeadlineExceeded and Overloaded."""
        return await self._in_thread(self._directories.inspect, directory)

    async def why_not(self, directory: str, digest: str) -> str:
        """Why the adapter in this directory can't be used as the one with this digest; empty if it can."""
        try:
            await self._in_thread(self._directories.check_digest, directory, digest)
        except BatonError as error:
            return str(error)
        except Exception as error:
            _log.exception("could not inspect an adapter: it is refused", digest=digest, directory=directory)
            return f"{directory} could not be inspected: {error!r}"
        return ""

    async def _in_thread(self, work: Callable[..., T], *args: str) -> T:
        # Its time begins with its turn: a node that starts may have hundreds to inspect.
        async with self._may_inspect:
            waiting = asyncio.get_running_loop().run_in_executor(self._inspections.of(""), work, *args)
            try:
                return await asyncio.wait_for(waiting, self._load_s)
            except TimeoutError:
                raise DeadlineExceeded(f"{args[0]} could not be read within {self._load_s:g} s") from None

    def end(self) -> None:
        """End the threads, and wait for what they read. Idempotent."""
        self._inspections.close()
        self._loads.close()

    async def close(self) -> None:
        """End the threads; one that hangs in a file system is left behind. Idempotent."""
        try:
            await asyncio.wait_for(asyncio.to_thread(self.end), _CLOSE_S)
        except TimeoutError:
            _log.warning("an adapter is still being read, from a file system that does not answer")
