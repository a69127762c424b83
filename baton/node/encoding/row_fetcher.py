"""Fetches rows that the encoders of other nodes have made, so that the encoder here need not make them again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from baton.background import OnFault, current_watch
from baton.clock import Clock
from baton.engine.encoder_cache import EncoderInput
from baton.engine.runner import ModelInfo
from baton.errors import BatonError
from baton.messages.spans import RowsRequest
from baton.node.encoding.fetch_policy import FetchPolicy
from baton.wire.clients.encoder_rows_client import read_rows
from baton.wire.credentials import Dialer

_MOST_FETCHES = 8
"""Fetches at a time. What is asked for beyond that is encoded."""

_log = structlog.get_logger(__name__)


class RowSource(Protocol):
    """Where rows may come from, other than the encoder here. Its methods return at once; any thread may call them."""

    def fetch(self, each: EncoderInput, done: Callable[[bytes], None], none: Callable[[], None]) -> None:
        """Fetch the rows of an input whose content says who has them.

        Either `done` is called with their bytes (float32, row by row, little-endian), or `none`; on any thread.
        """
        ...

    def encoded(self, num_rows: int, seconds: float) -> None:
        """Take note of how long the encoder here took."""
        ...


class RowFetcher:
    """The RowSource of a node: the other nodes. Its work is done on the event loop."""

    def __init__(
        self,
        model: ModelInfo,
        dialer: Dialer,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        policy: FetchPolicy | None = None,
    ) -> None:
        """`model`: the one here, which the other node must have, too. `post` runs a callable on the event loop."""
        self._model = model
        self._dialer = dialer
        self._clock = clock
        self._post = post
        self._policy = policy if policy is not None else FetchPolicy()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch = current_watch.get()

    def fetch(self, each: EncoderInput, done: Callable[[bytes], None], none: Callable[[], None]) -> None:
        self._post(lambda: self._begin(each, done, none))

    def encoded(self, num_rows: int, seconds: float) -> None:
        self._post(lambda: self._policy.encoded(num_rows, seconds))

    async def close(self) -> None:
        """End all fetches without calling anybody."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, each: EncoderInput, done: Callable[[bytes], None], none: Callable[[], None]) -> None:
        peer = each.content.held_by
        seconds = None
        if peer is not None and len(self._tasks) < _MOST_FETCHES:
            seconds = self._policy.seconds_for(peer.incarnation, each.num_rows, self._clock.monotonic())
        if seconds is None:
            none()
            return
        # If the work raised unnoticed, the requests that wait for these rows would do so for ever.
        work = partial(self._fetch, each, seconds, done, none)
        task = self._watch.start(work, "rows", each.digest[:12], on_fault=OnFault.END_PROCESS, may_end=True)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(
        self, each: EncoderInput, seconds: float, done: Callable[[bytes], None], none: Callable[[], None]
    ) -> None:
        peer, model, began = each.content.held_by, self._model, self._clock.monotonic()
        assert peer is not None
        asked = RowsRequest(peer.incarnation, each.digest, model.fingerprint, model.dtype, model.numerics)
        try:
            num_bytes = 4 * each.num_rows * model.row_width
            rows = await read_rows(peer.address, asked, num_bytes, seconds, self._dialer)
        except BatonError as error:
            _log.info("rows are made here, since they could not be fetched", peer=peer.node_id, reason=str(error))
            self._policy.failed(peer.incarnation, self._clock.monotonic())
            rows = None
        else:
            if rows is not None:
                now = self._clock.monotonic()
                self._policy.fetched(each.num_rows, now - began, now)
        if rows is None:
            none()
        else:
            done(rows)
