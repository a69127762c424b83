"""Commands of Baton that start at once: forked from a process that has imported what all of Baton's processes need.

A start as a program takes seconds of CPU time, most of them for imports. A test whose subject is the start itself asks
for one (`as_program`).
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from baton.processes.fork_server import ForkServer
from baton.processes.fork_server_process import show_command

_MODULE = "baton.cli.main"
_THIS = "tests.support.forked_commands"
_IMPORTS = "tests.support.forked_imports"
_ROOT = Path(__file__).parents[2]
_ROOM = 4096
_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "PYTHON", "LD_", "TORCH", "MALLOC_", "LANG", "LC_")
"""How the variables begin that the fork server has read: who sets one starts a program."""


@cache
def fork_server() -> ForkServer | None:
    """The fork server of this test process; None where there is a GPU, which what is forked can't use."""
    if Path("/dev/nvidiactl").exists():
        return None
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        server = ForkServer.start(_IMPORTS, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}, _ROOM, log)
        server.wait_until_loaded()
        assert server.is_usable, log.read_text()
    return server


class BatonProcess(subprocess.Popen[Any]):
    """`subprocess.Popen` for a command of Baton, forked unless its environment asks for other imports.

    The command leads a session of its own, whose terminal is its standard input if that is one.
    """

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], *, as_program: bool = False, **settings: Any
    ) -> None:
        """`words`: what follows `baton`. `as_program`: fork nothing, and so start its processes as users do."""
        self._words = list(map(str, words))
        self._as_program = as_program
        command = [sys.executable, "-P", "-m", _MODULE, *self._words]
        super().__init__(command, env=dict(env), start_new_session=True, preexec_fn=_take_terminal, **settings)

    def _execute_child(self, *arguments: Any) -> None:
        names = ("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "flags")
        pipes = ("shell", "stdin", "to_stdin", "from_stdout", "stdout", "from_stderr", "stderr")
        given = dict(zip(names + pipes, arguments, strict=False))
        server = fork_server() if not self._as_program else None
        if server is None or _is_read_at_import(given["env"]):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = {number: given[name] for number, name in enumerate(("stdin", "stdout", "stderr"))}
        descriptors = {number: number if own == -1 else own for number, own in streams.items()}
        descriptors |= {one: one for one in given["pass_fds"]}
        directory = os.fspath(given["cwd"] or os.getcwd())
        what = json.dumps({"words": self._words, "environment": given["env"], "directory": directory})
        command = [sys.executable, "-m", _THIS, what]
        forked = server.fork(command, descriptors, {}, has_fork_server=self._words[:1] in (["up"], ["demo"], ["bench"]))
        assert forked is not None, "the fork server of the tests does not answer"
        self.pid = forked.pid
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in pipes[1:]))  # type: ignore[attr-defined]


def run_baton(words: Sequence[str], env: Mapping[str, str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does with `text=True`."""
    given = settings.pop("input", None)
    timeout = settings.pop("timeout")
    if given is not None:
        settings["stdin"] = subprocess.PIPE
    with BatonProcess(words, env, text=True, **settings) as process:
        try:
            output, errors = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _take_terminal() -> None:
    # Without a controlling terminal Ctrl-C would be an ordinary character.
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _is_read_at_import(environment: Mapping[str, str]) -> bool:
    changed = {name for name, value in environment.items() if os.environ.get(name) != value}
    return any(name.startswith(_READ_AT_IMPORT) for name in changed)


def main(arguments: Sequence[str]) -> int:
    """Be a command of Baton, in a process that was forked for it; returns its exit code."""
    what = json.loads(arguments[0])
    show_command([sys.executable, "-P", "-m", _MODULE, *what["words"]])
    _take_terminal()
    # Without job control a shell has its background commands, this test run perhaps, ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(what["environment"])
    os.chdir(what["directory"])
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        is_terminal = os.isatty(number)
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = open(number, mode, closefd=False, errors=errors, encoding="utf-8", buffering=1 if is_terminal else -1)  # noqa: SIM115
        setattr(sys, name, stream)
    sys.argv = ["baton", *what["words"]]
    return int(importlib.import_module(_MODULE).main(what["words"]))
