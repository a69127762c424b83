"""KV hand-offs from prefill to decode nodes, simplified: leases, links and reads without their failures.

A prefill node offers the KV of each step; it is transferred while the next chunk is computed, if the decode node has
reserved its blocks by then. When the whole prompt is computed and has arrived, the request joins the decode node's
batch, one network latency later, and the sender's blocks are freed. There is no quarantine here.

A stream that moves is offered by the node that has it, under the attempt that is to continue it. That node is told when
all that it has offered is read, and then either offers what it has computed since or ends the stream (`cut`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.bench.simulator.events import Event, Timeline
from baton.bench.simulator.prompt import TOKEN
from baton.engine.connector import ArrivedKV, BlockFate, ExternalTokens, KVTransferOutput, LostKV, NullConnector
from baton.engine.request import Request
from baton.errors import TransferCause
from baton.messages.node import Leg, Outcome

# A network whose NICs share their bandwidth equally among their flows; both directions are independent.


class Flow:
    """A transfer of bytes between two nodes. Bytes may be added at any time; `drained` is called when none is left."""

    __slots__ = ("_network", "busy_s", "drained", "due", "left", "rate", "sink", "source", "updated_at")

    def __init__(self, network: Network, source: str, sink: str, drained: Callable[[], None]) -> None:
        self._network = network
        self.source = source
        self.sink = sink
        self.drained = drained
        self.left = 0.0
        """Bytes that were left at `updated_at`."""
        self.rate = 0.0
        self.updated_at = 0.0
        self.due: Event | None = None
        self.busy_s = 0.0
        """Seconds in which it transferred, until `updated_at`."""

    def add(self, num_bytes: float) -> None:
        """Adds bytes to transfer."""
        self._network.add(self, num_bytes)

    def cancel(self) -> None:
        """Ends the transfer. Idempotent."""
        self._network.leave(self)


class Network:
    """All flows of a cluster. A flow's rate is the smaller of its shares of the NICs at its two ends."""

    def __init__(self, timeline: Timeline, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.bytes_moved = 0.0
        self._timeline = timeline
        self._out: defaultdict[str, dict[Flow, None]] = defaultdict(dict)
        self._in: defaultdict[str, dict[Flow, None]] = defaultdict(dict)

    def flow(self, source: str, sink: str, drained: Callable[[], None]) -> Flow:
        """Makes a flow without bytes."""
        return Flow(self, source, sink, drained)

    def add(self, flow: Flow, num_bytes: float) -> None:
        if num_bytes <= 0:
            return
        self.bytes_moved += num_bytes
        if flow.due is None:
            flow.left, flow.updated_at = num_bytes, self._timeline.now
            self._out[flow.source][flow] = self._in[flow.sink][flow] = None
            self._share(flow)
        else:
            self._advance(flow)
            flow.left += num_bytes
            self._schedule_end(flow)

    def leave(self, flow: Flow) -> None:
        if flow.due is None:
            return
        flow.due.cancel()
        flow.due = None
        del self._out[flow.source][flow]
        del self._in[flow.sink][flow]
        self._share(flow)

    def _share(self, changed: Flow) -> None:
        """Updates the rates of all flows at the same NICs, after a flow was added or removed."""
        touched = dict(self._out[changed.source])
        touched.update(self._in[changed.sink])
        for flow in touched:
            share = max(len(self._out[flow.source]), len(self._in[flow.sink]))
            rate = self.bytes_per_s / share
            if rate != flow.rate or flow.due is None:
                self._advance(flow)
                flow.rate = rate
                self._schedule_end(flow)

    def _advance(self, flow: Flow) -> None:
        now = self._timeline.now
        flow.left -= flow.rate * (now - flow.updated_at)
        flow.busy_s += now - flow.updated_at
        flow.updated_at = now

    def _schedule_end(self, flow: Flow) -> None:
        if flow.due is not None:
            flow.due.cancel()
        when = self._timeline.now + max(0.0, flow.left) / flow.rate
        flow.due = self._timeline.call_at(when, lambda: self._end(flow))

    def _end(self, flow: Flow) -> None:
        self._advance(flow)
        self.leave(flow)
        flow.drained()


_ARRIVED = ArrivedKV((TOKEN,))
_COMPUTED = (Outcome.HANDED_OFF, Outcome.STOP, Outcome.LENGTH)


class HandOffNode(Protocol):
    """What hand-offs need of a node."""

    incarnation: str
    is_gone: bool

    def on_transfer(self, output: KVTransferOutput) -> None:
        """Tells the node's scheduler what arrived, failed or was released."""
        ...

    def on_read(self, request_id: str) -> None:
        """All KV that was offered under this id is read, and more is to come."""
        ...


class _HandOff:
    """The hand-off of one request."""

    __slots__ = (
        *("arrived", "computed", "flow", "is_arriving", "is_computed", "is_leased", "moved", "num_tokens", "reader"),
        "sender",
    )

    def __init__(self) -> None:
        self.sender: HandOffNode | None = None
        self.reader: HandOffNode | None = None
        self.flow: Flow | None = None
        self.num_tokens = 0
        self.computed = 0
        self.moved = 0
        """Tokens whose bytes were sent, or which the reader had in its cache."""
        self.is_computed = False
        self.is_arriving = False
        self.is_leased = False
        """Whether the sender keeps the blocks until they have arrived."""
        self.arrived = _ARRIVED
        """The tokens that come with the KV."""


class HandOffs:
    """All hand-offs of a cluster, by the engines' request id, which is the same for both legs."""

    def __init__(self, timeline: Timeline, network: Network, bytes_per_token: float) -> None:
        self._timeline = timeline
        self._network = network
        self._bytes_per_token = bytes_per_token
        self._open: dict[str, _HandOff] = {}
        self._gone: set[str] = set()
        self.transfers: dict[str, tuple[float, float]] = {}
        """Hand-offs that arrived: seconds in which bytes moved, and bytes. The node that reports one removes it."""

    def subscribe(self, reader: HandOffNode, request: Request, num_external_tokens: int) -> None:
        """The decode node has reserved its blocks."""
        assert request.kv_source is not None
        source = request.kv_source.incarnation
        if source in self._gone:
            lost = KVTransferOutput(failed={request.request_id: _gone(source)})
            self._timeline.call_at(self._timeline.now, lambda: reader.on_transfer(lost))
            return
        handoff = self._of(request.request_id)
        handoff.reader = reader
        handoff.num_tokens = num_external_tokens
        handoff.moved = request.num_exchanged_tokens - num_external_tokens
        self._move(request.request_id, handoff)

    def computed(self, sender: HandOffNode, request_id: str, num_tokens: int) -> None:
        """The prefill node has computed the KV of `num_tokens` tokens."""
        handoff = self._of(request_id)
        handoff.sender, handoff.computed = sender, num_tokens
        self._move(request_id, handoff)

    def prompt_done(self, sender: HandOffNode, request_id: str) -> None:
        """The prefill node has computed the whole prompt and the first token."""
        handoff = self._of(request_id)
        handoff.sender, handoff.is_computed, handoff.is_leased = sender, True, True
        self._move(request_id, handoff)

    def cut(self, sender: HandOffNode, request_id: str, num_tokens: int, token_ids: Sequence[int]) -> None:
        """A stream that moves has ended on its node with KV of `num_tokens` tokens.

        `token_ids`: those that the reader was not submitted with.
        """
        handoff = self._of(request_id)
        handoff.sender, handoff.computed, handoff.is_computed = sender, num_tokens, True
        handoff.arrived, handoff.num_tokens = ArrivedKV(tuple(token_ids)), num_tokens
        self._move(request_id, handoff)

    def num_read(self, request_id: str) -> int | None:
        """The tokens whose KV the reader has or gets; None: it does not read any more."""
        handoff = self._open.get(request_id)
        return None if handoff is None else handoff.moved

    def drop(self, request_id: str, node: HandOffNode) -> None:
        """The attempt has ended on one of its nodes; the sender's blocks are released."""
        handoff = self._open.get(request_id)
        if handoff is None or node not in (handoff.sender, handoff.reader):
            return
        self._close(request_id, handoff)
        if handoff.sender is not None and handoff.is_leased and not handoff.sender.is_gone:
            handoff.sender.on_transfer(KVTransferOutput(released=frozenset((request_id,))))

    def node_gone(self, node: HandOffNode) -> None:
        """The node has died: its transfers end, and fail on nodes that read from it."""
        self._gone.add(node.incarnation)
        for request_id, handoff in list(self._open.items()):
            if handoff.reader is node:
                self.drop(request_id, node)
            elif handoff.sender is node and (handoff.is_leased or not handoff.is_arriving):
                self._close(request_id, handoff)
                if handoff.reader is not None and not handoff.reader.is_gone:
                    handoff.reader.on_transfer(KVTransferOutput(failed={request_id: _gone(node.incarnation)}))

    def num_bytes(self, num_tokens: int) -> float:
        return num_tokens * self._bytes_per_token

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _of(self, request_id: str) -> _HandOff:
        handoff = self._open.get(request_id)
        if handoff is None:
            handoff = self._open[request_id] = _HandOff()
        return handoff

    def _move(self, request_id: str, handoff: _HandOff) -> None:
        sender, reader = handoff.sender, handoff.reader
        if sender is None or reader is None:
            return
        if handoff.flow is None:
            handoff.flow = self._network.flow(
                sender.incarnation, reader.incarnation, lambda: self._drained(request_id, handoff)
            )
        new = handoff.computed - handoff.moved
        if new > 0:
            handoff.moved = handoff.computed
            handoff.flow.add(self.num_bytes(new))
        if handoff.flow.due is None:
            self._drained(request_id, handoff)

    def _drained(self, request_id: str, handoff: _HandOff) -> None:
        """Everything that was offered has arrived."""
        if not handoff.is_computed:
            assert handoff.sender is not None
            handoff.sender.on_read(request_id)
        elif not handoff.is_arriving:
            handoff.is_arriving = True
            self._timeline.call_at(
                self._timeline.now + self._network.latency_s, lambda: self._arrive(request_id, handoff)
            )

    def _arrive(self, request_id: str, handoff: _HandOff) -> None:
        if self._open.get(request_id) is not handoff:
            return
        del self._open[request_id]
        assert handoff.flow is not None
        seconds = handoff.flow.busy_s
        # Hand-off and flow refer to each other, and the cycle collector is off while a simulation runs.
        handoff.flow = None
        sender, reader = handoff.sender, handoff.reader
        assert sender is not None
        assert reader is not None
        self.transfers[request_id] = (seconds, self.num_bytes(handoff.num_tokens))
        if handoff.is_leased and not sender.is_gone:
            sender.on_transfer(KVTransferOutput(released=frozenset((request_id,))))
        reader.on_transfer(KVTransferOutput(arrived={request_id: handoff.arrived}))

    def _close(self, request_id: str, handoff: _HandOff) -> None:
        del self._open[request_id]
        if handoff.flow is not None:
            handoff.flow.cancel()
            handoff.flow = None


class OfferingConnector(NullConnector):
    """The connector of a prefill node: offers computed blocks."""

    def __init__(self, node: HandOffNode, handoffs: HandOffs) -> None:
        self._node = node
        self._handoffs = handoffs

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._handoffs.computed(self._node, request.request_id, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        if request.leg is not Leg.PREFILL:
            return BlockFate.FREE
        if request.outcome in _COMPUTED:
            self._handoffs.prompt_done(self._node, request.request_id)
            return BlockFate.LEASED
        self._handoffs.drop(request.request_id, self._node)
        return BlockFate.FREE


class ReadingConnector(NullConnector):
    """The connector of a decode node: subscribes to blocks."""

    def __init__(self, node: HandOffNode, handoffs: HandOffs) -> None:
        self._node = node
        self._handoffs = handoffs

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        return ExternalTokens(request.num_exchanged_tokens - num_computed_tokens, load_async=True)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self._handoffs.subscribe(self._node, request, num_external_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        if transferring:
            self._handoffs.drop(request.request_id, self._node)
        return BlockFate.FREE


def _gone(incarnation: str) -> LostKV:
    return LostKV(TransferCause.PEER_GONE, f"{incarnation} is gone")
