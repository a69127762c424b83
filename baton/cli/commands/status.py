"""`baton status`, `baton events` and `baton top`: the health, load, problems and events of a cluster."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask import (
    NodeAnswers,
    ask_all_routers,
    ask_any_router,
    ask_nodes,
    can_be_asked,
    requests_of_all_routers,
    router_addresses,
)
from baton.cli.output import (
    VERSION,
    Format,
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    OutputOption,
    fine_duration,
    print_item,
    print_json,
    print_note,
    print_result,
    print_table,
    print_text,
    print_yaml,
)
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption
from baton.cli.views.cluster_view import ClusterView, view_cluster
from baton.cli.views.followed_routers import EventMerger, follow_events
from baton.cli.views.status_page import Overview, overview, status_lines
from baton.errors import BatonError, DeadlineExceeded, ExitCode, Unreachable

if TYPE_CHECKING:
    from rich.text import Text

    from baton.messages.operator import ClusterEvent, RequestRow


_COLUMNS = ["AGE", "TYPE", "REASON", "SUBJECT", "DETAIL"]
_WIDE = ["SEQ", "INCARNATION", "REQUEST", "ROUTER"]
_WIDTHS = (8, 7, 18, 12, 0)
"""Widths of the columns with -w, when later rows are not known."""
_ASK_NODES_S = 2.0
"""How long to wait for nodes at most, since the other nodes are worth showing without one that does not answer."""
_ASK_S = 2.0
_REQUESTS = 200
_EVENTS = 50
_PLAIN_WIDTH = 120


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add one of the commands."""
    commands: Mapping[str, Callable[..., None]] = {"status": status, "events": events, "top": top}
    app.command(name, help=text)(commands[name])


