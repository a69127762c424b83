"""The fakes of nodes, and of the streams and clients with which a router reaches them, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from baton.errors import AdapterRefused, BatonError, NobodyListens, NodeLost
from baton.messages.adapters import AdapterReport, AdapterStatus
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import KVCacheUpdate
from baton.messages.node import LoadReport, NodeDescription, RequestDelta, RouterMessage, StepReport
from baton.model_formats.adapters import AdapterInfo


class FakeStream:
    """The router's end of its stream to a fake node."""

    def __init__(self, node: FakeNode) -> None:
        self.welcome = node.description
        self.is_closed = False
        """Whether the stream has ended, so that nothing can be sent."""
        self._is_closed_by_router = False
        """Whether the router has closed the stream, so that it gets no further reports."""
        self._node = node
        self._reports: asyncio.Queue[StepReport | NodeLost] = asyncio.Queue()
        self._on_report: Callable[[StepReport], None] | None = None
        self._on_lost: Callable[[NodeLost], None] | None = None

    def listen(self, on_report: Callable[[StepReport], None], on_lost: Callable[[NodeLost], None]) -> None:
        self._on_report, self._on_lost = on_report, on_lost
        self._deliver()

    def send(self, message: RouterMessage) -> None:
        if self.is_closed:
            raise NodeLost(f"node {self.welcome.node_id} is gone: the stream is closed")
        if self._node.send_error is not None:
            raise self._node.send_error
        self._node.inbox.put_nowait(message)

    async def close(self) -> None:
        self.is_closed = self._is_closed_by_router = True

    def put(self, report: StepReport | NodeLost) -> None:
        """Send the router a report, or the loss of the node, in a later turn of the event loop."""
        self._reports.put_nowait(report)
        asyncio.get_running_loop().call_soon(self._deliver)

    async def all_read(self) -> None:
        """Wait until the router has handled all that was put so far."""
        await self._reports.join()

    def _deliver(self) -> None:
        if self._on_report is None or self._on_lost is None:
            return
        while not self._reports.empty():
            report = self._reports.get_nowait()
            if self._is_closed_by_router:
                pass
            elif isinstance(report, NodeLost):
                self._on_lost(report)
            else:
                self._on_report(report)
            self._reports.task_done()


class FakeNode:
    """One incarnation of a node: `inbox` has the messages of routers, and a test calls `report`, `cut` and `die`."""

    def __init__(self, description: NodeDescription) -> None:
        self.description = description
        self.inbox: asyncio.Queue[RouterMessage] = asyncio.Queue()
        self.stream: FakeStream | None = None
        self.num_attachments = 0
        self.kept: Sequence[AttemptKey] = ()
        """The attempts that the router that attached last keeps of its earlier stream."""
        self.is_up = True
        self.is_silent = False
        """Whether the node accepts connections but answers nothing, as a stopped process does."""
        self.attach_error: Exception | None = None
        """The error that `attach` raises; None: it attaches the router."""
        self.adapters: dict[str, AdapterInfo | BatonError] = {}
        """What the node finds in directories."""
        self.send_error: Exception | None = None
        """The error that sending to the node raises; None: messages arrive in `inbox`."""

    @property
    def incarnation(self) -> str:
        return self.description.incarnation

    async def attach(self, keeps: Sequence[AttemptKey] = ()) -> FakeStream:
        if self.attach_error is not None:
            raise self.attach_error
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        if not self.is_up:
            raise NobodyListens(f"node {self.description.node_id} does not answer")
        self.num_attachments += 1
        self.kept = keeps
        self.stream = FakeStream(self)
        return self.stream

    def report(
        self,
        *deltas: RequestDelta,
        load: LoadReport | None = None,
        kv_cache: KVCacheUpdate | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """Send the report of one engine step to the attached router.

        `adapters`: why each adapter is refused, by digest; empty: it is acknowledged.
        """
        if self.stream is not None:
            statuses = None if adapters is None else AdapterReport([AdapterStatus(*one) for one in adapters.items()])
            self.stream.put(StepReport(deltas, load or LoadReport(), kv_cache, adapters=statuses))

    async def all_read(self) -> None:
        """Wait until the router has handled all reports so far."""
        if self.stream is not None:
            await self.stream.all_read()

    def cut(self) -> None:
        """Break the stream. The process continues and accepts new streams."""
        if self.stream is not None:
            self.stream.is_closed = True
            self.stream.put(NodeLost(f"node {self.description.node_id} is gone: connection reset"))

    def die(self) -> None:
        """End the process: its stream breaks, and its address refuses connections."""
        self.is_up = False
        self.cut()


class FakeNodes:
    """All fake nodes, by address: the network to which a router connects."""

    def __init__(self) -> None:
        self._by_address: dict[str, FakeNode] = {}
        self.num_open_clients = 0

    def add(self, node: FakeNode) -> FakeNode:
        self._by_address[node.description.address] = node
        return node

    def connect(self, address: str) -> FakeClient:
        """A client for the node at this address. `NodeLinks` takes this method."""
        self.num_open_clients += 1
        return FakeClient(self, address)

    async def attach(self, address: str, keeps: Sequence[AttemptKey] = ()) -> FakeStream:
        node = self._by_address.get(address)
        if node is None:
            raise NobodyListens(f"nobody listens on {address}")
        return await node.attach(keeps)

    def inspect_adapter(self, address: str, directory: str) -> AdapterInfo:
        node = self._by_address.get(address)
        if node is None or not node.is_up:
            raise NobodyListens(f"nobody listens on {address}")
        found = node.adapters.get(directory, AdapterRefused(f"there is no directory {directory}"))
        if isinstance(found, BatonError):
            raise found
        return found


class FakeClient:
    """The fake of `NodeClient`: a client for one address."""

    def __init__(self, nodes: FakeNodes, address: str) -> None:
        self._nodes = nodes
        self._address = address

    async def attach(
        self,
        router_id: str,
        incarnation: str = "",
        router_incarnation: str = "",
        keeps: Sequence[AttemptKey] = (),
    ) -> FakeStream:
        return await self._nodes.attach(self._address, keeps)

    async def inspect_adapter(
        self, directory: str, incarnation: str = "", timeout_s: float | None = None
    ) -> AdapterInfo:
        """What the node finds in a directory. Raises NobodyListens, or the node's error."""
        return self._nodes.inspect_adapter(self._address, directory)

    async def close(self) -> None:
        self._nodes.num_open_clients -= 1
