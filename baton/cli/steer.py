"""What the commands that change something have in common: what they take, and how progress is shown."""

from __future__ import annotations

import sys
import time
from typing import Annotated, TypeVar

import typer

from baton.cli.output import note

T = TypeVar("T")

ASK_S = 5.0
_SAY_EVERY_S = 1.0

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
    """What is left to be done, on stderr: one line that changes on a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._said = ""
        self._said_at = float("-inf")

    def say(self, text: str) -> None:
        """This is how it stands now."""
        now = time.monotonic()
        if text == self._said or (not self._is_terminal and now < self._said_at + _SAY_EVERY_S):
            return
        self._said, self._said_at = text, now
        if self._is_terminal:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()
        else:
            note(text)

    def end(self) -> None:
        """The result is what counts now."""
        if self._is_terminal and self._said:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def warn(text: str) -> None:
    """Something that went as it was asked for, and may not have been meant so."""
    if text:
        note(f"baton: warning: {text}")
