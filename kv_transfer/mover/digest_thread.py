"""Digests of the sub-blocks that were read, computed by the mover's thread or by a helper's: an executor for work that
may hang, as calls into a device or a transfer agent do that do not return."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from baton.background import BackgroundWatch
from baton.runner.blocks.digest_definition import BlockDigests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.mover.part_mover import BlocksDigested, DigestEvent, DigestsFailed

P = ParamSpec("P")
T = TypeVar("T")


class DaemonWorker(Executor):
    """An executor with one thread, for which the end of the process does not wait, unlike for a ThreadPoolExecutor's.

    Unlike there, an exception that is no Exception is kept in the future, too.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_started = self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called after all that were submitted before. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_shut:
                raise RuntimeError("the worker is shut down")
            if not self._is_started:
                self._is_started = True
                self._thread.start()
            self._work.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work. `wait`: until what was submitted is done. Futures can't be cancelled here."""
        if cancel_futures:
            raise ValueError("each future is to be cancelled by whoever has it")
        with self._lock:
            self._is_shut = True
            self._work.put(None)
        if wait:
            self.join()

    def join(self, within_s: float | None = None) -> bool:
        """Wait, after `shutdown`, until what was submitted is done; False: it is not, after so many seconds."""
        if self._is_started:
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()


_log = logging.getLogger(__name__)


class DigestQueue:
    """Sub-blocks that were read and whose digests are not computed yet. Belongs to the mover's thread."""

    def __init__(
        self,
        digests: BlockDigests | None,
        deliver: Callable[[DigestEvent], None],
        watch: BackgroundWatch,
        helper: Executor | None,
    ) -> None:
        """`digests` computes digests of this node's blocks; None: there is no way to. `watch` is told of faults in the
        thread of `helper`; None: an executor with one thread is made.
        """
        self._digests = digests
        self._deliver = deliver
        self._watch = watch
        self._helper = helper or DaemonWorker("baton-digests")
        self._blocks: deque[tuple[int, Sequence[int], Division]] = deque()
        """A read's id, and local sub-blocks that it has filled."""

    def add(self, read_id: int, blocks: Sequence[int], division: Division = WHOLE) -> None:
        """Queue sub-blocks that a read has filled."""
        self._blocks.append((read_id, blocks, division))

    def compute(self, is_busy: Callable[[], bool]) -> None:
        """Compute the digests of all queued blocks and deliver them; in the helper's thread whenever `is_busy`."""
        while self._blocks:
            read_id, blocks, division = self._blocks.popleft()
            if is_busy():
                self._helper.submit(self._compute_in_helper, read_id, blocks, division)
            else:
                self._compute_now(read_id, blocks, division)

    def close(self, *, wait: bool) -> None:
        """Shut the helper down; `wait`: until its thread has ended."""
        self._helper.shutdown(wait=wait)

    def _compute_in_helper(self, read_id: int, blocks: Sequence[int], division: Division) -> None:
        # An executor keeps an exception in a future that nobody looks at, so the watch is told here.
        try:
            self._compute_now(read_id, blocks, division)
        except BaseException as error:
            self._watch.failed("digests", error)

    def _compute_now(self, read_id: int, blocks: Sequence[int], division: Division) -> None:
        try:
            if self._digests is None:
                raise ValueError("this mover computes no digests")
            digests = dict(zip(blocks, self._digests(blocks, division), strict=True))
        except Exception as error:
            _log.exception("could not compute the digests of the blocks that read %d brought: it fails", read_id)
            self._deliver(DigestsFailed(read_id, f"the reader could not compute digests: {error!r}"))
        else:
            self._deliver(BlocksDigested(read_id, digests))
