"""Reads simulated nodes directly, without a router, and measures the latency of each token."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from baton.bench.micro.relay_nodes import RelayNodes, RelayStream
from baton.errors import BatonError, NodeLost
from baton.messages.ids import AttemptKey
from baton.messages.node import StepReport
from baton.wire.clients.node_client import NodeClient


class DirectReader:
    """Attaches to all decode nodes, as a router does, and reads streams that are divided among them."""

    def __init__(self, nodes: RelayNodes, num_streams: int) -> None:
        self._nodes = nodes
        self._num_streams = num_streams
        self._loss: NodeLost | None = None
        self.latencies = array("f")
        """Latency of each token from its step's report until it was read here, seconds."""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """A context in which the streams run; on exit they have ended and all nodes are detached."""
        decoding = self._nodes.decoding
        async with AsyncExitStack() as opened:
            for node in decoding:
                stream = await NodeClient(node.description.address).attach("bench-direct")
                opened.push_async_callback(stream.close)
                stream.listen(self._on_report, self._on_lost)
            for number in range(self._num_streams):
                name = f"direct-{number}"
                request = self._nodes.streams[name] = RelayStream(name, number * 7, 1 << 16)
                decoding[number % len(decoding)].run(AttemptKey(name, 1), request)
            try:
                yield
            finally:
                for node in decoding:
                    node.end_all()
                self._nodes.forget()

    def raise_failure(self) -> None:
        """Raises BatonError if a node was lost."""
        if self._loss is not None:
            raise BatonError(str(self._loss))

    def _on_report(self, report: StepReport) -> None:
        now, streams = time.monotonic(), self._nodes.streams
        for delta in report.deltas:
            self.latencies.append(now - streams[delta.attempt.request_id].sent_at[delta.first_index])

    def _on_lost(self, loss: NodeLost) -> None:
        self._loss = loss
