"""Offers the blocks that the engine computed to other nodes.

`OfferConnector` (`offer_connector.py`) belongs to the engine's thread: it notes which blocks became full and which
requests ended, and posts both to the event loop. `Offering` belongs to the event loop: it owns the leases and the
readers' links, so that a step of any length delays no offer, no confirmation and no heartbeat. When a request has
ended, the engine keeps its blocks until `Offering` reports `released`, which it does only after the end was posted to
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cachetools import FIFOCache

from baton.background import OnFault, current_watch
from baton.clock import Clock
from baton.engine.connector import KVTransferOutput, Pin
from baton.engine.kv_cache.block_hash import KEY_BYTES
from baton.engine.runner import KVMemory
from baton.errors import TransferCause
from baton.failpoints import failpoint
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import NULL_BLOCK
from baton.messages.node import StageTimings
from baton.messages.node_report import KV_PROBE_FAILED, FailedProbe, HandoffReport, MeasuredPair, RefusedLink
from baton.observe.log_limit import LimitedLog
from baton.runner.blocks.digest_definition import BlockDigests
from baton.wire.liveness import IsRunning, has_ended, is_running, nobody_listens
from kv_transfer.digests import BlockName, OfferedDigests
from kv_transfer.effects import Recorded, Released
from kv_transfer.layout import LinkIdentity
from kv_transfer.link.failures import RefusedLinks
from kv_transfer.link.link import HEARTBEAT_S
from kv_transfer.link.link_messages import (
    AskProbe,
    Closing,
    Expect,
    OfferLost,
    ProbeResult,
    Pull,
    ReaderMessage,
    is_digested,
    request_of,
)
from kv_transfer.link.link_server import LinkServer
from kv_transfer.mover.part_mover import BlockFilled, DeliverEvent, FillFailed, MoverEvent
from kv_transfer.mover.parts_mover import PartsMover
from kv_transfer.sender.lease import LeaseBook
from kv_transfer.sender.lease_values import CutLink, LeaseEffect, LeaseStats, LeaseTimes, OpenLeases, TellReader
from kv_transfer.sender.probe_offers import FailLink, FillProbe, OfferEffect, ProbeOffers

_log = logging.getLogger(__name__)
_MAX_PULLS = 8
"""Pulls from this node's prefix cache that may be open at once. Another reader computes what it wants itself."""
_MAX_TIMED = 4096
"""Attempts whose timings are kept until their last blocks are offered, which are offered at once."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """A node that has a link to this one."""

    node_id: str
    incarnation: str
    address: str
    """Where its process listens; empty: unknown."""
    parts: int
    """How many blocks of the reader have the tokens of one here; 1 if the reader's are larger."""


