"""KV on its way from prefill to decode nodes: what leases, links and reads come to when all of them work.

A prefill node offers what each step computed; it moves while the next chunk is computed, if the decode node has
reserved its blocks by then. When the prompt is computed and all of it has arrived the request joins, one latency later,
and the sender's blocks are free again. Blocks that a read may still write are not held in quarantine here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.bench.simulator.events import Timeline
from baton.bench.simulator.network import Flow, Network
from baton.bench.simulator.prompt import TOKEN
from baton.engine.connector import ArrivedKV, BlockFate, ExternalTokens, KVTransferOutput, LostKV, NullConnector
from baton.engine.request import Request, RequestStatus
from baton.errors import TransferCause
from baton.messages.node import Leg

_ARRIVED = ArrivedKV((TOKEN,))
_COMPUTED = (RequestStatus.HANDED_OFF, RequestStatus.STOPPED, RequestStatus.LENGTH_CAPPED)


class Place(Protocol):
    """A node, as hand-offs see it."""

    incarnation: str
    is_gone: bool

    def told(self, news: KVTransferOutput) -> None:
        """What the transfer side has to say."""
        ...


class _HandOff:
    """One request's."""

    __slots__ = ("began_at", "computed", "cut", "flow", "is_computed", "moved", "num_tokens", "reader", "sender")

    def __init__(self) -> None:
        self.sender: Place | None = None
        self.reader: Place | None = None
        self.flow: Flow | None = None
        self.num_tokens = 0
        self.computed = 0
        self.moved = 0
        """Tokens whose bytes were sent, or which the reader had."""
        self.is_computed = False
        self.began_at = 0.0
        self.cut = False


class HandOffs:
    """All hand-offs of a cluster, by the engines' request id, which both legs have."""

    def __init__(self, timeline: Timeline, network: Network, bytes_per_token: float) -> None:
        self._timeline = timeline
        self._network = network
        self._bytes_per_token = bytes_per_token
        self._open: dict[str, _HandOff] = {}
        self._gone: set[str] = set()
        self.transfers: dict[str, tuple[float, float]] = {}
        """Of those that arrived: seconds from the reservation on, and bytes; whoever tells of them takes them out."""

    def subscribe(self, reader: Place, request: Request, num_external_tokens: int) -> None:
        """The decode node's blocks are reserved."""
        assert request.kv_source is not None
        source = request.kv_source.incarnation
        if source in self._gone:
            lost = KVTransferOutput(failed={request.request_id: _gone(source)})
            self._timeline.call_at(self._timeline.now, lambda: reader.told(lost))
            return
        handoff = self._of(request.request_id)
        handoff.reader = reader
        handoff.num_tokens = request.num_submitted_tokens
        handoff.moved = request.num_submitted_tokens - num_external_tokens
        handoff.began_at = self._timeline.now
        self._move(request.request_id, handoff)

    def computed(self, sender: Place, request_id: str, num_tokens: int) -> None:
        """The prefill node has KV of so many tokens."""
        handoff = self._of(request_id)
        handoff.sender, handoff.computed = sender, num_tokens
        self._move(request_id, handoff)

    def prompt_done(self, sender: Place, request_id: str) -> None:
        """All of it, and there is a first token."""
        handoff = self._of(request_id)
        handoff.sender, handoff.is_computed = sender, True
        self._move(request_id, handoff)

    def drop(self, request_id: str, here: Place) -> None:
        """The attempt is over at one end: blocks of the sender are free."""
        handoff = self._open.get(request_id)
        if handoff is None or here not in (handoff.sender, handoff.reader):
            return
        self._close(request_id, handoff)
        if handoff.sender is not None and handoff.is_computed and not handoff.sender.is_gone:
            handoff.sender.told(KVTransferOutput(released=frozenset((request_id,))))

    def node_gone(self, node: Place) -> None:
        """Nothing moves to or from it any more; who reads from it is told."""
        self._gone.add(node.incarnation)
        for request_id, handoff in list(self._open.items()):
            if handoff.reader is node:
                self.drop(request_id, node)
            elif handoff.sender is node:
                self._close(request_id, handoff)
                if handoff.reader is not None and not handoff.reader.is_gone:
                    handoff.reader.told(KVTransferOutput(failed={request_id: _gone(node.incarnation)}))

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
        """All that was offered is there."""
        if handoff.is_computed and not handoff.cut:
            handoff.cut = True
            self._timeline.call_at(
                self._timeline.now + self._network.latency_s, lambda: self._arrive(request_id, handoff)
            )

    def _arrive(self, request_id: str, handoff: _HandOff) -> None:
        if self._open.get(request_id) is not handoff:
            return
        del self._open[request_id]
        # It knows its flow, which knows it: nobody collects cycles while a simulation runs.
        handoff.flow = None
        sender, reader = handoff.sender, handoff.reader
        assert sender is not None
        assert reader is not None
        seconds = self._timeline.now - handoff.began_at
        self.transfers[request_id] = (seconds, self.num_bytes(handoff.num_tokens))
        if not sender.is_gone:
            sender.told(KVTransferOutput(released=frozenset((request_id,))))
        reader.told(KVTransferOutput(arrived={request_id: _ARRIVED}))

    def _close(self, request_id: str, handoff: _HandOff) -> None:
        del self._open[request_id]
        if handoff.flow is not None:
            handoff.flow.cancel()
            handoff.flow = None


class OfferingConnector(NullConnector):
    """A prefill node's."""

    def __init__(self, node: Place, handoffs: HandOffs) -> None:
        self._node = node
        self._handoffs = handoffs

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._handoffs.computed(self._node, request.request_id, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        if request.leg is not Leg.PREFILL:
            return BlockFate.FREE
        if request.status in _COMPUTED:
            self._handoffs.prompt_done(self._node, request.request_id)
            return BlockFate.LEASED
        self._handoffs.drop(request.request_id, self._node)
        return BlockFate.FREE


class TakingConnector(NullConnector):
    """A decode node's."""

    def __init__(self, node: Place, handoffs: HandOffs) -> None:
        self._node = node
        self._handoffs = handoffs

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        return ExternalTokens(request.num_submitted_tokens - num_computed_tokens, load_async=True)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self._handoffs.subscribe(self._node, request, num_external_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        if transferring:
            self._handoffs.drop(request.request_id, self._node)
        return BlockFate.FREE


def _gone(incarnation: str) -> LostKV:
    return LostKV(TransferCause.PEER_GONE, f"{incarnation} is gone")
