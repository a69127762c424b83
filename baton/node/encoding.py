"""Where a node gets the rows of inputs (images, speech, texts) from: its own encoder's thread, or another node.

Rows are made on a thread, so that no step waits for an encoder. Rows that another node has are fetched as long as that
is expected to take less time than the encoder here would take, and while one of the two times is not known. A fetch
that was slow is forgotten after a while, so that it is tried again. A fetch gets as much time as the encoder would
need: so an input whose holder hangs takes at most twice as long as it would without one.

Where the cluster has encode nodes, one of them was named for an input of which nobody has rows: it is sent the input,
and makes them. It spares this node's processor, so it may take longer than the encoder here, by `PATIENCE`. An input is
encoded here if it does not, is gone, or refuses.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from baton.background import OnFault, current_watch
from baton.clock import Clock
from baton.engine.encoder_cache import EncoderInput
from baton.engine.runner import ModelInfo, ModelRunner
from baton.engine.scheduler import Scheduler
from baton.errors import BatonError, EngineFault, InvalidRequest, Overloaded
from baton.messages.ids import Peer
from baton.messages.spans import EncoderContent, RowsRequest
from baton.wire.clients.encoder_rows_client import read_rows
from baton.wire.credentials import Dialer

_log = structlog.get_logger(__name__)


UNKNOWN_S = 2.0
"""Seconds for a fetch while it is not known how long the encoder takes."""
SHORTEST_S = 0.1
"""The least seconds for a fetch: connections are opened within them, also on a busy machine."""
PATIENCE = 3.0
"""An encode node gets so many times as long as the encoder here would take."""
AVOID_S = 10.0
"""For so many seconds nothing is fetched from a node that did not give what it should have."""
FORGET_S = 60.0
"""For so many seconds it is known how long fetches take."""
_MOST_AVOIDED = 64
_WEIGHT = 0.3
"""The weight of the last time in the mean of all times."""


class FetchPolicy:
    """What one node has learned of its encoder and of other nodes. Seconds on one clock."""

    def __init__(self) -> None:
        self._encode_s_per_row: float | None = None
        self._fetch_s_per_row: float | None = None
        self._fetched_at = 0.0
        self._avoided_until: dict[tuple[str, str], float] = {}
        """By incarnation and tenant: an encode node may be slow for one that floods it, and not for others."""

    def encoded(self, num_rows: int, seconds: float) -> None:
        """The encoder here took so long."""
        self._encode_s_per_row = _faded(self._encode_s_per_row, seconds / num_rows)

    def fetched(self, num_rows: int, seconds: float, now: float) -> None:
        """Rows came from another node in so many seconds."""
        self._fetch_s_per_row = _faded(self._known_fetch(now), seconds / num_rows)
        self._fetched_at = now

    def failed(self, incarnation: str, now: float, tenant: str = "") -> None:
        """A node did not give rows: it could not be reached, hung, or sent something else.

        `tenant`: for whom it was to make them; empty: it was to have them.
        """
        self._avoided_until = {peer: until for peer, until in self._avoided_until.items() if until > now}
        if len(self._avoided_until) < _MOST_AVOIDED:
            self._avoided_until[incarnation, tenant] = now + AVOID_S

    def seconds_for(
        self, incarnation: str, num_rows: int, now: float, *, makes: bool = False, tenant: str = ""
    ) -> float | None:
        """Seconds within which so many rows must come from this node; None: they are made here.

        `makes`: it is an encode node, which makes them for this tenant.
        """
        if self._avoided_until.get((incarnation, tenant), now) > now:
            return None
        encode, fetch = self._encode_s_per_row, self._known_fetch(now)
        if encode is None:
            return UNKNOWN_S
        if makes:
            return max(SHORTEST_S, PATIENCE * encode * num_rows)
        if fetch is not None and fetch >= encode:
            return None
        return max(SHORTEST_S, encode * num_rows)

    def _known_fetch(self, now: float) -> float | None:
        return self._fetch_s_per_row if now < self._fetched_at + FORGET_S else None


def _faded(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)


_MOST_FETCHES = 32
_MOST_FETCHES_OF_TENANT = 8
"""Fetches at a time, and those of one tenant. What is asked for beyond that is encoded."""


class RowSource(Protocol):
    """Where rows may come from, other than the encoder here. Its methods return at once; any thread may call them."""

    def fetch(self, encoder_input: EncoderInput, done: Callable[[bytes], None], none: Callable[[], None]) -> None:
        """Fetch the rows of an input whose content says who has them, or makes them.

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
        self._num_open: Counter[str] = Counter()
        """How many of them there are, by tenant."""
        self._watch = current_watch.get()

    def fetch(self, encoder_input: EncoderInput, done: Callable[[bytes], None], none: Callable[[], None]) -> None:
        self._post(lambda: self._begin(encoder_input, done, none))

    def encoded(self, num_rows: int, seconds: float) -> None:
        self._post(lambda: self._policy.encoded(num_rows, seconds))

    async def close(self) -> None:
        """End all fetches without calling anybody."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, encoder_input: EncoderInput, done: Callable[[bytes], None], none: Callable[[], None]) -> None:
        makes, tenant, seconds = encoder_input.content.encoded_by is not None, encoder_input.tenant, None
        peer = encoder_input.content.encoded_by or encoder_input.content.held_by
        if peer is not None and len(self._tasks) < _MOST_FETCHES and self._num_open[tenant] < _MOST_FETCHES_OF_TENANT:
            num_rows, now = encoder_input.num_rows, self._clock.monotonic()
            of_tenant = tenant if makes else ""
            seconds = self._policy.seconds_for(peer.incarnation, num_rows, now, makes=makes, tenant=of_tenant)
        if peer is None or seconds is None:
            none()
            return
        # If the work raised unnoticed, the requests that wait for these rows would do so for ever.
        work = partial(self._fetch, encoder_input, peer, seconds, done, none)
        task = self._watch.start(work, "rows", encoder_input.digest[:12], on_fault=OnFault.END_PROCESS, may_end=True)
        self._tasks.add(task)
        self._num_open[tenant] += 1
        task.add_done_callback(lambda ended: self._ended(ended, tenant))

    def _ended(self, task: asyncio.Task[None], tenant: str) -> None:
        self._tasks.discard(task)
        self._num_open[tenant] -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant]

    async def _fetch(
        self,
        encoder_input: EncoderInput,
        peer: Peer,
        seconds: float,
        done: Callable[[bytes], None],
        none: Callable[[], None],
    ) -> None:
        model, content, began, rows = self._model, encoder_input.content, self._clock.monotonic(), None
        numerics, makes = model.row_numerics or model.numerics, content.encoded_by is not None
        asked = RowsRequest(peer.incarnation, content.digest, model.fingerprint, model.dtype, numerics)
        if makes:
            sent = EncoderContent(content.digest, content.data, content.kind)
            asked = replace(asked, content=sent, num_rows=encoder_input.num_rows, tenant=encoder_input.tenant)
        try:
            num_bytes = 4 * encoder_input.num_rows * model.row_width
            rows = await read_rows(peer.address, asked, num_bytes, seconds, self._dialer)
        except BatonError as error:
            _log.info("rows are made here, since they could not be fetched", peer=peer.node_id, reason=str(error))
            # An encode node that refuses at once costs no time: it may be this input that it can't take.
            if not (makes and isinstance(error, InvalidRequest | Overloaded)):
                tenant = encoder_input.tenant if makes else ""
                self._policy.failed(peer.incarnation, self._clock.monotonic(), tenant)
        if rows is None:
            none()
            return
        if not makes:
            now = self._clock.monotonic()
            self._policy.fetched(encoder_input.num_rows, now - began, now)
        done(rows)


class EncoderThread:
    """The `InputEncoder` of an engine with a driver. It encodes one input at a time, or fetches its rows.

    The engine's thread alone calls its methods, which return at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        post: Callable[[Callable[[], None]], None],
        rows: RowSource | None = None,
        on_end: Callable[[str, Exception | None], None] = lambda digest, error: None,
    ) -> None:
        """`post` runs a callable on the engine's thread. `rows`: where rows may come from, apart from the encoder.

        `on_end` is called on the engine's thread once the scheduler knows that an input's rows are there, or with the
        error with which they could not be made.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._post = post
        self._rows = rows
        self._on_end = on_end
        self._fetching: set[str] = set()
        """Inputs whose rows are being fetched, by digest."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-encoder")
        self._waiting: dict[str, Future[None]] = {}
        """What is still to be encoded, by digest."""

    def start_encoding(self, encoder_input: EncoderInput) -> None:
        if self._rows is None or not _others_have(encoder_input):
            self._encode(encoder_input)
            return
        self._fetching.add(encoder_input.digest)
        self._rows.fetch(
            encoder_input,
            lambda rows: self._post(lambda: self._on_fetched(encoder_input, rows)),
            lambda: self._post(lambda: self._on_fetched(encoder_input, None)),
        )

    def release(self, digests: Sequence[str]) -> None:
        for digest in digests:
            if (future := self._waiting.pop(digest, None)) is not None:
                future.cancel()
        self._runner.encoder.release(digests)

    def close(self) -> None:
        """Give up all inputs. One that is being encoded may take long, and is not waited for: its rows are not kept.

        Idempotent.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._runner.encoder.release(None)

    def _on_fetched(self, encoder_input: EncoderInput, rows: bytes | None) -> None:
        """Take the rows of an input that another node made, None if they could not be fetched."""
        was_open = encoder_input.digest in self._fetching
        self._fetching.discard(encoder_input.digest)
        if not (was_open and self._scheduler.encoder_cache.awaits(encoder_input.digest)):
            return
        if rows is not None:
            try:
                self._runner.encoder.keep(encoder_input.digest, encoder_input.num_rows, rows)
            except ValueError as error:
                _log.warning("rows that were fetched can't be used, and are made here", reason=str(error))
            else:
                self._scheduler.input_encoded(encoder_input.digest, is_fetched=True)
                return
        self._encode(encoder_input)

    def _encode(self, encoder_input: EncoderInput) -> None:
        # A fetch for a request that has ended may still be open. Its answer must not have the input encoded once more.
        self._fetching.discard(encoder_input.digest)
        self._waiting = {digest: future for digest, future in self._waiting.items() if not future.done()}
        self._waiting[encoder_input.digest] = self._pool.submit(self._run, encoder_input)

    def _run(self, encoder_input: EncoderInput) -> None:
        """Encode an input, on the thread."""
        clock = self._scheduler.clock
        began = clock.monotonic()
        try:
            self._runner.encoder.encode(encoder_input.content, encoder_input.num_rows)
        except BatonError as error:
            self._post(partial(self._failed, encoder_input.digest, error))
            return
        except Exception as error:
            _log.exception("could not encode an input: the requests that need it fail")
            fault = EngineFault(f"the encoder failed: {error!r}")
            self._post(partial(self._failed, encoder_input.digest, fault))
            return
        if self._rows is not None:
            self._rows.encoded(encoder_input.num_rows, clock.monotonic() - began)
        self._post(lambda: self._encoded(encoder_input.digest))

    def _encoded(self, digest: str) -> None:
        self._scheduler.input_encoded(digest)
        self._on_end(digest, None)

    def _failed(self, digest: str, error: Exception) -> None:
        self._scheduler.input_failed(digest, error)
        self._on_end(digest, error)


def _others_have(encoder_input: EncoderInput) -> bool:
    """Whether another node was named that has the rows of an input, or makes them."""
    content = encoder_input.content
    return content.held_by is not None or content.encoded_by is not None
