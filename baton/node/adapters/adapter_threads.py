"""The directories from which a node reads adapters, and the threads that read them, so that nobody waits for files.

A node reads no directory that its operator has not allowed: names of directories come from routers, and a router's
operators may be others than those of the node's host. A link counts as what it leads to.

Each load and each inspection has a thread of its own, since a file system that does not answer holds its thread for
ever. Loads are bounded by the engine (`adapter_cache.py`), inspections here. The threads are daemons, and nobody joins
one that hangs: the process can always end.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from typing import TypeVar

import structlog
from cachetools import LRUCache

from baton.engine.runner import ModelRunner
from baton.errors import AdapterRefused, BatonError, DeadlineExceeded, Draining, Overloaded
from baton.messages.adapters import is_adapter_directory
from baton.model_formats.adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInfo
from baton.model_formats.files import is_below, only_below
from baton.node.adapters.adapter_cache import AdapterFault

_MOST_REMEMBERED = 512
_Stamp = tuple[tuple[int, int, int, int], ...]


class AdapterDirectories:
    """Inspects adapters in directories that are allowed. Its methods may be called from any thread."""

    def __init__(self, allowed: Sequence[Path], check: Callable[[Path], AdapterInfo]) -> None:
        """`allowed`: adapters may be in these directories and below. `check` reads the files of an adapter and compares
        them with the model; it raises AdapterRefused.
        """
        self._allowed = allowed
        self._check = check
        self._known: LRUCache[str, tuple[_Stamp, AdapterInfo]] = LRUCache(_MOST_REMEMBERED)
        """What was found in each directory, and the stamps of its files then."""
        self._lock = Lock()

    def inspect(self, directory: str) -> AdapterInfo:
        """Read an adapter's files, unless they are as they were. Raises AdapterRefused."""
        stamp = self.check_place(directory)
        with self._lock:
            known = self._known.get(directory)
        if known is not None and known[0] == stamp:
            return known[1]
        with self.reading():
            info = self._check(Path(directory))
        with self._lock:
            self._known[directory] = stamp, info
        return info

    def check_digest(self, directory: str, digest: str) -> None:
        """Raises AdapterRefused unless the adapter in this directory is sound, fits, and has this digest."""
        own = self.inspect(directory).digest
        if own != digest:
            raise AdapterRefused(
                f"{directory} holds another adapter here: its digest is {own}, and {digest} is wanted; copy the same "
                "files to all nodes"
            )

    def reading(self) -> AbstractContextManager[None]:
        """While this lasts, the thread opens no adapter's file outside of the allowed directories."""
        return only_below(self._roots())

    def _roots(self) -> Sequence[str]:
        return [os.path.realpath(root) for root in self._allowed]

    def check_place(self, directory: str) -> _Stamp:
        """Check where an adapter's files are, and that they are files; returns what changes when they do.

        Raises AdapterRefused. Nothing is read, so that a pipe or a device does no harm.
        """
        if not is_adapter_directory(directory):
            raise AdapterRefused("the directory of an adapter must be an absolute path of at most 1024 bytes")
        roots = self._roots()
        if not _is_below(directory, roots):
            raise AdapterRefused(
                f"{directory} is in no directory from which this node loads adapters; start the node with --lora-dir"
            )
        stamp = []
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            path = os.path.join(directory, name)
            if not _is_below(path, roots):
                raise AdapterRefused(
                    f"{path} leads out of the directories from which this node loads adapters; copy it"
                )
            try:
                status = os.stat(path)
            except (OSError, ValueError):
                raise AdapterRefused(
                    f"{path} is not there; name a directory that PEFT's save_pretrained wrote"
                ) from None
            if not stat.S_ISREG(status.st_mode):
                raise AdapterRefused(f"{path} is not a regular file; copy the adapter's files")
            stamp.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(stamp)


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return is_below(os.path.realpath(path), roots)


