"""A cluster in cells: several routers, each with its own nodes, behind a load balancer that distributes in turn.

Cells do not influence each other, so each is a simulation in a process of its own, and as many processes as there are
cores run at once. The same seed gives the same figures, whichever process computes a cell. The result differs from one
router over all nodes, since each router sees only the nodes of its cell.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from baton.bench.arrangement import Arrangement
from baton.bench.results.host import usable_cores
from baton.bench.results.outcome import Outcomes
from baton.bench.simulator.config import Failure, SimulationConfig
from baton.bench.simulator.drafts import DraftTotals
from baton.bench.simulator.events import TimelineEntry
from baton.bench.simulator.router import FirstTokenParts
from baton.bench.simulator.simulation import Simulated, duration_s, simulate
from baton.bench.workloads.workload import Workload, WorkloadRequest
from baton.errors import BatonError, InvalidRequest
from baton.messages.node import Role

Progress = Callable[[int], None]
_FIGURES, _FAILED, _PROGRESS = b"r", b"f", b"p"


def simulate_cells(workload: Workload, config: SimulationConfig, progress: Progress = lambda ended: None) -> Simulated:
    """Simulates all cells to their end. Raises InvalidRequest if nodes or concurrency can't be divided evenly."""
    if config.cells == 1:
        return simulate(workload, config, progress)
    return _merged(_in_processes(workload, cell_configs(config), progress))


def cell_configs(config: SimulationConfig) -> list[SimulationConfig]:
    """The configuration of each cell. Raises InvalidRequest if nodes or concurrency can't be divided evenly."""
    cells, whole, limit = config.cells, config.arrangement, config.max_concurrency
    if cells > 1 and config.num_encode:
        raise InvalidRequest("--cells", "can't be used together with --encode")
    if whole.prefill % cells or whole.decode % cells or (limit or 0) % cells:
        raise InvalidRequest("--cells", f"{cells} can't share the nodes of {whole}, or the concurrency, evenly")
    part = Arrangement(whole.prefill // cells, whole.decode // cells, whole.is_conditional)
    shared = replace(config, cells=1, arrangement=part, max_concurrency=None if limit is None else limit // cells)
    return [
        replace(shared, cell=cell, seed=config.seed + cell, failures=_failures(config.failures, part, cell))
        for cell in range(cells)
    ]


def _failures(failures: Sequence[Failure], part: Arrangement, cell: int) -> Sequence[Failure]:
    """The failures of one cell's nodes."""
    roles = ((Role.PREFILL, part.prefill), (Role.DECODE, part.decode))
    names = {f"{role.value}-{cell * count + number}" for role, count in roles for number in range(count)}
    return [failure for failure in failures if failure.node_id in names]


def _share_of(workload: Iterable[WorkloadRequest], cell: int, cells: int) -> Iterator[WorkloadRequest]:
    """The requests of one cell: every `cells`-th one, or every `cells`-th session, whose turns stay together."""
    for request in workload:
        if (request.index if request.session is None else request.session) % cells == cell:
            yield request


def _in_processes(workload: Workload, parts: Sequence[SimulationConfig], progress: Progress) -> list[Simulated]:
    """Runs as many processes at once as there are cores."""
    done: dict[int, Simulated] = {}
    ended = [0] * len(parts)
    running: dict[Connection, _Process] = {}
    waiting = list(range(len(parts)))
    try:
        while waiting or running:
            while waiting and len(running) < usable_cores():
                cell = waiting.pop(0)
                process = _Process(cell, _share_of(workload, cell, len(parts)), parts[cell])
                running[process.answers] = process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                process = running[ready]
                message = process.next()
                if isinstance(message, int):
                    ended[process.cell] = message
                    progress(sum(ended))
                else:
                    done[process.cell] = message
                    running.pop(ready).stop()
    finally:
        for process in running.values():
            process.stop()
    return [done[cell] for cell in range(len(parts))]


class _Process:
    """A process that simulates one cell. It is forked, so its input needs no encoding."""

    def __init__(self, cell: int, requests: Iterable[WorkloadRequest], config: SimulationConfig) -> None:
        self.cell = cell
        context = multiprocessing.get_context("fork")
        self.answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(requests, config, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def next(self) -> int | Simulated:
        """Waits for the next message: the number of ended requests, or the result. Raises BatonError."""
        try:
            message = self.answers.recv_bytes()
            kind, text = message[:1], message[1:]
            if kind == _PROGRESS:
                return int(text)
            if kind == _FIGURES:
                return _simulated(json.loads(text), Outcomes.from_bytes(self.answers.recv_bytes()))
        except EOFError:
            raise BatonError(f"the process that simulated cell {self.cell} died; its output is printed above") from None
        raise BatonError(text.decode())

    def stop(self) -> None:
        """Ends the process, whether it is done or not."""
        self._process.terminate()
        self._process.join()
        self.answers.close()


def _run(requests: Iterable[WorkloadRequest], config: SimulationConfig, answers: Connection) -> None:
    """Simulates one cell in a child process, which sends the number of ended requests and at last the result."""
    try:
        done = simulate(requests, config, lambda ended: answers.send_bytes(_PROGRESS + str(ended).encode()))
        answers.send_bytes(_FIGURES + json.dumps(_figures(done)).encode())
        answers.send_bytes(done.outcomes.to_bytes())
    except BatonError as error:
        answers.send_bytes(_FAILED + str(error).encode())


def _figures(done: Simulated) -> dict[str, Any]:
    values = {field.name: getattr(done, field.name) for field in fields(Simulated) if field.name != "outcomes"}
    drafts = None if done.drafts is None else asdict(done.drafts)
    return values | {"parts": asdict(done.parts), "timeline": _entries(done.timeline), "drafts": drafts}


def _entries(timeline: dict[str, list[TimelineEntry]] | None) -> Any:
    if timeline is None:
        return None
    return {node: [astuple(entry) for entry in entries] for node, entries in timeline.items()}


def _simulated(values: dict[str, Any], outcomes: Outcomes) -> Simulated:
    timeline = values.pop("timeline")
    if timeline is not None:
        timeline = {node: [TimelineEntry(*entry) for entry in entries] for node, entries in timeline.items()}
    parts, drafts = FirstTokenParts(**values.pop("parts")), values.pop("drafts")
    drafts = None if drafts is None else DraftTotals(**drafts)
    return Simulated(outcomes=outcomes, parts=parts, timeline=timeline, drafts=drafts, **values)


def _merged(cells: Sequence[Simulated]) -> Simulated:
    first, *others = cells
    for other in others:
        first.outcomes.extend(other.outcomes)
        first.parts.add(other.parts)
        first.num_steps += other.num_steps
        first.num_retries += other.num_retries
        first.num_failures += other.num_failures
        first.bytes_moved += other.bytes_moved
        first.num_preemptions += other.num_preemptions
        first.moves += other.moves
        if first.drafts is not None and other.drafts is not None:
            first.drafts.add(other.drafts)
        if first.timeline is not None:
            first.timeline |= other.timeline or {}
    first.duration_s = duration_s(first.outcomes)
    return first
