"""What commands share that wait or change a cluster: options, deadline, progress line, and the end by Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from baton.cli.output import print_note
from baton.observe.terminal_text import shown

if TYPE_CHECKING:
    from rich.console import Console


T = TypeVar("T")

_LINE_INTERVAL_S = 1.0

NodesArgument = Annotated[
    list[str],
    typer.Argument(help="Names of nodes, as `baton get nodes` lists them.", metavar="NODE...", show_default=False),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(help="Longest time to wait, in seconds. Default: no limit.", metavar="SECONDS", min=0),
]


class Deadline:
    """The end of the time that a command may wait; it begins now."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s` is None for no limit."""
        self.timeout_s = timeout_s
        self._started = time.monotonic()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline; None without a limit."""
        return None if self.timeout_s is None else max(0.0, self.timeout_s - self.elapsed_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    @property
    def has_passed(self) -> bool:
        return self.remaining_s == 0.0


class ProgressLine:
    """Shows on stderr what is still awaited: one line that is redrawn on a terminal, else at most one line a second."""

    def __init__(self) -> None:
        self._console = _terminal()
        self._text = ""
        self._shown_at = float("-inf")

    def show(self, text: str) -> None:
        """Replace the text. A terminal that is too narrow for it shows its beginning."""
        now = time.monotonic()
        if text == self._text or (self._console is None and now < self._shown_at + _LINE_INTERVAL_S):
            return
        self._text, self._shown_at = text, now
        if self._console is None:
            print_note(text)
        else:
            self.clear()
            self._console.print(shown(text), end="", markup=False, highlight=False, no_wrap=True, overflow="ellipsis")

    def clear(self) -> None:
        """Remove the line from a terminal before the result is printed."""
        if self._console is not None:
            from rich.control import Control
            from rich.segment import ControlType

            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def _terminal() -> Console | None:
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return None
    # rich takes 0.1 s to import.
    from rich.console import Console

    return Console(stderr=True)


def print_warning(text: str) -> None:
    """Print a warning about a change that was made, if there is one."""
    if text:
        print_note(f"baton: warning: {text}")


@contextmanager
def closing_line(what_became: str) -> Iterator[None]:
    """If the block is interrupted, say so and `what_became` of its work in one line on stderr, and raise it on."""
    try:
        yield
    except KeyboardInterrupt:
        # A terminal has written ^C into the current line.
        print_note(f"{chr(10) if sys.stderr.isatty() else ''}baton: interrupted: {what_became}")
        raise


@contextmanager
def interrupts_deferred(*numbers: signal.Signals) -> Iterator[None]:
    """Defer these signals, by default SIGINT: one that arrives meanwhile is raised as KeyboardInterrupt at the end.

    Signals that are ignored stay ignored. Must be called on the main thread.
    """
    arrived = False

    def defer(*_: object) -> None:
        nonlocal arrived
        arrived = True

    deferred = [number for number in numbers or (signal.SIGINT,) if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = [(number, signal.signal(number, defer)) for number in deferred]
    try:
        yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    if arrived:
        raise KeyboardInterrupt
