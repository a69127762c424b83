"""A user's shell: runs the installed command in its own environment and finds the processes that were left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState
from tests.support.forked_commands import BatonProcess, run_baton

BATON = Path(sys.executable).with_name("baton")
ROOT = Path(__file__).parents[2]
BOUND_S = 100.0
"""The longest wait, in seconds: far beyond what anything takes, also on a busy machine."""
_END_S = 10.0
"""Seconds for a process to end that has nothing left to do."""
_MARK = "BATON_TEST_MARK"


class Shell:
    """Runs commands. Every process that it starts, also a detached one, has the shell's mark in its environment."""

    def __init__(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self.home = home
        self._mark = uuid.uuid4().hex
        kept = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        self.environment = kept | {
            _MARK: self._mark,
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "OMP_NUM_THREADS": "1",
            # Any free port, whatever else runs on this machine.
            "BATON_HTTP_PORT": "0",
            # Short prompts take both kinds of nodes, too.
            "BATON_PLACEMENT": "least-loaded",
            "PATH": f"{BATON.parent}:{os.environ['PATH']}",
        }

    def baton(
        self, *words: object, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end; `settings` as for subprocess.run."""
        given = self.environment | dict(environment or {})
        return run_baton([str(word) for word in words], given, stderr=subprocess.PIPE, **self._defaults(settings))

    def run(
        self, command: list[str], environment: Mapping[str, str] | None = None, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run any command to its end."""
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command,
            env=self.environment | dict(environment or {}),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            **self._defaults(settings),
        )
        return done

    def _defaults(self, settings: dict[str, Any]) -> dict[str, Any]:
        defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "timeout": BOUND_S, "cwd": self.home}
        if "input" not in settings:
            defaults["stdin"] = subprocess.DEVNULL
        return defaults | settings

    def start(self, *words: object, **settings: Any) -> subprocess.Popen[bytes]:
        """Start the command; `settings` as for `BatonProcess`."""
        settings.setdefault("stdin", subprocess.DEVNULL)
        return BatonProcess([str(word) for word in words], self.environment, cwd=self.home, **settings)

    @contextmanager
    def up(self, *words: object, run_dir: Path | None = None, log: Path | None = None) -> Iterator[ClusterState]:
        """Run `baton up` in the foreground, all of whose processes are forked; the test has to end it.

        `--detach` leaves its fork server behind: its processes would start as programs. `log`: what it prints.
        """
        place = self.home / "baton" if run_dir is None else run_dir
        command = ("up", *words, "--run-dir", place, "-o", "json")
        log = self.home / "up.log" if log is None else log
        with (
            log.open("wb") as printed,
            self.start(*command, stdout=subprocess.PIPE, stderr=printed) as supervisor,
            ExitStack() as stack,
        ):
            stack.callback(supervisor.kill)
            assert supervisor.stdout is not None
            assert supervisor.stdout.readline(), log.read_text()
            state = RunDir(place).read_state()
            assert state is not None
            yield state
            # Negative if the test has killed it.
            assert supervisor.wait(BOUND_S) <= 0, log.read_text()

    def remaining_processes(self) -> dict[int, str]:
        """Return the command lines of all processes that were started here and still run, by process id."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                # Redis writes its title over its environment, but it lives in the directory of its cluster.
                marked = f"{_MARK}={self._mark}".encode() in (process / "environ").read_bytes()
                if marked or (process / "cwd").readlink().is_relative_to(self.home.parent):
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def wait_for_process(self, words: str) -> None:
        """Wait until a process that was started here has these words in its command line."""
        deadline = time.monotonic() + BOUND_S
        while not any(words in command for command in self.remaining_processes().values()):
            assert time.monotonic() < deadline, f"no process has {words!r} in its command line"
            os.sched_yield()

    def assert_nothing_left(self) -> None:
        """Fail unless every process that was started here has ended or is about to; kill those that stay."""
        left = {
            pid: command for pid, command in self.remaining_processes().items() if not wait_until_ended(pid, _END_S)
        }
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind: {left}"
        assert not self.remaining_processes()


def wait_until_ended(pid: int, bound_s: float = BOUND_S) -> bool:
    """Wait for a process to end, whatever its parent; return whether it did."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], bound_s)[0])
    finally:
        os.close(descriptor)


def refusal(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the one line with which a command refused; fails if it printed more or had another exit code."""
    assert (done.returncode, done.stdout or "") == (code, ""), done
    assert done.stderr.startswith("baton: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith("\n")
    return done.stderr.removeprefix("baton: ").rstrip("\n")
