"""The movers of a node's parts as one; most nodes have one part.

What becomes of a call, and how answers are merged, is decided by `parts_merge.py`. Any thread may bring it a call or an
event. What follows is carried out in order and without a lock, by the thread that came first, so that a part's mover
may answer while it is told something.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from baton.background import current_watch
from baton.clock import Clock
from baton.engine.runner import KVLayout, ModelRunner, RemotePart
from baton.errors import ConfigError
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.digest_definition import BlockDigests
from kv_transfer.layout import PeerNode, part_name, parts_problem
from kv_transfer.mover.agent_reads import STALL_S
from kv_transfer.mover.merge_values import (
    AbandonPart,
    ConnectPart,
    Deliver,
    DisconnectPart,
    FillPart,
    MergeEffect,
    ReadPart,
)
from kv_transfer.mover.part_mover import (
    DeliverEvent,
    MoverEvent,
    PartMover,
    ReadFigures,
)
from kv_transfer.mover.parts_merge import PartsMerge
from kv_transfer.mover.remote_mover import RemoteMover, digests_of_parts
from kv_transfer.piece_plan import ReadRange


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A part of this node."""

    layers: range
    make_mover: Callable[[DeliverEvent], PartMover]
    """Makes its mover, which gives its events to this callable."""


class PartsMover:
    """Reads blocks of peers into the memories of this node's parts. Its calls and events are those of `PartMover`, with
    whole nodes as peers."""

    def __init__(self, layout: KVLayout | None, parts: Sequence[OwnPart], deliver: DeliverEvent) -> None:
        """`layout`: of a block of all layers; None: it is not known, and both this node and its peers have one part.

        Raises ConfigError unless each layer is in one part, in order.
        """
        if layout is not None and (problem := parts_problem([part.layers for part in parts], layout.num_layers)):
            raise ConfigError(f"this node can't read KV: {problem}")
        self._deliver = deliver
        self.probe_blocks: Sequence[int] = ()
        """The ids of this node's probe blocks, once the agents are up."""
        self._num_users = 0
        """Halves of the node that have started the mover and not stopped it."""
        self._watch = current_watch.get()
        self._fault: BaseException | None = None
        self._merge = PartsMerge([part.layers for part in parts], layout)
        self._lock = threading.Lock()
        """Guards what follows, and the merge."""
        self._effects: deque[MergeEffect] = deque()
        self._is_acting = False
        """Whether a thread carries effects out."""
        self.parts: Sequence[PartMover] = [
            part.make_mover(partial(self._part_said, number)) for number, part in enumerate(parts)
        ]

    @property
    def merge(self) -> PartsMerge:
        """What is divided, to be read and not to be changed."""
        return self._merge

    @property
    def figures(self) -> ReadFigures:
        """The sum of all parts' figures; of a divided read each sub-read counts."""
        figures = [part.figures for part in self.parts]
        return ReadFigures(
            sum(of_part.bytes_arrived for of_part in figures),
            max((of_part.arrived_at for of_part in figures if of_part.arrived_at is not None), default=None),
            sum(of_part.reads_in_flight for of_part in figures),
            sum(of_part.stuck_reads for of_part in figures),
        )

    @property
    def fault(self) -> BaseException | None:
        """What ended one of the movers, if one has ended by itself."""
        return self._fault or next((part.fault for part in self.parts if part.fault is not None), None)

    def start(self) -> None:
        """Make all agents and return when they are up; raises what making one of them raised.

        Both halves of a node use one mover: the first call starts it, and the call of `stop` for the last one ends it.
        Raises ConfigError if the parts don't have equally many blocks.
        """
        self._num_users += 1
        if self._num_users > 1:
            return
        started: list[PartMover] = []
        try:
            for part in self.parts:
                part.start()
                started.append(part)
            memories = [part.published("this node") for part in self.parts]
            counts = sorted({(memory.num_blocks, memory.num_probe_blocks) for memory in memories})
            if len(counts) > 1:
                raise ConfigError(f"the parts of this node must have equally many blocks, and have {counts}")
            self.probe_blocks = range(memories[0].num_blocks, memories[0].num_all_blocks)
        except BaseException:
            self._num_users = 0
            for part in started:
                part.stop()
            raise

    def published(self, incarnation: str) -> PeerNode:
        """This node as it is published to readers, once the agents are up."""
        return PeerNode(
            incarnation, tuple(part.published(part_name(incarnation, n)) for n, part in enumerate(self.parts))
        )

    def connect(self, peer: PeerNode) -> None:
        """Make a peer's blocks readable; answered by Connected or ConnectFailed. Connecting again with equal values
        changes nothing.
        """
        self._decide(lambda: self._merge.connect(peer))

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> None:
        """Read sub-blocks of a peer, as `PartMover.read` does."""
        self._decide(lambda: self._merge.read(read_id, incarnation, ranges, to_digest, digest_parts))

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> None:
        """Fill one of this node's blocks, as `PartMover.fill` does."""
        self._decide(lambda: self._merge.fill(fill_id, block, seed, group))

    def abandon(self, read_id: int) -> None:
        """Post no more of a read; it is answered when what is in flight has ended. An unknown read changes nothing."""
        self._decide(lambda: self._merge.abandon(read_id))

    def disconnect(self, incarnation: str) -> None:
        """Drop a peer. Its reads fail with CANCELLED when what is in flight has ended. Unknown peers are fine."""
        self._decide(lambda: self._merge.disconnect(incarnation))

    def set_num_readers(self, num_readers: int) -> None:
        """Set the number of leases and probes that peers may be reading, on a sender."""
        for part in self.parts:
            part.set_num_readers(num_readers)

    def stop(self) -> None:
        """Stop all movers, as `PartMover.stop` does, unless another half still uses them."""
        self._num_users -= 1
        if self._num_users > 0:
            return
        with ThreadPoolExecutor(len(self.parts), "baton-mover-stop") as stopping:
            for stopped in [stopping.submit(part.stop) for part in self.parts]:
                stopped.result()

    async def watch_turns(self) -> None:
        """Check, on an event loop until cancelled, that all movers go on; raises EngineFault when one hangs."""
        watching = [asyncio.ensure_future(part.watch_turns()) for part in self.parts]
        try:
            await asyncio.gather(*watching)
        finally:
            for watch in watching:
                watch.cancel()

    def _part_said(self, part: int, event: MoverEvent) -> None:
        self._decide(lambda: self._merge.said(part, event))

    def _decide(self, decide: Callable[[], Sequence[MergeEffect]]) -> None:
        with self._lock:
            self._effects.extend(decide())
            if self._is_acting:
                return
            self._is_acting = True
        while (effect := self._next_effect()) is not None:
            try:
                self._carry_out(effect)
            except BaseException as error:
                # Somebody waits for the event that was lost.
                self._fault = self._fault or error
                self._watch.failed("mover", error)

    def _next_effect(self) -> MergeEffect | None:
        with self._lock:
            self._is_acting = bool(self._effects)
            return self._effects.popleft() if self._effects else None

    def _carry_out(self, effect: MergeEffect) -> None:
        match effect:
            case Deliver(event):
                self._deliver(event)
            case ReadPart(part, read_id, agent, ranges, to_digest, digest_parts):
                self.parts[part].read(read_id, agent, ranges, to_digest, digest_parts)
            case AbandonPart(part, read_id):
                self.parts[part].abandon(read_id)
            case ConnectPart(part, peer):
                self.parts[part].connect(peer)
            case DisconnectPart(part, agent):
                self.parts[part].disconnect(agent)
            case FillPart(part, fill_id, block, seed, group):
                self.parts[part].fill(fill_id, block, seed, group)


