"""The leader's side of a model in stages: the connections to the others, watched until one is lost.

The node's own process leads. It is the first rank of the last stage, so that logits are where tokens are sampled. The
ranks of the other stages follow those of the last one, stage by stage.

A stage that ends or falls silent can't be replaced: its layers of the KV cache are lost with it. Then all stages are
lost: all waiting ends with RankLost, the connections are cut, at which the other stages end, and whoever asked is told.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.engine.batch import SchedulerOutput
from baton.engine.runner import RemotePart
from baton.errors import ConfigError
from baton.messages.node_report import ComputePath, RankReport
from baton.observe.rank_reports import rank_report
from baton.runner.adapters.commands import AdapterAnswer, AdapterCommand, AdapterPart, OpenQuestions
from baton.runner.adapters.in_parts import AdaptersInParts
from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.model.stage import StageReport, reports_to_json
from baton.runner.parts import Stage
from baton.runner.ranks.rank_leader import RankLeader
from baton.runner.stage_spec import StageSpec
from baton.runner.stages.frames import (
    IDLE_HEARTBEATS,
    MISSED_HEARTBEATS,
    Frame,
    FrameKind,
    FrameReader,
    FrameWriter,
    StageLinks,
    cut,
)
from baton.runner.stages.stage_messages import StepCopies, figures_from_json

_MOST_TEXT = 4096
_END_S = 10.0
"""In which all processes end after the connections are cut; those that do not are killed."""
_SAID_ITSELF = "has failed"

STAGES_ENDED = "the stages were ended"
"""Why a step can't be computed once its runner is being closed."""
_log = logging.getLogger(__name__)


class StageProcess(Protocol):
    """The process of a stage, started by the leading one on this machine."""

    @property
    def pid(self) -> int: ...

    def how_it_ended(self) -> str:
        """How the process has ended, or ends within a second: `was ended by SIGKILL`; empty if it goes on."""
        ...

    def leads(self, pids: Sequence[int]) -> None:
        """Note the processes that it has started, which end with it even if they are stopped and can't notice."""
        ...

    def kill(self) -> None:
        """End the process, and those that it leads, at once; idempotent."""
        ...

    def end(self, seconds: float) -> None:
        """Wait for the end of the process, which ends since its connections are cut. After `seconds` it is killed.

        Idempotent.
        """
        ...


@dataclass(slots=True, eq=False)
class _OtherStage:
    index: int
    ranks: range
    """The numbers of its ranks."""
    links: StageLinks
    writer: FrameWriter
    reader: FrameReader
    process: StageProcess | None
    answers: queue.SimpleQueue[Frame | None] = field(default_factory=queue.SimpleQueue)
    """Its answers to what it was told; None: it is lost."""
    thread: threading.Thread | None = None
    pids: Sequence[int] = ()
    """The processes of its ranks, once it is ready."""
    figures: Sequence[RankReport] = ()
    """What it said last of the processes of its ranks."""
    num_rows_owed: int = 0
    """For how many micro-batches it owes rows."""

    @property
    def pids_here(self) -> Sequence[int]:
        """The processes of its ranks on this machine, or that of the stage until it is ready; none of other hosts."""
        return () if self.process is None else self.pids or (self.process.pid,)


@dataclass(frozen=True, slots=True)
class _StageWithAdapters:
    _other: _OtherStage
    _questions: OpenQuestions

    @property
    def name(self) -> str:
        return self._other.links.name

    def ask(self, command: AdapterCommand) -> Future[AdapterAnswer]:
        return self._questions.ask(command, lambda text: self._other.writer.send(FrameKind.ADAPTER, text))


