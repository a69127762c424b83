"""Converts a GGUF file in a process of its own, which imports torch, and shows how far it is."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.cli.output import print_note, size
from baton.errors import ConfigError

_DONE = re.compile(r"(\d+) (\d+)\n?")
"""What the converter writes about its progress: bytes that are done, and all bytes."""


def convert_in_child(source: Path, directory: Path) -> None:
    """Write the model directory of a GGUF file into an empty directory; raises ConfigError with the converter's reason.

    The progress is shown on stderr, as a bar if that is a terminal.
    """
    print_note(f"Converting {source.name} ({size(source.stat().st_size)}) once …")
    command = [sys.executable, "-P", "-m", "baton.runner.model.gguf.convert", str(source), str(directory)]
    with (
        _progress() as show,
        # A file, since a child that fills a pipe which nobody reads would wait for ever.
        tempfile.TemporaryFile("w+", errors="replace") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if found := _DONE.fullmatch(line):
                    show(int(found[1]), int(found[2]))
            child.wait()
        except BaseException:
            child.kill()
            raise
        if child.returncode:
            complaints.seek(0)
            last = complaints.read().strip().splitlines()[-1:] or [f"its converter ended with {child.returncode}"]
            raise ConfigError(last[0])


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many bytes of how many are done."""
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
