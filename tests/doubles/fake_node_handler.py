"""The fakes of `NodeHandler` and `RouterPort`: the operations of a node that the gRPC service calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from baton.errors import AdapterRefused, CacheInUse
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, NodeDescription, Role, RouterMessage, StepFigures, StepReport
from baton.messages.node_report import NodeReport, TraceEvent, TraceStep
from baton.model_formats.adapters import AdapterInfo


class FakeRouterPort:
    """Records what one router sends. A test puts reports for the router into `queue`, and None to end them."""

    def __init__(
        self, handler: FakeNodeHandler, router_id: str, router_incarnation: str, keeps: Sequence[AttemptKey]
    ) -> None:
        self.router_id = router_id
        self.keeps = keeps
        self.router_incarnation = router_incarnation
        self.received: asyncio.Queue[RouterMessage] = asyncio.Queue()
        self.refused: asyncio.Queue[tuple[AttemptKey, str]] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.queue: asyncio.Queue[StepReport | None] = asyncio.Queue()
        self._handler = handler

    def receive(self, message: RouterMessage) -> None:
        if self._handler.receive_error is not None:
            raise self._handler.receive_error
        self.received.put_nowait(message)

    def refuse(self, attempt: AttemptKey, error: str) -> None:
        self.refused.put_nowait((attempt, error))

    async def reports(self) -> AsyncIterator[StepReport]:
        while (report := await self.queue.get()) is not None:
            yield report

    def close(self) -> None:
        self.closed.set()
        self.queue.put_nowait(None)


class FakeNodeHandler:
    """Opens a port for each router, and records all other calls."""

    def __init__(self, description: NodeDescription) -> None:
        self.description = description
        self.ports: asyncio.Queue[FakeRouterPort] = asyncio.Queue()
        self.open_error: Exception | None = None
        """The error that `open_port` raises; None: it opens one."""
        self.receive_error: Exception | None = None
        """The error that a port's `receive` raises; None: it takes the message."""
        self.drains = 0
        """Number of calls of `drain`."""
        self.roles: list[tuple[str, Role]] = []
        self.adapters: dict[str, AdapterInfo] = {}
        """What is found in directories."""

    def describe(self) -> NodeDescription:
        return self.description

    def report(self) -> NodeReport:
        return NodeReport(self.description, LoadReport(running=3, total_blocks=8), {"capacity": 2})

    def open_port(self, router_id: str, router_incarnation: str, keeps: Sequence[AttemptKey]) -> FakeRouterPort:
        if self.open_error is not None:
            raise self.open_error
        port = FakeRouterPort(self, router_id, router_incarnation, keeps)
        self.ports.put_nowait(port)
        return port

    def drain(self) -> None:
        self.drains += 1

    def set_role(self, incarnation: str, role: Role) -> None:
        self.roles.append((incarnation, role))

    async def reset_prefix_cache(self, incarnation: str) -> int:
        """Returns 7 blocks; the incarnation "busy" has blocks in use."""
        if incarnation == "busy":
            raise CacheInUse("blocks are in use: 3 offered to decode nodes")
        return 7

    async def inspect_adapter(self, incarnation: str, directory: str) -> AdapterInfo:
        """Returns the adapter that `adapters` has in the directory."""
        if directory not in self.adapters:
            raise AdapterRefused(f"there is no directory {directory}")
        return self.adapters[directory]

    def trace(self, after: int) -> Sequence[TraceEvent]:
        return [TraceEvent(after + 1, 10, "queued", AttemptKey("r", 1, 2**63), 3, "x")]

    def steps(self, after: int) -> Sequence[TraceStep]:
        return [TraceStep(after + 1, 20, StepFigures(1.5, 2, 3, 4), True)]