class StageLeader:
    """The other stages of a model, in the hands of the last one until `close`. It is the last one's view of all, too
    (`Stages`)."""

    def __init__(
        self, links: Sequence[StageLinks], processes: Sequence[StageProcess] = (), tensor_parallel: int = 1
    ) -> None:
        """`links`: this end of the connections to the other stages, in order; it closes them. `processes`: those of
        the other stages, in order, if this process has started them; it ends them. `tensor_parallel`: how many ranks
        each stage has."""
        self.stage = Stage(len(links), len(links) + 1)
        self.why_lost = ""
        self._rows: deque[bytearray] = deque()
        """Rows for the last stage, of micro-batches in the order in which they began."""
        self._callback: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._questions = OpenQuestions()
        """What the others have been asked of adapters."""
        self._is_closing = False
        self._are_copying = False
        self._layers: Sequence[range] = ()
        self._own_ranks: RankLeader | None = None
        """Leads the other ranks of the last stage."""
        self._news, self._news_end = socket.socketpair()
        """Can be read while there are rows, one byte for each, and once the stages are lost."""
        self._others = [
            _OtherStage(
                index,
                range(rank, rank + tensor_parallel),
                each,
                # Whoever reads from the stage finds out why it is lost.
                FrameWriter(each.down, f"to-rank-{rank}", lambda _why, up=each.up: cut(up)),  # type: ignore[misc]
                FrameReader(each.up),
                processes[index] if processes else None,
            )
            for index, each in enumerate(links)
            for rank in [(index + 1) * tensor_parallel]
        ]
        for other in self._others:
            name = f"baton-from-rank-{other.ranks.start}"
            other.thread = threading.Thread(target=self._listen, args=(other,), name=name, daemon=True)
            other.thread.start()

    # What a model that is being loaded needs.

    def load(self, spec: StageSpec, own_ranks: RankLeader | None) -> None:
        """Make the other stages load their parts of a model; `spec` is the leader's.

        `own_ranks`: the other ranks of the last stage, which end with the stages, and the stages with them.
        """
        self._own_ranks = own_ranks
        if own_ranks is not None:
            own_ranks.followers.on_lost(self.declare_lost)
        for other in self._others:
            other.writer.send(FrameKind.SPEC, replace(spec, index=other.index).to_json().encode())

    def exchange(self, own: StageReport) -> list[StageReport]:
        reports = []
        for other in self._others:
            frame = self._answer(other, FrameKind.REPORT)
            try:
                reports.append(StageReport.from_json(frame.payload))
            except ValueError as error:
                raise RankLost(self._lost_by(other, str(error))) from error
        reports.append(own)
        self.send_all(FrameKind.REPORTS, reports_to_json(reports))
        return reports

    def wait_until_ready(self, cached_layers: Sequence[range]) -> None:
        """Wait until all stages have loaded their parts. `cached_layers`: the layers of the layout that each has.

        Raises RankLost.
        """
        for other in self._others:
            ready = self._answer(other, FrameKind.READY)
            if other.process is not None:
                other.pids = json.loads(ready.payload)
                other.process.leads(other.pids[1:])
            other.reader.silence_allowed = IDLE_HEARTBEATS
        self._layers = cached_layers

    def check_numerics(self, own: str) -> None:
        """Raise ConfigError for a stage that computes with other kernels than this process, and RankLost.

        Call it when a step was computed, since some kernels are chosen then.
        """
        self.send_all(FrameKind.ASK_NUMERICS, b"")
        for other in self._others:
            theirs = self._answer(other, FrameKind.NUMERICS).payload.decode(errors="replace")
            if theirs != own:
                raise ConfigError(
                    f"{other.links.name} computes with {theirs:.1000}, and this process with {own}: tokens would "
                    "depend on where a layer is computed; use equal processors and versions for all stages"
                )

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        """The parts of the KV cache in the other stages, once they are ready."""
        return [
            RemotePart(layers, other.links.moves) for layers, other in zip(self._layers, self._others, strict=False)
        ]

    @property
    def path(self) -> ComputePath:
        """What computes beside this process, for operators."""
        names = ", ".join(other.links.name for other in self._others)
        ranks = len(self._others[0].ranks)
        of_ranks = f" and {ranks} ranks each" if ranks > 1 else ""
        return ComputePath("stages", f"{self.stage.count} with KV caches of their own{of_ranks}: {names}, this process")

    @property
    def adapter_parts(self) -> Sequence[AdapterPart]:
        return [_StageWithAdapters(other, self._questions) for other in self._others]

    def adapters_of(self, own: ModelAdapters) -> AdaptersInParts:
        """The adapters of the whole model, of which this process has `own`."""
        ranks = () if self._own_ranks is None else self._own_ranks.followers.adapter_parts
        return AdaptersInParts(own, ranks, self.adapter_parts)

    # What steps need.

    def send_all(self, kind: FrameKind, payload: bytes | bytearray | memoryview) -> None:
        """Send a frame to all other stages; its bytes must not change any more.

        The first stage gets it last: it answers numbers with rows, which must not overtake them at the next stage.
        """
        for other in reversed(self._others):
            other.writer.send(kind, payload)

    def begin(self, numbers: bytes | bytearray | memoryview) -> None:
        """Make the other stages compute a micro-batch; its rows will come behind those of the ones before it."""
        with self._lock:
            for other in self._others:
                other.num_rows_owed += 1
                other.reader.silence_allowed = MISSED_HEARTBEATS
        self.send_all(FrameKind.NUMBERS, numbers)

    def announce_copies(self, decided: SchedulerOutput) -> None:
        """Make the other stages copy the blocks that a step copies, before they compute its micro-batches.

        No micro-batch may be on its way between the stages.
        """
        if copies := StepCopies.of(decided):
            self._are_copying = True
            self.send_all(FrameKind.COPIES, copies.to_json())

    def await_copies(self) -> None:
        """Wait until the other stages have made the copies that were announced last. Raises RankLost."""
        if self._are_copying:
            self._are_copying = False
            for other in self._others:
                self._answer(other, FrameKind.COPIED)

    @property
    def news(self) -> socket.socket:
        """Can be read while `take_rows` returns at once."""
        return self._news

    def take_rows(self) -> bytearray:
        """Wait for the rows of the micro-batch that has begun first, for the last stage. Raises RankLost."""
        if not self._news.recv(1) or not self._rows:
            raise RankLost(self.why_lost or STAGES_ENDED)
        return self._rows.popleft()

    # The stages' end.

    @property
    def followers(self) -> StageLeader:
        return self

    @property
    def pids(self) -> Sequence[int]:
        return [pid for other in self._others for pid in other.pids_here]

    def rank_reports(self) -> Sequence[RankReport]:
        """Reports on this process and the others, of those on other hosts as each has said last."""
        own = [] if self._own_ranks is None else self._own_ranks.rank_reports()
        others = [report for other in self._others for report in _reports_of(other)]
        is_lost = bool(self.why_lost)
        return [
            *(own or [rank_report(0, os.getpid())]),
            *(replace(report, is_up=report.is_up and not is_lost) for report in others),
        ]

    def on_lost(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            self._callback = callback
            lost = self.why_lost
        if lost:
            callback(lost)

    def declare_lost(self, reason: str) -> None:
        with self._lock:
            if self._is_closing or self.why_lost:
                return
            if self._own_ranks is not None:
                # A step fails when a rank is lost, and may say so first, without knowing why.
                reason = self._own_ranks.followers.why_lost or reason
            self.why_lost, callback = reason, self._callback
        _log.error("%s: the stages of this model are lost", reason)
        self._questions.fail(reason)
        self._cut()
        for other in self._others:
            if other.process is not None:
                other.process.kill()
        if self._own_ranks is not None:
            self._own_ranks.followers.declare_lost(reason)
        if callback is not None:
            callback(reason)

    def end_ranks(self) -> None:
        """End the other stages, and with RankLost a step that is being computed; idempotent."""
        with self._lock:
            self._is_closing = True
        self._questions.fail(self.why_lost or STAGES_ENDED)
        self._cut()
        deadline = time.monotonic() + _END_S
        if self._own_ranks is not None:
            self._own_ranks.end_ranks()
        for other in self._others:
            if other.process is not None:
                other.process.end(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the other stages, and close the connections; idempotent. No step may be computed now."""
        self.end_ranks()
        for other in self._others:
            other.writer.close()
            if other.thread is not None and other.thread is not threading.current_thread():
                other.thread.join()
            other.links.close()
        if self._own_ranks is not None:
            self._own_ranks.close()
        self._news.close()
        self._news_end.close()

    def _cut(self) -> None:
        for other in self._others:
            other.links.cut()
            other.answers.put(None)
        cut(self._news_end)

    def _answer(self, other: _OtherStage, kind: FrameKind) -> Frame:
        frame = other.answers.get()
        if frame is None:
            raise RankLost(self.why_lost or STAGES_ENDED)
        if frame.kind is not kind:
            raise RankLost(self._lost_by(other, f"sent {frame.kind.name} where {kind.name} was expected"))
        return frame

    def _lost_by(self, other: _OtherStage, why: str) -> str:
        self.declare_lost(f"{other.links.name} {why}")
        return self.why_lost

    def _listen(self, other: _OtherStage) -> None:
        next_stage = self._others[other.index + 1] if other.index + 1 < len(self._others) else None
        try:
            while True:
                frame = other.reader.read()
                match frame.kind:
                    case FrameKind.REPORT | FrameKind.READY | FrameKind.COPIED | FrameKind.NUMERICS:
                        other.answers.put(frame)
                    case FrameKind.ROWS:
                        self._note_rows(other)
                        if next_stage is not None:
                            next_stage.writer.send(FrameKind.ROWS, frame.payload)
                        else:
                            self._rows.append(frame.payload)
                            self._news_end.send(b"\0")
                    case FrameKind.ADAPTER_ANSWER:
                        self._questions.answer(frame.payload)
                    case FrameKind.FIGURES:
                        other.figures = figures_from_json(frame.payload, other.ranks, other.links.host)
                    case FrameKind.FAILED:
                        raise RankLost(f"{_SAID_ITSELF}: {frame.payload[:_MOST_TEXT].decode(errors='replace')}")
                    case _:
                        raise RankLost(f"sent {frame.kind.name}, which only the leader sends")
        except Exception as error:
            # Whatever it was, nobody listens to this stage any more.
            self.declare_lost(_who_and_why(other, str(error) or repr(error)))

    def _note_rows(self, other: _OtherStage) -> None:
        with self._lock:
            other.num_rows_owed -= 1
            if other.num_rows_owed < 0:
                raise RankLost("sent rows that belong to no micro-batch")
            if not other.num_rows_owed:
                other.reader.silence_allowed = IDLE_HEARTBEATS


def _reports_of(other: _OtherStage) -> list[RankReport]:
    if other.process is not None:
        return [rank_report(other.ranks.start + index, pid) for index, pid in enumerate(other.pids_here)]
    if other.figures:
        return list(other.figures)
    return [RankReport(rank, 0, is_up=False, host=other.links.host) for rank in other.ranks]


def _who_and_why(other: _OtherStage, why: str) -> str:
    if other.process is None:
        return f"{other.links.name} {why}"
    ended = "" if why.startswith(_SAID_ITSELF) else other.process.how_it_ended()
    return f"{other.links.name} (process {other.process.pid}) {ended or why}"
