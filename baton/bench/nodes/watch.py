"""Polls every node for its load and its latest steps, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from baton.bench.nodes.samples import NodeSamples
from baton.bench.nodes.timeline import NodeTimeline
from baton.errors import BatonError
from baton.messages.operator import NodeStatus
from baton.security.access import default_access
from baton.wire.clients.node_client import NodeClient
from baton.wire.credentials import Dialer

_PERIOD_S = 0.5
_TIMEOUT_S = 2.0


class NodeWatch:
    """A context manager that polls nodes until it exits; `samples` and `timelines` are by node name."""

    def __init__(self, nodes: Sequence[NodeStatus]) -> None:
        self.samples: Mapping[str, NodeSamples] = {node.name: NodeSamples(node.role) for node in nodes}
        self.timelines: Mapping[str, NodeTimeline] = {node.name: NodeTimeline() for node in nodes}
        self._addresses = {node.name: node.address for node in nodes}
        # The thread does not inherit context variables, so the credentials are read here.
        self._dialer = Dialer.to_nodes(default_access.get())
        self._is_watching = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def __enter__(self) -> NodeWatch:
        self._thread.start()
        self._is_watching.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        finally:
            self._is_watching.set()

    async def _watch(self) -> None:
        is_over = False
        clients = {name: NodeClient(address, self._dialer) for name, address in self._addresses.items()}
        try:
            await asyncio.gather(*(self._skip_earlier_steps(name, client) for name, client in clients.items()))
            self._is_watching.set()
            while True:
                await asyncio.gather(*(self._poll(name, client) for name, client in clients.items()))
                if is_over:
                    return
                is_over = await asyncio.to_thread(self._stop.wait, _PERIOD_S)
        finally:
            for client in clients.values():
                await client.close()

    async def _poll(self, name: str, client: NodeClient) -> None:
        timeline, samples = self.timelines[name], self.samples[name]
        try:
            report = await client.describe(_TIMEOUT_S)
            if samples.incarnations and report.node.incarnation != samples.incarnations[-1]:
                timeline.restart()
            samples.add(time.monotonic(), report)
            trace = await client.trace_steps(timeline.after, timeline.steps_after, _TIMEOUT_S)
        except BatonError:
            samples.misses += 1
            return
        timeline.add(time.monotonic(), trace)

    async def _skip_earlier_steps(self, name: str, client: NodeClient) -> None:
        with suppress(BatonError):
            self.timelines[name].skip(await client.trace_steps(0, 0, _TIMEOUT_S))