def mover_of_node(
    runner: ModelRunner,
    incarnation: str,
    make_mover: Callable[[str, DeliverEvent], PartMover],
    deliver: DeliverEvent,
    clock: Clock,
    stall_s: float = STALL_S,
) -> PartsMover:
    """The mover of all parts of a node's KV cache. `make_mover` makes that of the part in this process, with an agent
    of that name.

    Raises ConfigError if the parts don't have each layer once.
    """
    own_layers = runner.memory.layers

    def make(number: int, part: RemotePart | None, deliver: DeliverEvent) -> PartMover:
        name = part_name(incarnation, number)
        if part is None:
            return make_mover(name, deliver)
        return RemoteMover(part.socket, name, part.layers, runner.layout, deliver, clock, stall_s)

    here = (range(runner.layout.num_layers) if own_layers is None else own_layers, None)
    parts = sorted([here, *((part.layers, part) for part in runner.remote_parts)], key=lambda part: part[0].start)
    movers = [OwnPart(layers, partial(make, number, part)) for number, (layers, part) in enumerate(parts)]
    return PartsMover(runner.layout, movers, deliver)


def digests_of_node(runner: ModelRunner, movers: Callable[[], Sequence[PartMover]]) -> BlockDigests:
    """The digests of a node's blocks, of all their layers. `movers`: the movers of its parts, once there are some."""
    here = block_digests(runner.memory)
    if not runner.remote_parts:
        return here
    return digests_of_parts(here, lambda: [part for part in movers() if isinstance(part, RemoteMover)])