MAX_INSPECTING = 2
MAX_ASKED = 16
"""How many inspections that operators ask for may run and wait."""
INSPECT_S = 60.0
"""After so long an operator hears that an inspection is given up; its thread goes on, and counts until it has ended."""
_CLOSE_S = 5.0

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class AdapterThreads:
    """Inspects adapters and loads them into a runner. Methods return at once, from any thread, unless they say so."""

    def __init__(self, runner: ModelRunner, directories: AdapterDirectories, inspect_s: float = INSPECT_S) -> None:
        self._runner = runner
        self._directories = directories
        self._inspect_s = inspect_s
        self._may_inspect = asyncio.Semaphore(MAX_INSPECTING)
        self._num_asked = 0
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, Future[None]] = {}
        """The threads that read, and what becomes done when each has."""
        self._is_closed = False

    def load(self, digest: str, directory: str, done: Callable[[AdapterFault | None], None]) -> None:
        """Load an adapter; then `done` is called, on another thread, with why it failed, or None."""

        def run() -> None:
            done(self._load(digest, directory))

        try:
            self._start("baton-adapter-load", run)
        except Draining as error:
            done(AdapterFault(str(error), may_pass=True))

    def _load(self, digest: str, directory: str) -> AdapterFault | None:
        try:
            self._directories.check_place(directory)
            with self._directories.reading():
                self._runner.adapters.load(Path(directory), digest)
        except Exception as error:
            return _fault(error, "could not load an adapter: its requests fail", digest, directory)
        return None

    async def inspect(self, directory: str) -> AdapterInfo:
        """Inspect an adapter, which takes a while. Raises AdapterRefused, DeadlineExceeded and Overloaded."""
        if self._num_asked >= MAX_ASKED:
            raise Overloaded(f"{MAX_ASKED} adapters are to be inspected here, as many as may at a time: try again")
        self._num_asked += 1
        try:
            async with asyncio.timeout(self._inspect_s):
                return await self._in_thread(lambda: self._directories.inspect(directory))
        except TimeoutError:
            raise DeadlineExceeded(f"{directory} could not be read within {self._inspect_s:g} s") from None
        finally:
            self._num_asked -= 1

    async def find_fault(self, directory: str, digest: str) -> AdapterFault | None:
        """Why the adapter in this directory can't be used as the one with this digest; None if it can.

        Takes as long as its files need to be read: there is no time after which they are known to be unsound.
        """
        try:
            await self._in_thread(lambda: self._directories.check_digest(directory, digest))
        except Exception as error:
            return _fault(error, "could not inspect an adapter: it is refused for now", digest, directory)
        return None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Inspect something in its turn, which lasts until the thread ends, also when nobody waits for it any more."""
        await self._may_inspect.acquire()
        try:
            running = asyncio.wrap_future(self._start("baton-adapter-check", work))
        except BaseException:
            self._may_inspect.release()
            raise
        running.add_done_callback(self._inspected)
        return await asyncio.shield(running)

    def _inspected(self, inspection: asyncio.Future[T]) -> None:
        self._may_inspect.release()
        if not inspection.cancelled():
            # If nobody waits for it any more, its exception is of no interest.
            inspection.exception()

    def _start(self, name: str, work: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        ended: Future[None] = Future()
        # A thread can't be cancelled.
        result.set_running_or_notify_cancel()
        ended.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            finally:
                with self._lock:
                    del self._running[threading.current_thread()]
                ended.set_result(None)

        with self._lock:
            if self._is_closed:
                raise Draining("this process is shutting down: it reads no more adapters")
            thread = threading.Thread(target=run, name=name, daemon=True)
            self._running[thread] = ended
            thread.start()
        return result

    def close(self) -> None:
        """Begin no more, and wait a while for what is being read. Idempotent."""
        until = time.monotonic() + _CLOSE_S
        for thread in self._stop():
            thread.join(max(0.0, until - time.monotonic()))
        self._warn_of_left()

    async def aclose(self) -> None:
        """Begin no more, and wait a while for what is being read. Idempotent."""
        if ended := [asyncio.wrap_future(future) for future in self._stop().values()]:
            await asyncio.wait(ended, timeout=_CLOSE_S)
        self._warn_of_left()

    def _stop(self) -> dict[threading.Thread, Future[None]]:
        with self._lock:
            self._is_closed = True
            return dict(self._running)

    def _warn_of_left(self) -> None:
        if self._running:
            _log.warning("an adapter is still being read, from a file system that does not answer")


def _fault(error: Exception, event: str, digest: str, directory: str) -> AdapterFault:
    if isinstance(error, AdapterRefused):
        # Files that can't be read now, and memory that is lacking, say nothing about what is in the files.
        return AdapterFault(str(error), isinstance(error.__cause__, OSError | MemoryError | RuntimeError))
    if isinstance(error, BatonError):
        return AdapterFault(str(error), may_pass=True)
    _log.error(event, digest=digest, directory=directory, exc_info=error)
    return AdapterFault(f"{directory} could not be read: {error!r}", may_pass=True)