def events(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Keep printing new events, until Ctrl-C.")] = False,
    after: Annotated[
        int, typer.Option(help="Only events of each router with a larger sequence number.", metavar="SEQ", min=0)
    ] = 0,
    no_headers: NoHeadersOption = False,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the events of the cluster that its routers saw: nodes that joined or left, cordons, failovers and others.

    An event that several routers saw is listed once. Each router keeps the last few thousand events since its start,
    and numbers them itself. With -w, JSON is one document a line.
    """
    if watch:
        _watch(address, run_dir, after, output, headers=not no_headers)
        return
    listed, problems = events_of_all_routers(address, run_dir, after, ANSWER_TIMEOUT_S)
    if output is ListFormat.JSON:
        print_json({"version": VERSION, "events": [asdict(event) for event in listed]})
    elif output is ListFormat.YAML:
        print_yaml({"version": VERSION, "events": [asdict(event) for event in listed]})
    elif output is ListFormat.NAME:
        for event in listed:
            print_text(event.reason)
    else:
        wide, now = output is ListFormat.WIDE, time.time()
        rows = [event_row(event, fine_duration(now - event.time), wide=wide) for event in listed]
        print_table(_COLUMNS + (_WIDE if wide else []), rows, headers=not no_headers)
    for problem in problems:
        print_note(f"baton: {problem}")


def events_of_all_routers(
    address: str | None, run_dir: Path | None, after: int, timeout_s: float
) -> tuple[list[ClusterEvent], list[str]]:
    """The events of all routers, the oldest first, and the errors of the routers that did not answer.

    Raises Unreachable if no router answers.
    """
    answers, problems = ask_all_routers(
        address, run_dir, lambda router: list(router.events(after, timeout_s=timeout_s))
    )
    return EventMerger().merge(event for events in answers for event in events), problems


def _watch(address: str | None, run_dir: Path | None, after: int, output: ListFormat, *, headers: bool) -> None:
    is_table = output in (ListFormat.TABLE, ListFormat.WIDE)
    wide = output is ListFormat.WIDE
    if is_table and headers:
        print_text(_padded(["TIME", *_COLUMNS[1:], *(_WIDE if wide else [])]))
    for event in follow_events(lambda: router_addresses(address, run_dir), after):
        row = event_row(event, time.strftime("%H:%M:%S", time.localtime(event.time)), wide=wide)
        print_item(output, asdict(event), event.reason, _padded(row))
        sys.stdout.flush()


def event_row(event: ClusterEvent, when: str, *, wide: bool) -> list[str]:
    """An event as a row of a table; `wide` adds the columns of `-o wide`."""
    cells = [when, event.severity, event.reason, event.subject or "-", event.detail or "-"]
    wide_cells = [str(event.seq), event.incarnation or "-", event.request_id or "-", event.router]
    return cells + (wide_cells if wide else [])


def _padded(cells: list[str]) -> str:
    widths = (*_WIDTHS, *(0 for _ in cells[len(_WIDTHS) :]))
    return "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def status(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Show whether the cluster serves, its load, what is degraded and the latest failures.

    The cluster is ok, degraded or unavailable. The exit code is 1 if it is unavailable.
    """
    seen = _overview(address, run_dir, timeout)
    print_result(output, seen.to_json(), status_lines(seen, time.time()))
    if seen.view.health == "unavailable":
        raise typer.Exit(int(ExitCode.FAILED))


def _overview(address: str | None, run_dir: Path | None, timeout_s: float) -> Overview:
    """Ask routers and nodes. Raises Unreachable if there is no cluster; a node without an answer is a problem of it."""
    view = view_cluster(address, run_dir, timeout_s)
    asked = [node for node in view.nodes if can_be_asked(node)]
    answers = ask_nodes(asked, min(timeout_s, _ASK_NODES_S)) if asked else NodeAnswers({}, {})
    events: list[ClusterEvent] = []
    # If no router answers, the view says so already.
    with suppress(BatonError):
        events, _ = events_of_all_routers(address, run_dir, 0, timeout_s)
    return overview(view, answers.reports, answers.problems, events)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a cluster at one time."""

    view: ClusterView
    rows: Sequence[RequestRow]
    events: Sequence[ClusterEvent]
    time: float
    """Seconds since the epoch."""

    def lines(self, width: int, height: int | None = None) -> list[Text]:
        # rich takes 0.1 s to import, and the help does not need it.
        from baton.cli.views.top_page import Screen, top_lines

        return top_lines(self.view, self.rows, self.events, self.time, Screen(width, height))


class ClusterWatcher:
    """Reads the state of a cluster, and keeps the latest events that it has read."""

    def __init__(self, address: str | None, run_dir: Path | None) -> None:
        self._address = address
        self._run_dir = run_dir
        self._routers: frozenset[tuple[str, str]] = frozenset()
        self._events: deque[ClusterEvent] = deque(maxlen=_EVENTS)

    def take_snapshot(self) -> Snapshot:
        """Read the current state. Raises Unreachable or DeadlineExceeded if neither router nor supervisor knows it."""
        view = view_cluster(self._address, self._run_dir, _ASK_S)
        rows: Sequence[RequestRow] = []
        if view.health != "unavailable" or self._address is not None:
            try:
                rows, _ = requests_of_all_routers(self._address, self._run_dir, _REQUESTS, _ASK_S)
                self._read_events(view)
            except (Unreachable, DeadlineExceeded) as error:
                view = replace(view, detail="; ".join(filter(None, [view.detail, str(error)])))
        return Snapshot(view, rows, tuple(self._events), time.time())

    def _read_events(self, view: ClusterView) -> None:
        """Read new events. Each router numbers its own, so a change of routers begins with the first event again."""
        routers = frozenset((node.incarnation, node.status) for node in view.nodes if node.role == "router")
        if routers != self._routers:
            self._routers = routers
            self._events.clear()
        after = self._events[-1].seq if self._events else 0
        new_events = ask_any_router(
            self._address, self._run_dir, lambda router: list(router.events(after, timeout_s=_ASK_S))
        )
        self._events.extend(new_events)


def top(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    interval: Annotated[
        float, typer.Option("-d", "--interval", help="Seconds between two updates.", metavar="SECONDS", min=0.1)
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            help="Number of updates. Default: until q, or one if the output is not a terminal.",
            min=1,
            metavar="N",
        ),
    ] = None,
) -> None:
    """Show the health, nodes, running requests and latest events of the cluster, until q or Ctrl-C.

    If the output is not a terminal, the same is printed as plain text.
    """
    watcher = ClusterWatcher(address, run_dir)
    first = watcher.take_snapshot()
    if sys.stdout.isatty():
        _show(watcher, first, interval, count)
    else:
        _print(watcher, first, interval, count or 1)


def _print(watcher: ClusterWatcher, snapshot: Snapshot, interval: float, count: int) -> None:
    for number in range(count):
        if number:
            time.sleep(interval)
            snapshot = watcher.take_snapshot()
            print_text()
        for line in snapshot.lines(_PLAIN_WIDTH):
            print_text(line.plain.rstrip())


def _show(watcher: ClusterWatcher, snapshot: Snapshot, interval: float, count: int | None) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    with (
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        shown = 0
        while True:
            live.update(Group(*snapshot.lines(console.width, console.height)), refresh=True)
            shown += 1
            if shown == count or keys.quits_within(interval):
                return
            snapshot = _next_snapshot(watcher, snapshot)


class KeyReader:
    """Reads keys as they are typed, without echo."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` is the terminal; None if the input is not a terminal."""
        self._descriptor = descriptor

    def quits_within(self, seconds: float) -> bool:
        """Wait for this time, and return early with True if q is typed or the input is closed."""
        if self._descriptor is None:
            time.sleep(seconds)
            return False
        end = time.monotonic() + seconds
        while select.select([self._descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            typed = os.read(self._descriptor, 64)
            if not typed or b"q" in typed.lower():
                return True
        return False


@contextmanager
def _keys() -> Iterator[KeyReader]:
    """Read single keys for the duration of the block. The terminal is restored at its end, also after SIGTERM."""
    if not sys.stdin.isatty():
        yield KeyReader(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        tty.setcbreak(descriptor)
        yield KeyReader(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)


def _next_snapshot(watcher: ClusterWatcher, before: Snapshot) -> Snapshot:
    """The current state, or the previous one with the error that prevents an update."""
    try:
        return watcher.take_snapshot()
    except BatonError as error:
        return replace(before, view=replace(before.view, health="unreachable", detail=str(error)), rows=())
