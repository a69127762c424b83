"""The fake of `NodeRole`: a role that moves no KV."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.ids import AttemptKey
from baton.messages.node import StageTimings
from baton.messages.node_report import FailedProbe, HandoffReport, MeasuredPair, RefusedLink
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.role import Servicer
from baton.observe.metrics import Figure
from tests.doubles.fake_connector import FakeConnector


class FakeRole:
    """A role that records calls, and answers with values that a test sets."""

    def __init__(self, connector: FakeConnector | None = None) -> None:
        self.connector = connector if connector is not None else FakeConnector()
        self.servicers: Sequence[Servicer] = ()
        self.aborted: list[AttemptKey] = []
        self.timed: dict[AttemptKey, StageTimings] = {}
        """The last timings of each attempt."""
        self.moved: dict[AttemptKey, TransferFigures] = {}
        """The answers of `transfer_figures`."""
        self.shown: Sequence[Figure] = ()
        """The answer of `figures`."""
        self.reported = HandoffReport()
        """The answer of `report`."""
        self.start_error: Exception | None = None
        """The error that `start` raises; None: it starts."""
        self.is_up = False
        self.is_serving = False
        self.link_protocol = 1

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.is_up = True

    def serving(self) -> None:
        if not self.is_up:
            raise RuntimeError("the role was not started")
        self.is_serving = True

    async def stop(self) -> None:
        self.is_up = False

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        self.aborted.append(attempt)

    def attempt_timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        self.timed[attempt] = timings

    def move_asked(self, to: AttemptKey, holder: str) -> None:
        return

    def arrived_tokens(self, attempt: AttemptKey) -> Sequence[int]:
        return ()

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        return self.moved.get(attempt)

    def figures(self) -> Sequence[Figure]:
        return self.shown

    @property
    def handoff(self) -> FakeRole:
        """The end of its hand-offs, of which there are none."""
        return self

    def report(self) -> HandoffReport:
        return self.reported

    def refused_links(self) -> Sequence[RefusedLink]:
        return self.reported.refused_links

    def failed_probes(self) -> Sequence[FailedProbe]:
        return self.reported.failed_probes

    def slow_pairs(self) -> Sequence[MeasuredPair]:
        return [pair for pair in self.reported.pairs if pair.why_slow]
