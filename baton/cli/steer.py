"""What the commands that change something have in common: what they take, and how progress is shown."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from baton.cli.output import note

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

ASK_S = 5.0
_LINE_EVERY_S = 1.0

NodesArgument = Annotated[
    list[str], typer.Argument(help="Names, as `baton get nodes` has them.", metavar="NODE...", show_default=False)
]
PatienceOption = Annotated[
    float | None,
    typer.Option(help="Seconds to wait at most. Default: as long as it takes.", metavar="SECONDS", min=0),
]


class Patience:
    """How long somebody waits."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.started = time.monotonic()

    @property
    def left(self) -> float | None:
        """Seconds; None: for ever."""
        return None if self.seconds is None else max(0.0, self.seconds - self.spent)

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.started

    @property
    def is_over(self) -> bool:
        return self.left == 0.0


class ProgressLine:
    """Shows on stderr what is still awaited: one line that is redrawn on a terminal, else at most one line a second."""

    def __init__(self) -> None:
        self._console = _terminal()
        self._text = ""
        self._shown_at = float("-inf")

    def show(self, text: str) -> None:
        """Replace the text. A terminal that is too narrow for it shows its beginning."""
        now = time.monotonic()
        if text == self._text or (self._console is None and now < self._shown_at + _LINE_EVERY_S):
            return
        self._text, self._shown_at = text, now
        if self._console is None:
            note(text)
        else:
            self.clear()
            self._console.print(text, end="", markup=False, highlight=False, no_wrap=True, overflow="ellipsis")

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


def warn(text: str) -> None:
    """Something that went as it was asked for, and may not have been meant so."""
    if text:
        note(f"baton: warning: {text}")
