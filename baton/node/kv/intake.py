"""Reads KV that other nodes computed.

`IntakeConnector` (`intake_connector.py`) belongs to the engine's thread: it tells the scheduler how many tokens of KV
can be read from another node, and posts to the event loop where to read them to, and when requests end. `Intake`
belongs to the event loop: it owns the transfers and the links, so that a step of any length delays nothing but the use
of the KV that arrived. While a read may still write to a request's blocks, the engine keeps them: it gets `released`
when both the request's end has been posted and the last read has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from baton.background import OnFault, current_watch
from baton.clock import Clock
from baton.engine.connector import ArrivedKV, KVTransferOutput, LostKV
from baton.engine.runner import KVLayout
from baton.errors import TransferCause, TransferFailed
from baton.failpoints import failpoint
from baton.messages.ids import AttemptKey, Peer
from baton.messages.node import StageTimings
from baton.messages.node_report import FailedProbe, HandoffReport, MeasuredPair, RefusedLink
from baton.node.kv.holders import Holders
from baton.node.kv.pair_prober import PairProber
from baton.node.kv.sender_links import AbsentSenders, SenderLinks
from baton.observe.log_limit import LimitedLog
from baton.wire.liveness import DIRECT, PeerAccess
from kv_transfer.digests import LazyInbox
from kv_transfer.effects import Recorded, Released
from kv_transfer.layout import LinkIdentity
from kv_transfer.link.failures import RefusedLinks
from kv_transfer.link.link import HEARTBEAT_S, SPARED
from kv_transfer.link.link_client import LinkClient
from kv_transfer.link.link_messages import (
    Closing,
    LinkWelcome,
    PartConfirmed,
    ProbeReady,
    ReadConfirmed,
    SenderMessage,
    request_of,
    sender_of,
)
from kv_transfer.mover.part_mover import (
    BlocksDigested,
    Connected,
    ConnectFailed,
    DeliverEvent,
    DigestEvent,
    DigestsFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.mover.parts_mover import PartsMover
from kv_transfer.receiver.block_map import BlockMap
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.receiver.transfer_values import (
    AbandonRead,
    Arrived,
    CutLink,
    Failed,
    MayPlan,
    OpenLink,
    ReopenLink,
    StartRead,
    TellSender,
    TransferCounts,
    TransferEffect,
    TransferPlan,
    TransferStats,
)

_log = logging.getLogger(__name__)
_MAX_STATS = 16384
"""Number of transfers whose statistics are kept."""
_IDLE_S = 600.0
"""A link that was opened for a pull or a move is closed when nothing was read over it for so long."""
_LOOK_S = 60.0
"""How often idle links are looked for."""


class Intake:
    """The receiver's side of all hand-offs of one node. Belongs to the event loop."""

    def __init__(
        self,
        identity: LinkIdentity,
        make_mover: Callable[[DeliverEvent], PartsMover],
        book: TransferBook,
        probes: JoinProbes,
        tell_engine: Callable[[KVTransferOutput], None],
        record: Callable[[str, AttemptKey, int, str], None],
        post: Callable[[Callable[[], None]], object],
        clock: Clock,
        peers: PeerAccess = DIRECT,
        layout: KVLayout | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        lane: Callable[[], str] = str,
    ) -> None:
        """`make_mover` gets the callable that takes the mover's events. `tell_engine` posts to the engine's inbox.
        `record` writes to the node's event log. `post` runs a callable on the event loop, from any thread. `layout`: of
        a block; None: it is not known, so senders have blocks of the same size and layers, in one memory. `lane` names
        the transport of the latest read, as far as it is known.
        """
        self._identity = identity
        self.mover = make_mover(self._deliver)
        self._tell_engine = tell_engine
        self._record = record
        self._heartbeat_s = heartbeat_s
        self._peers = peers
        self._post = post
        self._digest_events = LazyInbox[DigestEvent](lambda: post(self._collect_digests))
        self._book = book
        self._refused = RefusedLinks(clock)
        self._ended_log = LimitedLog(_log, logging.INFO, now=clock.monotonic)
        self.links = SenderLinks(self._new_link, self._reopen, clock)
        self._members: set[str] = set()
        """Incarnations of senders that have joined the cluster and not left it."""
        self.probes = probes
        self._prober = PairProber(
            self.probes,
            self.mover,
            tell=self.links.tell,
            proven=self._proven,
            end_link=self.links.cut,
            open_link=lambda source: self._carry_out(self._book.open(source)),
            refuse=lambda incarnation, error: self._carry_out(
                self._book.refuse_waiting(incarnation, error.cause, error.detail)
            ),
            lane=lane,
        )
        self._absent = AbsentSenders(self._sender_gone, self._disconnect, peers.probe_port)
        self._layout = layout
        self._pools: dict[str, tuple[int, BlockMap]] = {}
        """Size of each linked sender's pool in blocks, and the sizes of blocks, by incarnation."""
        self._of_other_numerics: set[str] = set()
        """The linked senders that compute KV under other numerics than this node."""
        self._asking: set[AttemptKey] = set()
        """Pulls for which no blocks are reserved yet."""
        self._pulls: dict[AttemptKey, str] = {}
        """Pulls that are not over, each with the incarnation that it reads from."""
        self.holders = Holders(clock, post, self._meet, lambda: tell_engine(KVTransferOutput()))
        self._may_plan: dict[AttemptKey, int] = {}
        """Expected attempts whose sender has begun to compute the prompt, so that blocks may be reserved for them; of
        pulls how many tokens the sender keeps."""
        self._arrived: OrderedDict[AttemptKey, tuple[TransferStats, Closing]] = OrderedDict()
        """What is known of each of the latest attempts whose KV has arrived."""
        self._watch = current_watch.get()
        self._mover_watch: asyncio.Task[None] | None = None
        self._stopped = False
        self._clock = clock
        self._needed_at: dict[str, float] = {}
        """When each link was needed last, on the clock, by incarnation."""
        self._look: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the transfer agent; raises its error."""
        await asyncio.to_thread(self.mover.start)
        self._prober.started()
        self._mover_watch = self._watch.start(self.mover.watch_turns, "mover-turns", on_fault=OnFault.END_PROCESS)
        self._look_for_idle_links()

    async def stop(self) -> None:
        """End the links and the agent. Transfers that are not over are not reported any more."""
        self._stopped = True
        if self._look is not None:
            self._look.cancel()
        self.holders.close()
        self._prober.close()
        await self.links.close()
        if self._mover_watch is not None:
            self._mover_watch.cancel()
            await asyncio.gather(self._mover_watch, return_exceptions=True)
        await self._absent.close()
        await asyncio.to_thread(self.mover.stop)

    def sender_joined(self, source: Peer) -> None:
        """Open a link to a sender that joined the cluster and probe it, before any request needs it. Until
        `sender_left`, the link is opened again whenever it has ended."""
        self._members.add(source.incarnation)
        if self.probes.objection(source.incarnation) is None:
            self._carry_out(self._book.open(source))

    def sender_left(self, incarnation: str) -> None:
        """Note that a sender has left the cluster. Its link is kept as long as the sender keeps it."""
        self._members.discard(incarnation)

    def _look_for_idle_links(self) -> None:
        self.close_idle_links(_IDLE_S)
        looks = self._watch.guarded(self._look_for_idle_links, "idle-links")
        self._look = asyncio.get_running_loop().call_later(_LOOK_S, looks)

    def close_idle_links(self, idle_s: float) -> None:
        """Close the links over which nothing was read for so many seconds, but for those to senders that have joined.
        The next pull or move opens one again."""
        now, needed_at = self._clock.monotonic(), self._needed_at
        self._needed_at = {
            name: now if name in self._members or self._book.needs(name) else needed_at.get(name, now)
            for name in self._pools
        }
        for name, at in self._needed_at.items():
            if now - at >= idle_s and name not in self._members and not self._book.needs(name):
                why = f"nothing was read over it for {idle_s:g} s"
                self.links.cut(name, TransferFailed(TransferCause.CANCELLED, why))

    # Called for the engine, on the event loop.

    def expect(self, attempt: AttemptKey, source: Peer, keys: Sequence[bytes] = ()) -> None:
        """Note that an attempt waits for KV from `source`. The engine is woken when `may_plan` becomes true for it, or
        gets its failure.

        `keys`: of the first blocks of a prompt, if these are pulled: the engine is woken when `num_kept` is known.
        """
        if self._stopped:
            return
        if keys:
            self._asking.add(attempt)
            self._pulls[attempt] = source.incarnation
        if (objection := self.probes.objection(source.incarnation)) is not None:
            self._carry_out(self._book.refuse(attempt, source, objection.cause, objection.detail))
        else:
            self._carry_out(self._book.expect(attempt, source, keys))

    def plan(self, plan: TransferPlan) -> None:
        """Read an attempt's KV into the blocks that were reserved for it."""
        failpoint("plan", plan.attempt.request_id)
        self._may_plan.pop(plan.attempt, None)
        self._asking.discard(plan.attempt)
        if not self._stopped:
            self._carry_out(self._book.plan(plan))

    def abandon(self, attempt: AttemptKey) -> None:
        """Give an attempt up, because its router has aborted it or the engine has ended it. Idempotent."""
        self._may_plan.pop(attempt, None)
        self._asking.discard(attempt)
        self._pulls.pop(attempt, None)
        self._carry_out(self._book.abandon(attempt))

    def ended(self, attempt: AttemptKey) -> None:
        """Note that the engine has ended the request. It keeps the blocks until it gets `released`."""
        self._carry_out(self._book.ended(attempt))

    # Called by the links.

    def link_up(self, welcome: LinkWelcome) -> None:
        windows = self._layout.windows if self._layout is not None else (None,)
        ours = self._identity.layout
        sizes = BlockMap(welcome.layout.block_size, ours.block_size, windows)
        has_our_numerics = welcome.layout.numerics == ours.numerics
        (self._of_other_numerics.discard if has_our_numerics else self._of_other_numerics.add)(welcome.incarnation)
        self._pools[welcome.incarnation] = (welcome.num_blocks, sizes)
        self._needed_at[welcome.incarnation] = self._clock.monotonic()
        # What is pulled is cached under keys of this node's own numerics.
        may_pull = welcome.takes_pulls and sizes.is_equal and has_our_numerics
        self.holders.link_up(welcome.incarnation, takes_pulls=may_pull)
        self._refused.link_opened(welcome.node_id)
        self._absent.link_opened(welcome.node_id, welcome.incarnation)
        sender = sender_of(welcome, self._layout)
        self.mover.connect(sender)
        if (source := self.links.source(welcome.incarnation)) is not None:
            # Between nodes of one part each the first group takes the same way as all others.
            groups = len(windows) if max(len(sender.parts), len(self.mover.parts)) > 1 else 1
            self._prober.carry_out(self.probes.link_up(source, sizes, groups, welcome.memory_kind))

    def link_received(self, incarnation: str, message: SenderMessage) -> None:
        step, request_id = type(message).__name__, request_of(message)
        failpoint(step, request_id)
        if isinstance(message, ProbeReady):
            self._prober.carry_out(self.probes.received(incarnation, message))
        elif message == SPARED:
            self.probes.spared(incarnation)
        else:
            self._carry_out(self._book.received(incarnation, message))
        if isinstance(message, (PartConfirmed, ReadConfirmed)):
            self._collect_digests()
        failpoint(f"{step}-done", request_id)

    def link_down(self, incarnation: str, error: TransferFailed) -> None:
        self._ended_log.happened("link to %s ended: %s", incarnation, error)
        source = self.links.ended(incarnation)
        was_up = self._pools.pop(incarnation, None) is not None
        self._of_other_numerics.discard(incarnation)
        self.holders.link_down(incarnation)
        if source is not None:
            self._refused.link_ended(source.node_id, error.cause, error.detail)
            if was_up and not self._stopped:
                self._absent.link_ended(source)
            self._prober.carry_out(self.probes.link_lost(source, error.cause, error.detail))
        self._carry_out(self._book.peer_lost(incarnation, error.cause, error.detail))
        if source is not None and self._is_wanted(source) and not self._stopped:
            self.links.reopen_later(source)
        else:
            self.links.give_up(incarnation)

    # For the node.

    def may_plan(self, attempt: AttemptKey) -> bool:
        """Whether the sender of an expected attempt has begun to compute it. May be called from any thread."""
        return attempt in self._may_plan

    def has_other_numerics(self, incarnation: str) -> bool:
        """Whether a sender with which there is a link computes under other numerics than this node. May be called from
        any thread."""
        return incarnation in self._of_other_numerics

    def num_kept(self, attempt: AttemptKey) -> int | None:
        """How many of a prompt's first tokens the sender keeps for a pull; None: it has not said that yet. May be
        called from any thread."""
        return self._may_plan.get(attempt)

    def stats(self, attempt: AttemptKey) -> TransferStats | None:
        """The statistics of an attempt's transfer; None before the KV has arrived, and for older attempts. May be
        called from any thread."""
        arrived = self._arrived.get(attempt)
        return arrived[0] if arrived is not None else None

    def prompt_timings(self, attempt: AttemptKey) -> StageTimings | None:
        """What the sender measured of an attempt whose KV has arrived; None: it did not say, as for `stats`."""
        arrived = self._arrived.get(attempt)
        return arrived[1].prompt_timings if arrived is not None else None

    def arrived_tokens(self, attempt: AttemptKey) -> Sequence[int]:
        """The output tokens that have come with an attempt's KV; empty where none is known to have."""
        arrived = self._arrived.get(attempt)
        return arrived[1].first_token_ids if arrived is not None else ()

    def counts(self) -> TransferCounts:
        return self._book.counts()

    def refused_links(self) -> Sequence[RefusedLink]:
        return self._refused.latest()

    def failed_probes(self) -> Sequence[FailedProbe]:
        return self.probes.failures()

    def slow_pairs(self) -> Sequence[MeasuredPair]:
        return [pair for pair in self.probes.rates.shown() if pair.why_slow]

    def report(self) -> HandoffReport:
        """The report for operators: the layout, open and ended hand-offs, refused links and failed probes."""
        return HandoffReport(
            layout=str(self._identity.layout),
            open=self._book.open_handoffs(),
            ended=self._book.ended_handoffs(),
            refused_links=self.refused_links(),
            failed_probes=self.failed_probes(),
            pairs=self.probes.rates.shown(),
        )

    @property
    def book(self) -> TransferBook:
        """The transfer book, to be read and not to be changed."""
        return self._book

    @property
    def num_links(self) -> int:
        return len(self.links)

    # Called for the mover.

    def _deliver(self, event: MoverEvent) -> None:
        """Take an event in any thread. An event about digests wakes the event loop only if a prompt waits for
        nothing else."""
        if isinstance(event, DigestEvent):
            self._digest_events.add(event)
        else:
            self._post(lambda: self._handle(event))

    def _handle(self, event: MoverEvent) -> None:
        self._collect_digests()
        if self._prober.handle(event):
            # It may be its digest that a probe waits for now.
            self._collect_digests()
            return
        failpoint(type(event).__name__)
        match event:
            case Connected(incarnation):
                self.links.connected(incarnation)
                # If the link has ended meanwhile, nothing waits for this memory.
                if incarnation in self._pools:
                    self._prober.carry_out(self.probes.connected(incarnation))
            case ConnectFailed(incarnation, error):
                self._prober.carry_out(self.probes.connect_failed(incarnation, error))
            case ReadDone(read_id, num_bytes, post_s, total_s, num_descriptors):
                self._carry_out(self._book.read_done(read_id, num_bytes, total_s, post_s, num_descriptors))
            case ReadFailed(read_id, cause, detail):
                self._carry_out(self._book.read_failed(read_id, cause, detail))
            case ReadStalled(read_id, detail):
                effects = self._book.read_stalled(read_id, detail)
                if effects:
                    _log.warning("a hand-off has stalled and is given up: %s", detail)
                self._carry_out(effects)

    def _proven(self, incarnation: str) -> None:
        """Use a sender for requests: known bytes were read from its memory."""
        self.links.proven(incarnation)
        self.holders.proven(incarnation)
        self._carry_out(self._book.peer_ready(incarnation, *self._pools[incarnation]))

    # Links, and carrying out what the book says.

    def _sender_gone(self, incarnation: str) -> None:
        self.mover.disconnect(incarnation)
        self.probes.sender_gone(incarnation)

    def _disconnect(self, incarnation: str) -> None:
        self.mover.disconnect(incarnation)
        self.probes.disconnected(incarnation)

    def _new_link(self, source: Peer) -> LinkClient:
        return LinkClient(
            self._identity,
            source,
            self,
            self._heartbeat_s,
            make_channel=self._peers.make_channel,
            is_running=self._peers.is_running,
        )

    def _meet(self, source: Peer) -> None:
        """Open a link to a node from which something is to be pulled."""
        if self._stopped or self.probes.objection(source.incarnation) is not None:
            self.holders.met(source.incarnation)
        else:
            self._carry_out(self._book.open(source))

    def _is_wanted(self, source: Peer) -> bool:
        """Whether there is to be a link though nothing needs it now. After a failed probe, the probes open it."""
        name = source.incarnation
        # The read of a probe may only end while its sender knows of a reader.
        is_known = name in self._members or self.probes.reads_go_on(name)
        return is_known and self.probes.objection(name) is None

    def _reopen(self, source: Peer) -> bool:
        """Open a link again if reads are still running after its end, or the sender is still in the cluster."""
        effects = self._book.reopen(source)
        if not effects and self._is_wanted(source):
            effects = self._book.open(source)
        self._carry_out(effects)
        return bool(effects)

    def _carry_out(self, effects: Iterable[TransferEffect]) -> None:
        if self._stopped:
            return
        for effect in effects:
            match effect:
                case OpenLink(source):
                    self.links.open(source)
                case ReopenLink(source):
                    self.links.reopen_later(source)
                case TellSender(incarnation, message):
                    self.links.tell(incarnation, message)
                case StartRead(read_id, incarnation, ranges, to_digest, digest_parts):
                    self.mover.read(read_id, incarnation, ranges, to_digest, digest_parts)
                case AbandonRead(read_id):
                    self.mover.abandon(read_id)
                case CutLink(incarnation, reason):
                    self.links.cut(incarnation, TransferFailed(TransferCause.PEER_GONE, reason))
                case Recorded(name, attempt, value, detail):
                    self._record(name, attempt, value, detail)
                case MayPlan(attempt, num_tokens):
                    self._may_plan[attempt] = num_tokens
                    # The output is empty, but makes the engine try again to admit requests that wait.
                    self._tell_engine(KVTransferOutput())
                case Arrived() | Failed() | Released():
                    self._tell_outcome(effect)

    def _collect_digests(self) -> None:
        """Handle the digests that have been computed. Later ones wake the loop if a prompt waits for nothing else."""
        self._digest_events.collect(
            self._handle_digests, lambda: self._book.awaits_digests or self.probes.awaits_digest
        )

    def _handle_digests(self, event: DigestEvent) -> None:
        if self._prober.handle(event):
            return
        match event:
            case BlocksDigested(read_id, digests):
                self._carry_out(self._book.digested(read_id, digests))
            case DigestsFailed(read_id, detail):
                self._carry_out(self._book.digests_failed(read_id, detail))

    def _tell_outcome(self, effect: Arrived | Failed | Released) -> None:
        key = str(effect.attempt)
        match effect:
            case Arrived(attempt, closing, stats, partly_filled):
                self._pulls.pop(attempt, None)
                self._arrived[attempt] = stats, closing
                if len(self._arrived) > _MAX_STATS:
                    self._arrived.popitem(last=False)
                arrived = ArrivedKV(tuple(closing.first_token_ids), closing.first_logprobs, partly_filled)
                self._tell_engine(KVTransferOutput(arrived={key: arrived}))
            case Failed(attempt, cause, detail, num_valid_blocks, partly_filled):
                self._may_plan.pop(attempt, None)
                holder = self._pulls.pop(attempt, None)
                if holder is not None and cause is not TransferCause.REFUSED:
                    self.holders.failed(holder)
                if attempt in self._asking:
                    # The request is computed, as if the sender had answered that it has nothing.
                    self._asking.discard(attempt)
                    self._may_plan[attempt] = 0
                    self._tell_engine(KVTransferOutput())
                    return
                lost = LostKV(cause, detail, num_valid_blocks, partly_filled)
                self._tell_engine(KVTransferOutput(failed={key: lost}))
            case Released():
                self._tell_engine(KVTransferOutput(released=frozenset({key})))
