"""The role of an encode node. It exchanges no KV, so nearly all of it is empty."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.connector import NullConnector
from baton.messages.ids import AttemptKey
from baton.messages.node import StageTimings
from baton.messages.node_report import FailedProbe, HandoffReport, MeasuredPair, RefusedLink
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.role import NodeRole, RoleContext, Servicer
from baton.observe.metrics import Distribution, Figure


class NoHandoffs:
    """The end of hand-offs of a node that has none."""

    def report(self) -> HandoffReport:
        return HandoffReport()

    def refused_links(self) -> Sequence[RefusedLink]:
        return ()

    def failed_probes(self) -> Sequence[FailedProbe]:
        return ()

    def slow_pairs(self) -> Sequence[MeasuredPair]:
        return ()


class EncodeRole:
    """The role of an encode node. Its calls come to the service with which all nodes give each other rows."""

    connector = NullConnector()
    link_protocol = 0
    servicers: Sequence[Servicer] = ()
    handoff = NoHandoffs()

    async def start(self) -> None:
        return

    def serving(self) -> None:
        return

    async def stop(self) -> None:
        return

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        return

    def attempt_timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        return

    def move_asked(self, to: AttemptKey, holder: str) -> None:
        return

    def arrived_tokens(self, attempt: AttemptKey) -> Sequence[int]:
        return ()

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        return None

    def figures(self) -> Sequence[Figure | Distribution]:
        return ()


def make_role(_context: RoleContext) -> NodeRole:
    """Make the role of an encode node."""
    return EncodeRole()
