"""A network whose NICs share their bandwidth equally among their flows; both directions are independent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from baton.bench.simulator.events import Event, Timeline


class Flow:
    """A transfer of bytes between two nodes. Bytes may be added at any time; `drained` is called when none is left."""

    __slots__ = ("_network", "drained", "due", "left", "rate", "sink", "source", "updated_at")

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
        flow.updated_at = now

    def _schedule_end(self, flow: Flow) -> None:
        if flow.due is not None:
            flow.due.cancel()
        when = self._timeline.now + max(0.0, flow.left) / flow.rate
        flow.due = self._timeline.call_at(when, lambda: self._end(flow))

    def _end(self, flow: Flow) -> None:
        self.leave(flow)
        flow.drained()
