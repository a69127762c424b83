"""What a role adds to a node, and what the node gives it to work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.clock import Clock
from baton.config import NodeConfig
from baton.engine.connector import KVConnector, KVTransferOutput
from baton.engine.runner import ModelRunner
from baton.messages.ids import AttemptKey
from baton.messages.node_report import HandoffReport, RefusedLink
from baton.node.attempts.attempt_clock import TransferFigures
from baton.observe.metrics import Distribution, Figure
from baton.wire.credentials import PLAIN, Dialer


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What a node gives its role."""

    config: NodeConfig
    incarnation: str
    address: str
    """Where the node listens, as others reach it."""
    runner: ModelRunner
    clock: Clock
    post: Callable[[Callable[[], None]], None]
    """Runs a callable on the loop, in order; from any thread."""
    post_after_step: Callable[[Callable[[], None]], None]
    """Likewise, from the engine's thread alone, once the step's tokens are on their way to the routers."""
    after_step: Callable[[Callable[[], None]], None]
    """Calls it on the engine's thread, from there alone, when all that has been posted and before the next step."""
    tell_engine: Callable[[KVTransferOutput], None]
    """Wakes the engine; from any thread."""
    record: Callable[[str, AttemptKey, int, str], None]
    """Notes an event (name, attempt, value, detail); from any thread."""
    dialer: Dialer = PLAIN
    """How to reach other nodes."""


class Servicer(Protocol):
    """Something that a gRPC server can carry."""

    def add_to_server(self, server: Any) -> None: ...


class NodeRole(Protocol):
    """What makes a node a prefill node or a decode node. Lives on the loop, except for its connector."""

    @property
    def connector(self) -> KVConnector:
        """Called from the engine's thread."""
        ...

    @property
    def link_protocol(self) -> int:
        """What it speaks with other nodes; those that speak another one can't exchange KV with it."""
        ...

    @property
    def servicers(self) -> Sequence[Servicer]: ...

    async def start(self) -> None:
        """Bring up what moves the KV; raises ConfigError."""
        ...

    async def stop(self) -> None:
        """Let go of everything. Called after the engine stopped."""
        ...

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        """The router gave the attempt up, finished here or not. Idempotent."""
        ...

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        """What moved into this node for the attempt, if anything did."""
        ...

    def figures(self) -> Sequence[Figure | Distribution]:
        """The role's part of the node's metrics page."""
        ...

    def handoff_report(self) -> HandoffReport:
        """What is handed over or taken in now, and how it went. Costs as much as there are hand-offs."""
        ...

    def refused_links(self) -> Sequence[RefusedLink]:
        """Those of that report, at any time."""
        ...
