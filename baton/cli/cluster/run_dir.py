"""The directory of one running cluster, with its lock, its state and its logs. Only its owner can write to it.

The lock is an flock that the supervisor holds while it lives, so nothing has to be cleaned up after a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from baton.cli.cluster.state import ClusterState
from baton.errors import ConfigError

_LOCK = "lock"
_STATE = "cluster.json"
_POLL_INTERVAL_S = 0.02
_LOG_NAME = re.compile(r"(redis|supervisor|(prefill|decode|router)-\d+)\.log(\.(\d+|new))?\Z")


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """The directory in BATON_RUN_DIR, else one of this user in XDG_RUNTIME_DIR or in the temporary directory."""
    if environ.get("BATON_RUN_DIR"):
        return Path(environ["BATON_RUN_DIR"])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "baton"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


class RunDir:
    """The run directory of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, process: str) -> Path:
        """The file that gets the output of a process."""
        return self.logs / f"{process}.log"

    @property
    def flag(self) -> str:
        """What names this directory at the end of a command: " --run-dir PATH", or nothing if it is the default one."""
        is_default = self.path == default_run_dir(os.environ).absolute()
        return "" if is_default else f" --run-dir {shlex.quote(str(self.path))}"

    def command(self, words: str) -> str:
        """A command about this cluster, for a message: `baton WORDS`, in backquotes, with --run-dir where needed."""
        return f"`baton {words}{self.flag}`"

    def create(self) -> None:
        """Make the directory with mode 700. Raises ConfigError if that fails or if others can write to it."""
        with self._usable():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            self._check()
            self.logs.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn an OSError (read-only, full, path too long, ...) into a ConfigError that suggests another directory."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"run directory {self.path} can't be used ({error.strerror}): name another with --run-dir"
            ) from None

    def exists(self) -> bool:
        """Whether the directory exists. Raises ConfigError if it belongs to another user."""
        if not self.path.exists():
            return False
        self._check()
        return True

    def _check(self) -> None:
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"run directory {self.path} is not a directory: name another with --run-dir")
        if status.st_uid != os.getuid():
            raise ConfigError(f"run directory {self.path} belongs to user {status.st_uid}: name another with --run-dir")
        if status.st_mode & 0o022:
            raise ConfigError(f"run directory {self.path} can be written by others: chmod 700 {self.path}")

    def lock(self) -> None:
        """Lock the directory until `release` or the end of this process.

        Raises ConfigError if a running cluster holds the lock, or if the directory can't be written.
        """
        with self._usable():
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        while not _locked(descriptor, fcntl.LOCK_EX):
            # A process that reads the holder has a shared lock for a moment, which also makes the attempt fail.
            if not self._read_lock()[0]:
                time.sleep(_POLL_INTERVAL_S)
                continue
            os.close(descriptor)
            raise ConfigError(
                f"a cluster is already running in {self.path}: stop it with {self.command('down')}, "
                "or start another beside it with --run-dir"
            )
        self._lock = descriptor
        self.write_owner()

    def write_owner(self) -> None:
        """Write the id of this process into the lock file that it holds. Raises ConfigError on a full disk."""
        assert self._lock is not None
        with self._usable():
            # The file is written before it is truncated, so that it holds a process id at any time.
            os.ftruncate(self._lock, os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0))

    def clear_logs(self) -> None:
        """Remove the logs of the previous cluster. Other files in the directory stay."""
        for log in self.logs.iterdir():
            if _LOG_NAME.match(log.name):
                log.unlink()

    def release(self) -> None:
        """Unlock the directory and remove the state."""
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                (self.path / _STATE).unlink()
            os.close(self._lock)
            self._lock = None

    def holder(self) -> int | None:
        """The process id of the supervisor that holds the lock; None if no process does."""
        return self._read_lock()[1]

    def _read_lock(self) -> tuple[bool, int | None]:
        """Whether the lock is held, and the process id of its holder if that can be read."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY)
        except FileNotFoundError:
            return False, None
        try:
            if _locked(descriptor, fcntl.LOCK_SH):
                return False, None
            words = os.pread(descriptor, 32, 0).split()
            return True, int(words[0]) if words and words[0].isdigit() else None
        finally:
            os.close(descriptor)

    def holders(self, timeout_s: float) -> Iterator[int]:
        """Yield each process that holds the lock until none does. Raises TimeoutError after `timeout_s`.

        A cluster that is started in the background has two holders, one after the other.
        """
        ends_at, before = time.monotonic() + timeout_s, None
        while (holder := self.holder()) is not None:
            if holder != before:
                before = holder
                yield holder
            if time.monotonic() >= ends_at:
                raise TimeoutError
            time.sleep(_POLL_INTERVAL_S)

    def write_state(self, state: ClusterState) -> None:
        """Replace the state file in one step, readable by this user only. Raises ConfigError on a full disk."""
        with self._usable():
            descriptor, name = tempfile.mkstemp(dir=self.path, prefix=".cluster-", suffix=".json")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(state.to_json(), file, indent=2)
                    file.write("\n")
                os.replace(name, self.path / _STATE)
            except BaseException:
                os.unlink(name)
                raise

    def read_state(self) -> ClusterState | None:
        """The last state that a supervisor wrote; None if there is none. Raises ConfigError if it can't be read."""
        try:
            return ClusterState.from_json(json.loads((self.path / _STATE).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path / _STATE} can't be read ({error}): stop the cluster and remove it") from None


def _locked(descriptor: int, how: int) -> bool:
    """Lock the file if that is possible without waiting. False: another process has it locked."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
