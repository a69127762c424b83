"""Digests of what was read, computed by the mover's thread or by a helper's."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from baton.background import BackgroundWatch
from baton.runner.blocks.block_digests import BlockDigests
from kv_transfer.mover.mover_events import BlocksDigested, DigestEvent, NotDigested

_log = logging.getLogger(__name__)


class DigestQueue:
    """Blocks that were read and whose digests are not computed yet."""

    def __init__(
        self,
        digests: BlockDigests | None,
        deliver: Callable[[DigestEvent], None],
        watch: BackgroundWatch,
        helper: Executor | None,
    ) -> None:
        self._digests = digests
        self._deliver = deliver
        self._watch = watch
        self._helper = helper or ThreadPoolExecutor(1, "baton-digests")
        self._to_digest: deque[tuple[int, Sequence[int]]] = deque()
        """Reads and blocks of theirs."""

    def add(self, read_id: int, blocks: Sequence[int]) -> None:
        """Blocks of a read are here."""
        self._to_digest.append((read_id, blocks))

    def compute(self, is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether the mover has something to move, so that the helper computes."""
        while self._to_digest:
            read_id, blocks = self._to_digest.popleft()
            if is_busy():
                self._helper.submit(self._digest_beside, read_id, blocks)
            else:
                self._digest_blocks(read_id, blocks)

    def close(self, *, wait: bool) -> None:
        """End the helper."""
        self._helper.shutdown(wait=wait)

    def _digest_beside(self, read_id: int, blocks: Sequence[int]) -> None:
        """In the helper's thread, whose executor would keep a fault to itself."""
        try:
            self._digest_blocks(read_id, blocks)
        except BaseException as error:
            self._watch.failed("digests", error)

    def _digest_blocks(self, read_id: int, blocks: Sequence[int]) -> None:
        try:
            if self._digests is None:
                raise ValueError("nothing here computes any")
            digests = dict(zip(blocks, self._digests(blocks), strict=True))
        except Exception as error:
            _log.exception("no digests of a read's blocks")
            self._deliver(NotDigested(read_id, f"no digests here: {error!r}"))
        else:
            self._deliver(BlocksDigested(read_id, digests))