class Offering:
    """The sender's side of all hand-offs of one node. Belongs to the event loop."""

    def __init__(
        self,
        identity: LinkIdentity,
        memory: KVMemory,
        make_mover: Callable[[DeliverEvent], PartsMover],
        tell_engine: Callable[[KVTransferOutput], None],
        record: Callable[[str, AttemptKey, int, str], None],
        clock: Clock,
        times: LeaseTimes | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        nobody_listens: Callable[[str], Awaitable[bool]] = nobody_listens,
        digests: BlockDigests | None = None,
        digest_every: int = 1,
        is_running: IsRunning = is_running,
    ) -> None:
        """`make_mover` gets the callable that takes the mover's events. `tell_engine` posts to the engine's inbox.
        `record` writes to the node's event log. `nobody_listens` and `is_running` tell whether the process of a reader
        whose link has ended is gone.

        `digests` computes digests of this node's blocks, for one in `digest_every` of those that are offered; None:
        readers get no digests.
        """
        self._identity = identity
        self.mover = make_mover(self._deliver)
        self._tell_engine = tell_engine
        self._record = record
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._digest_every = digest_every if digests is not None else 0
        self._book = LeaseBook(clock, times, digest_every=self._digest_every)
        self._digests = OfferedDigests(digests) if digests is not None else None
        self._num_blocks = memory.num_blocks
        probe_block = memory.num_blocks if memory.num_probe_blocks else None
        num_groups = len(memory.layout.groups) if memory.layout is not None else 1
        self.probes = ProbeOffers(identity.node_id, identity.incarnation, probe_block, clock, num_groups=num_groups)
        self._probes_log = LimitedLog(_log, now=clock.monotonic)
        self._timings: FIFOCache[AttemptKey, StageTimings] = FIFOCache(_MAX_TIMED)
        """What the node measured of attempts, until their last blocks are offered."""
        self._pins: set[AttemptKey] = set()
        """Open pulls from the prefix cache."""
        self._moves: dict[AttemptKey, str] = {}
        """Streams that are moved to other nodes, or were: by the attempt under which they are offered the id by which
        the engine knows them."""
        self._holders: dict[AttemptKey, str] = {}
        """Attempts whose request has ended and whose blocks are not released: the id under which the engine keeps
        them."""
        self._num_held = Counter[str]()
        """How many attempts have each such id."""
        self._num_read: dict[AttemptKey, int] = {}
        """How many blocks of each stream that is moved its reader has, where there is one."""
        self._num_leases = 0
        """Leases that may be read."""
        self._num_readers = 0
        """Leases and probes that may be read: while there are any, the mover makes progress."""
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._server: LinkServer | None = None
        self._refused = RefusedLinks(clock)
        self._refused_log = LimitedLog(_log, now=clock.monotonic)
        self._ended_log = LimitedLog(_log, logging.INFO, now=clock.monotonic)
        self._nobody_listens = nobody_listens
        self._is_running = is_running
        self._readers: dict[int, _Reader] = {}
        """The reader on each link."""
        self._end_checks: set[asyncio.Task[None]] = set()
        """Tasks that check whether the processes of readers whose link has ended are gone."""
        self._watch = current_watch.get()
        self._mover_watch: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Start the transfer agent; raises its error. To be called before `add_to_server`."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self.mover.start)
        self._mover_watch = self._watch.start(self.mover.watch_turns, "mover-turns", on_fault=OnFault.END_PROCESS)
        node = self.mover.published(self._identity.incarnation)
        self._server = LinkServer(self._identity, node, self, self._heartbeat_s, is_running=self._is_running)

    def add_to_server(self, server: Any) -> None:
        """Serve KvLink on this grpc.aio server."""
        self._links.add_to_server(server)

    async def stop(self) -> None:
        """End the links and the agent. With its link, the transfer of a reader that has not read everything fails."""
        self._stopped = True
        self._links.close()
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._end_checks, *([self._mover_watch] if self._mover_watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.mover.stop)

    @property
    def _links(self) -> LinkServer:
        if self._server is None:
            raise RuntimeError("Offering.start was not called")
        return self._server

    # Called for the engine, on the event loop.

    def begun(self, attempt: AttemptKey) -> None:
        """Note that a prompt has all the blocks that it needs, and will be computed."""
        self._carry_out(self._book.begun(attempt))

    def timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        """Note what the node measured of the attempt, which its reader is told with the last offer."""
        self._timings[attempt] = timings

    def offer(
        self,
        attempt: AttemptKey,
        first_block: int,
        block_ids: Sequence[int],
        closing: Closing | None = None,
        digest_parts: int = 1,
    ) -> None:
        """Offer computed blocks of a prompt, from its block `first_block` on. With `closing` they are the last ones.

        `digest_parts`: how many digests each block gets, the same for all of the attempt.
        """
        failpoint("offer" if closing is None else "closing-offer", attempt.request_id)
        if closing is not None:
            closing = replace(closing, prompt_timings=self._timings.pop(attempt, None))
        try:
            effects = self._book.offer(attempt, first_block, block_ids, closing, digest_parts)
        except ValueError:
            _log.exception("%s: an offer does not continue the one before: the attempt's offers are withdrawn", attempt)
            effects = self._book.withdraw(attempt, "its offers do not continue each other", promise_broken=True)
        self._carry_out(effects)

    def pinned(self, pin: Pin, block_ids: Sequence[int], num_tokens: int) -> None:
        """Offer what the engine keeps for a reader that pulls: these blocks, of so many tokens, if there are any. Then
        `pin_digested` follows, and the blocks are kept until the engine gets `released`."""
        attempt = pin.attempt
        if not block_ids:
            self._pins.discard(attempt)
            self.withdraw(attempt, "nothing of it is cached here any more", TransferCause.REFUSED)
        elif self._book.knows(attempt):
            # Otherwise its reader is gone meanwhile.
            self._carry_out(self._book.begun(attempt, num_tokens))
            self.offer(attempt, 0, block_ids)

    def pin_digested(self, pin: Pin, num_blocks: int, num_tokens: int) -> None:
        """Note that all digests of what is pulled were told (`digested`): nothing more is offered to its reader."""
        if self._book.knows(pin.attempt):
            self.offer(pin.attempt, num_blocks, (), Closing(num_tokens, (), ended=False))
        self.ended(pin.attempt, pin.holder)

    def wake_engine(self) -> None:
        """Let the engine take a turn, though there may be nothing for it to compute."""
        self._tell_engine(KVTransferOutput())

    def move_asked(self, to: AttemptKey, holder: str) -> None:
        """A stream is to be offered as the attempt `to`, if the engine can; it keeps the blocks under the id `holder`.
        The engine is to be asked after this."""
        for earlier in self._moves_of(holder):
            if not self._book.knows(earlier):
                del self._moves[earlier]
        self._moves[to] = holder

    def move_begun(self, to: AttemptKey, num_tokens: int) -> None:
        """The engine will offer it; so many of its tokens have KV."""
        self._carry_out(self._book.begun(to, num_tokens))

    def move_refused(self, to: AttemptKey, why: str) -> None:
        """The engine will not offer it."""
        self._moves.pop(to, None)
        self.withdraw(to, why, TransferCause.REFUSED)

    def num_read(self, to: AttemptKey) -> int | None:
        """How many of its first blocks the reader of a stream that is moved has; None: nobody reads it. May be called
        from any thread."""
        return self._num_read.get(to)

    def digested(self, attempt: AttemptKey, digests: Sequence[int]) -> None:
        """Note the digests of the next blocks that were offered, as `compute_digests` returned them."""
        self._carry_out(self._book.digested(attempt, digests))

    def withdraw(
        self,
        attempt: AttemptKey,
        detail: str,
        cause: TransferCause = TransferCause.LEASE_LOST,
        *,
        promise_broken: bool = False,
    ) -> None:
        """Take an attempt's offers back: no more will be offered, or its router has aborted it. Idempotent.

        `promise_broken`: the offered blocks may hold other KV by now, because of a preemption or a fault.
        """
        self._carry_out(self._book.withdraw(attempt, detail, cause, promise_broken=promise_broken))

    def aborted(self, attempt: AttemptKey) -> None:
        """The router does not want the attempt any more. A stream that was to move to it goes on here."""
        if attempt in self._moves:
            self._tell_engine(KVTransferOutput(moves_ended=[attempt]))
        self.withdraw(attempt, "aborted", TransferCause.CANCELLED)

    def knows(self, attempt: AttemptKey) -> bool:
        """Whether the attempt was named here, and is not over."""
        return attempt in self._moves or self._book.knows(attempt)

    def ended(self, attempt: AttemptKey, holder: str) -> None:
        """Note that the engine has ended the request. It keeps the blocks under the id `holder` until it gets
        `released`, which it gets when they are lent to nobody, also not because of an earlier move of the stream."""
        lent = dict.fromkeys([attempt, *self._moves_of(holder)], holder)
        self._num_held[holder] += len(lent.keys() - self._holders.keys())
        self._holders |= lent
        for each in lent:
            self._carry_out(self._book.ended(each))

    def _moves_of(self, holder: str) -> Sequence[AttemptKey]:
        return [move for move, kept_under in self._moves.items() if kept_under == holder]

    # Called on the engine's thread.

    @property
    def has_digests(self) -> bool:
        """Whether readers get digests."""
        return self._digests is not None

    @property
    def num_digests_computed(self) -> int:
        """How many digests were computed so far; others were known."""
        return self._digests.num_computed if self._digests is not None else 0

    def compute_digests(
        self,
        attempt: AttemptKey,
        first_block: int,
        block_ids: Sequence[int],
        names: Sequence[BlockName],
        parts: int = 1,
    ) -> Sequence[int]:
        """Compute the digests of the `parts` of each of these full prompt blocks, which nothing writes to any more;
        zeros for blocks that readers do not compare.

        Raises RuntimeError unless `has_digests`.
        """
        if self._digests is None:
            raise RuntimeError("readers get no digests")
        every = self._digest_every
        wanted = [
            block if is_digested(attempt, index, every) else NULL_BLOCK
            for index, block in enumerate(block_ids, first_block)
        ]
        return self._digests.digests_of(wanted, names, parts)

    # Called by the links.

    def link_opened(self, link: int, node_id: str, incarnation: str, address: str, block_size: int) -> None:
        parts = max(1, self._identity.layout.block_size // block_size)
        self._readers[link] = _Reader(node_id, incarnation, address, parts)
        self._refused.link_opened(node_id)
        self._carry_out(self._book.link_opened(link, node_id, incarnation))

    def link_refused(self, node_id: str, cause: TransferCause, detail: str) -> None:
        self._refused.link_ended(node_id, cause, detail)
        self._refused_log.happened("refused a link from %s, which can't read prompts from here: %s", node_id, detail)

    def link_received(self, link: int, message: ReaderMessage) -> None:
        step, request_id = type(message).__name__, request_of(message)
        failpoint(step, request_id)
        match message:
            case AskProbe():
                reader = self._readers[link]
                self._carry_out_probes(
                    self.probes.asked(link, reader.node_id, reader.incarnation, message, reader.parts)
                )
            case ProbeResult():
                self._carry_out_probes(self.probes.result(link, message))
            case Pull():
                self._pull(link, message)
            case _:
                self._carry_out(self._book.received(link, message))
        failpoint(f"{step}-done", request_id)

    def _pull(self, link: int, pull: Pull) -> None:
        """Ask the engine for cached blocks. Until it answers the reader waits, as for a prompt that is computed."""
        attempt, why = pull.attempt, ""
        if attempt in self._pins or self._book.knows(attempt):
            self._book.counters["duplicate_pull"] += 1
            return
        if len(self._pins) >= _MAX_PULLS:
            why = f"{_MAX_PULLS} pulls are open here"
        elif not 0 < len(pull.keys) <= self._num_blocks or any(len(key) != KEY_BYTES for key in pull.keys):
            why = "these are no keys of a prompt that this node could hold"
        if why:
            self._links.send(link, OfferLost(attempt, why, TransferCause.REFUSED))
            return
        self._pins.add(attempt)
        self._carry_out(self._book.received(link, Expect(attempt)))
        self._tell_engine(KVTransferOutput(pins=[Pin(attempt, pull.keys)]))

    def link_closed(self, link: int, reason: str) -> None:
        reader = self._readers[link]
        self._ended_log.happened("link from %s ended: %s", reader.incarnation, reason)
        self.probes.link_closed(link)
        self._carry_out(self._book.link_closed(link))
        del self._readers[link]
        if reader.address and not self._stopped and self._book.may_be_read_by(reader.incarnation):
            # If this check fails, the leases end a little later: when the grace period after the link's end is over.
            task = self._watch.start(
                lambda: self._end_if_gone(reader.incarnation, reader.address),
                "look-for",
                reader.incarnation,
                on_fault=OnFault.GO_ON,
                may_end=True,
            )
            self._end_checks.add(task)
            task.add_done_callback(self._end_checks.discard)

    async def _end_if_gone(self, incarnation: str, address: str) -> None:
        """End a reader's leases without waiting for the grace period, if its process has ended."""
        if await has_ended(address, self._nobody_listens):
            _log.info("reader %s is gone: nobody listens on %s", incarnation, address)
            self.probes.reader_gone(incarnation)
            self._watch.guarded(lambda: self._carry_out(self._book.reader_gone(incarnation)), "leases")()

    # For metrics and tests.

    @property
    def book(self) -> LeaseBook:
        """The lease book, to be read and not to be changed."""
        return self._book

    @property
    def num_links(self) -> int:
        return self._links.num_links

    def stats(self) -> LeaseStats:
        return self._book.stats()

    def refused_links(self) -> Sequence[RefusedLink]:
        return self._refused.latest()

    def failed_probes(self) -> Sequence[FailedProbe]:
        return self.probes.failures()

    def slow_pairs(self) -> Sequence[MeasuredPair]:
        """None: the reader measures."""
        return ()

    def report(self) -> HandoffReport:
        """The report for operators: the layout, open hand-offs, refused links and failed probes."""
        return HandoffReport(
            layout=str(self._identity.layout),
            open=self._book.open_handoffs(),
            refused_links=self.refused_links(),
            failed_probes=self.failed_probes(),
        )

    def tick(self) -> None:
        """Carry out what is due. Called by the event loop's timer."""
        self._timer = self._due = None
        self.probes.tick()
        self._carry_out(self._book.tick())

    def _carry_out(self, effects: Iterable[LeaseEffect]) -> None:
        for effect in effects:
            match effect:
                case TellReader(link, message):
                    self._links.send(link, message)
                case OpenLeases(count):
                    self._num_leases = count
                case Released(attempt):
                    self._pins.discard(attempt)
                    self._moves.pop(attempt, None)
                    holder = self._holders.pop(attempt)
                    self._num_held[holder] -= 1
                    if not self._num_held[holder]:
                        del self._num_held[holder]
                        self._tell_engine(KVTransferOutput(released=frozenset({holder})))
                case CutLink(link, reason):
                    self._links.cut(link, reason)
                case Recorded(name, attempt, value, detail):
                    self._record(name, attempt, value, detail)
        if self._moves:
            read = {to: self._book.num_read(to) for to in self._moves}
            self._num_read = {to: count for to, count in read.items() if count is not None}
        self._let_reads_progress()
        self._set_timer()

    def _carry_out_probes(self, effects: Iterable[OfferEffect]) -> None:
        for effect in effects:
            match effect:
                case TellReader(link, message):
                    self._links.send(link, message)
                case FillProbe(fill_id, block, seed, group):
                    self.mover.fill(fill_id, block, seed, group)
                case FailLink(link, detail):
                    self._probes_log.happened("%s: %s", KV_PROBE_FAILED, detail)
                    self._links.cut(link, detail, TransferCause.PROBE_FAILED)
        self._let_reads_progress()
        self._set_timer()

    def _let_reads_progress(self) -> None:
        num_readers = self._num_leases + self.probes.num_open
        if num_readers != self._num_readers:
            self._num_readers = num_readers
            self.mover.set_num_readers(num_readers)

    def _deliver(self, event: MoverEvent) -> None:
        """Take an event in any thread. A sender reads nothing, so there are those about probes alone."""
        # The mover's thread may outlive the event loop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._watch.guarded(lambda: self._handle(event), "probes"))

    def _handle(self, event: MoverEvent) -> None:
        match event:
            case BlockFilled(fill_id, digests):
                self._carry_out_probes(self.probes.filled(fill_id, digests))
            case FillFailed(fill_id, detail):
                self._carry_out_probes(self.probes.fill_failed(fill_id, detail))

    def _set_timer(self) -> None:
        deadlines = (self._book.next_deadline(), self.probes.next_deadline())
        due = min((at for at in deadlines if at is not None), default=None)
        if self._stopped or due is None or (self._due is not None and self._due <= due):
            # A timer that fires too early finds nothing to do, and sets the next one.
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        delay = max(0.0, due - self._clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._watch.guarded(self.tick, "leases"))
