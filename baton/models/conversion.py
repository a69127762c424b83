"""Converts a GGUF file in a process of its own, which imports torch, and shows how far it is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ConfigError
from baton.models.progress import bar_of_bytes, mebibytes, say

_DONE = re.compile(r"(\d+) (\d+)\n?")
"""What the converter writes about its progress: bytes that are done, and all bytes."""
_LONGEST_REASON = 500
"""In characters."""


def convert_in_child(source: Path, directory: Path) -> None:
    """Write the model directory of a GGUF file into an empty directory; raises ConfigError with the converter's reason.

    The progress is shown on stderr, as a bar if that is a terminal.
    """
    try:
        say(f"Converting {source.name} ({mebibytes(source.stat().st_size)}) once …")
        _convert(source, directory)
    except OSError as error:
        raise ConfigError(f"the converter of {source} can't be run: {error}") from error


def add_sampling(directory: Path, sampling: Mapping[str, float]) -> None:
    """Write sampling parameters to a model directory's generation_config.json, and flush it."""
    path = directory / "generation_config.json"
    with path.open("r+", encoding="utf-8") as file:
        found = json.load(file)
        file.seek(0)
        file.truncate()
        json.dump({**found, **sampling}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _convert(source: Path, directory: Path) -> None:
    command = [sys.executable, "-P", "-m", "baton.runner.model.gguf.convert", str(source), str(directory)]
    with (
        bar_of_bytes() as show,
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
            said = [line for line in complaints.read().splitlines() if line.strip()]
            raise ConfigError(said[-1][:_LONGEST_REASON] if said else _how_it_ended(source, child.returncode))


def _how_it_ended(source: Path, code: int) -> str:
    """Why there is no directory, of a converter that did not say it itself."""
    if code == -signal.SIGKILL:
        return f"the converter of {source} was killed: it may have needed more memory than there is"
    return f"the converter of {source} ended with {code}"
