"""Asks every node how busy it is, over and over, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from baton.bench.nodes.samples import NodeSamples
from baton.errors import BatonError
from baton.rpc.messages import NodeStatus
from baton.rpc.node_client import NodeClient

_PERIOD_S = 0.5
_PATIENCE_S = 2.0


class NodeWatch:
    """Watches from entry to exit; `samples` are by node name."""

    def __init__(self, nodes: Sequence[NodeStatus]) -> None:
        self.samples: Mapping[str, NodeSamples] = {node.name: NodeSamples(node.role) for node in nodes}
        self._addresses = {node.name: node.address for node in nodes}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def __enter__(self) -> NodeWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        clients = {name: NodeClient(address) for name, address in self._addresses.items()}
        try:
            while True:
                await asyncio.gather(*(self._ask(name, client) for name, client in clients.items()))
                if await asyncio.to_thread(self._over.wait, _PERIOD_S):
                    return
        finally:
            for client in clients.values():
                await client.close()

    async def _ask(self, name: str, client: NodeClient) -> None:
        try:
            report = await client.describe(_PATIENCE_S)
        except BatonError:
            self.samples[name].misses += 1
            return
        self.samples[name].add(time.monotonic(), report)
