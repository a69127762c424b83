"""`baton top`: shows the state of a cluster, updated continuously."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask_routers import ask_any_router
from baton.cli.commands.requests import requests_of_all_routers
from baton.cli.output import print_text
from baton.cli.target import OperatorAddressOption, RunDirOption
from baton.cli.views.cluster_view import ClusterView, view_cluster
from baton.errors import BatonError, DeadlineExceeded, Unreachable

if TYPE_CHECKING:
    from rich.text import Text

    from baton.messages.operator import ClusterEvent, RequestRow

_ASK_S = 2.0
_REQUESTS = 200
_EVENTS = 50
_PLAIN_WIDTH = 120


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(top)


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
