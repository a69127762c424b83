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
from baton.model_formats.gguf.container import open_gguf
from baton.models.progress import bar_of_bytes, mebibytes, say

_PROGRESS_LINE = re.compile(r"(\d+) (\d+)\n?")
"""A line of the converter about its progress: bytes that are done, and all bytes."""
_MAX_REASON_CHARS = 500


def convert_in_child(source: Path, directory: Path) -> None:
    """Write the model directory of a GGUF file into an empty directory; raises ConfigError with the reason.

    The conversion is announced on stderr when the converter has found the file's header sound. Its progress is shown
    there, too, as a bar if that is a terminal.
    """
    try:
        _convert(source, directory)
    except OSError as error:
        raise ConfigError(f"the converter of {source} can't be run: {error}") from error


def add_to_json(path: Path, more: Mapping[str, object]) -> None:
    """Write further keys to a JSON file of a model directory, and flush it."""
    with path.open("r+", encoding="utf-8") as file:
        found = json.load(file)
        file.seek(0)
        file.truncate()
        json.dump({**found, **more}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _convert(source: Path, directory: Path) -> None:
    # A file without a sound header is refused at once, not only when the converter has imported torch.
    with open_gguf(source):
        pass
    command = [sys.executable, "-P", "-m", "baton.runner.model.gguf.convert", str(source), str(directory)]
    with (
        # A file, since a child that fills a pipe which nobody reads would wait for ever.
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            found = (_PROGRESS_LINE.fullmatch(line) for line in child.stdout)
            reports = ((int(report[1]), int(report[2])) for report in found if report)
            if next(reports, None) is not None:
                say(f"Converting {source.name} ({mebibytes(source.stat().st_size)}) once …")
                with bar_of_bytes() as show:
                    for done, total in reports:
                        show(done, total)
            child.wait()
        except BaseException:
            child.kill()
            raise
        if child.returncode:
            stderr.seek(0)
            lines = [line for line in stderr.read().splitlines() if line.strip()]
            raise ConfigError(
                lines[-1][:_MAX_REASON_CHARS] if lines else _reason_from_exit_code(source, child.returncode)
            )


def _reason_from_exit_code(source: Path, code: int) -> str:
    """Why a converter that wrote nothing to stderr has failed."""
    if code == -signal.SIGKILL:
        return f"the converter of {source} was killed: it may have needed more memory than there is"
    return f"the converter of {source} ended with {code}"
