"""`baton top`: the cluster as it is now, again and again."""

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

    from baton.messages.request_rows import RequestRow
    from baton.messages.steering import ClusterEvent

_ASK_S = 2.0
_REQUESTS = 200
_EVENTS = 50
_PLAIN_WIDTH = 120


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(top)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was seen at one moment."""

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
    """Looks at a cluster, and remembers the events that it has read."""

    def __init__(self, address: str | None, run_dir: Path | None) -> None:
        self._address = address
        self._run_dir = run_dir
        self._routers: frozenset[tuple[str, str]] = frozenset()
        self._events: deque[ClusterEvent] = deque(maxlen=_EVENTS)

    def take_snapshot(self) -> Snapshot:
        """As it is now; raises Unreachable or DeadlineExceeded when nobody can say."""
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
        """Each router counts its own: with other routers the reading begins anew."""
        routers = frozenset((node.incarnation, node.status) for node in view.nodes if node.role == "router")
        if routers != self._routers:
            self._routers = routers
            self._events.clear()
        after = self._events[-1].seq if self._events else 0
        news = ask_any_router(self._address, self._run_dir, lambda router: list(router.events(after, timeout_s=_ASK_S)))
        self._events.extend(news)


def top(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    interval: Annotated[
        float, typer.Option("-d", "--interval", help="Seconds between two looks.", metavar="SECONDS", min=0.1)
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            help="Look so many times. Default: until q, or once where it is not a terminal.",
            min=1,
            metavar="N",
        ),
    ] = None,
) -> None:
    """Show the cluster as it is now: its health, nodes, running requests and latest events; q or Ctrl-C leaves.

    Where the output is no terminal the same is printed as plain text.
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
            snapshot = _again(watcher, snapshot)


class KeyReader:
    """What is typed, at once and unseen."""

    def __init__(self, descriptor: int | None) -> None:
        """None: nobody types."""
        self._descriptor = descriptor

    def quits_within(self, seconds: float) -> bool:
        """Whether somebody types q in this time, or closes the input."""
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
    """The terminal is as it was before when this ends, also by a signal that asks for the end."""
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


def _again(watcher: ClusterWatcher, before: Snapshot) -> Snapshot:
    """What is seen now; or what was seen, and why nothing else is."""
    try:
        return watcher.take_snapshot()
    except BatonError as error:
        return replace(before, view=replace(before.view, health="unreachable", detail=str(error)), rows=())
