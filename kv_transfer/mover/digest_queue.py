"""Digests of the sub-blocks that were read, computed by the mover's thread or by a helper's."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from baton.background import BackgroundWatch
from baton.runner.blocks.block_digests import BlockDigests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.mover.daemon_worker import DaemonWorker
from kv_transfer.mover.mover_events import BlocksDigested, DigestEvent, DigestsFailed

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
