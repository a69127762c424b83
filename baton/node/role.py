"""The interface between a node and its role: what the role adds, and what the node gives it to work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.clock import Clock
from baton.config import NodeConfig
from baton.engine.connector import KVConnector, KVTransferOutput
from baton.engine.runner import ModelRunner
from baton.messages.ids import AttemptKey
from baton.messages.node import StageTimings
from baton.messages.node_report import FailedProbe, HandoffReport, MeasuredPair, RefusedLink
from baton.node.attempts.attempt_times import TransferFigures
from baton.observe.metrics import Distribution, Figure
from baton.registry import Membership
from baton.wire.credentials import PLAINTEXT_DIALER, Dialer


@dataclass(frozen=True, slots=True)
class RoleContext:
    """The parts of a node that its role works with."""

    config: NodeConfig
    incarnation: str
    address: str
    """Where others reach the node, as HOST:PORT."""
    runner: ModelRunner
    clock: Clock
    post: Callable[[Callable[[], None]], None]
    """Runs a callable on the event loop, in order; may be called from any thread."""
    post_after_step: Callable[[Callable[[], None]], None]
    """Runs a callable on the event loop, once the step's tokens are on their way to the routers; may be called from the
    engine's thread only."""
    after_step: Callable[[Callable[[], None]], None]
    """Calls a callable on the engine's thread, once all that is posted and before the next step; may be called from
    the engine's thread only."""
    tell_engine: Callable[[KVTransferOutput], None]
    """Tells the engine about transfers and wakes it; may be called from any thread."""
    record: Callable[[str, AttemptKey, int, str], None]
    """Writes to the event log (name, attempt, value, detail); may be called from any thread."""
    dialer: Dialer = PLAINTEXT_DIALER
    """Opens channels to other nodes."""
    membership: Membership | None = None
    """Tells which other nodes there are; None: nothing does."""


class Servicer(Protocol):
    """A gRPC service that a server can carry."""

    def add_to_server(self, server: Any) -> None: ...


class HandoffEnd(Protocol):
    """A node's end of its hand-offs."""

    def report(self) -> HandoffReport:
        """Open hand-offs, and how earlier ones ended. The cost grows with the number of hand-offs."""
        ...

    def refused_links(self) -> Sequence[RefusedLink]:
        """The refused links of that report, at low cost."""
        ...

    def failed_probes(self) -> Sequence[FailedProbe]:
        """The failed probes of that report, at low cost."""
        ...

    def slow_pairs(self) -> Sequence[MeasuredPair]:
        """The pairs of that report that are too slow, at low cost."""
        ...


class NodeRole(Protocol):
    """What makes a node a prefill node or a decode node. Belongs to the event loop, except for its connector."""

    @property
    def connector(self) -> KVConnector:
        """The connector of the engine, which is called on the engine's thread."""
        ...

    @property
    def link_protocol(self) -> int:
        """Version of the protocol of links; nodes with another version can't exchange KV with this one."""
        ...

    @property
    def servicers(self) -> Sequence[Servicer]: ...

    @property
    def handoff(self) -> HandoffEnd: ...

    async def start(self) -> None:
        """Start what moves the KV; raises ConfigError."""
        ...

    def serving(self) -> None:
        """The node's server listens from now on: peers that ask whether this process runs get an answer."""
        ...

    async def stop(self) -> None:
        """Stop everything that `start` started. Called after the engine has stopped."""
        ...

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        """The router gave up the attempt, which may have ended here already. Idempotent."""
        ...

    def attempt_timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        """The node has measured the attempt and tells its router, before the connector's offer of its last blocks."""
        ...

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        """How much KV was read into this node for the attempt; None if none was."""
        ...

    def move_asked(self, to: AttemptKey, holder: str) -> None:
        """A stream, which the engine knows by the id `holder`, is to move to an attempt on another node. Called before
        the engine is asked."""
        ...

    def arrived_tokens(self, attempt: AttemptKey) -> Sequence[int]:
        """The output tokens that have come with the attempt's KV; empty where none is known to have."""
        ...

    def figures(self) -> Sequence[Figure | Distribution]:
        """The role's metrics, for the node's metrics page."""
        ...
