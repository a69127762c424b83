"""Says on stderr what a person waits for while a model is fetched or converted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Print one line on stderr, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def mebibytes(count: int) -> str:
    """A number of bytes as text, such as `93.8 MiB`."""
    return f"{count / 2**20:.1f} MiB"


@contextmanager
def bar_of_bytes() -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many bytes of how many are done, as a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    # Importing rich is slow, and most starts convert nothing.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
