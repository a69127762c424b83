"""The progress bar of offline use, on stderr if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

OnProgress = Callable[[int, int], None]
"""Takes how many requests have ended, and how many tokens were generated, so far."""


@contextmanager
def progress_bar(total: int, *, is_wanted: bool, console: Console | None = None) -> Iterator[OnProgress]:
    """A function that moves the bar. Nothing is written unless it `is_wanted` and the console is a terminal."""
    console = console or Console(stderr=True)
    if not (is_wanted and console.is_terminal):
        yield lambda num_ended, num_tokens: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("prompts", total=total, tokens=0)
        yield lambda num_ended, num_tokens: bar.update(task, completed=num_ended, tokens=num_tokens)
