"""The directory of one running cluster: its lock, its state, its logs. A private place of one user.

The lock is an flock that the supervisor holds as long as it lives, so a crash leaves nothing that has to be cleaned up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from baton.cli.cluster.state import ClusterState
from baton.errors import ConfigError

_LOCK = "lock"
_STATE = "cluster.json"
_LOOK_S = 0.02
_LOG_NAME = re.compile(r"(redis|supervisor|(prefill|decode|router)-\d+)\.log(\.(\d+|new))?\Z")


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """BATON_RUN_DIR, else a directory of this user's: under XDG_RUNTIME_DIR, else under the temporary directory."""
    if environ.get("BATON_RUN_DIR"):
        return Path(environ["BATON_RUN_DIR"])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "baton"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


class RunDir:
    """One cluster's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, process: str) -> Path:
        """Where the process's output goes."""
        return self.logs / f"{process}.log"

    def create(self) -> None:
        """Make the directory with mode 700; raises ConfigError when it can't be made or is not this user's alone."""
        with self._usable():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            self._check()
            self.logs.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Read-only, full, too long a path, ...: the way out is the same."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"run directory {self.path} can't be used ({error.strerror}): name another with --run-dir"
            ) from None

    def exists(self) -> bool:
        """Whether it is there; raises ConfigError when it is somebody else's."""
        if not self.path.exists():
            return False
        self._check()
        return True

    def _check(self) -> None:
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"run directory {self.path} is not a directory: name another with --run-dir")
        if found.st_uid != os.getuid():
            raise ConfigError(f"run directory {self.path} belongs to user {found.st_uid}: name another with --run-dir")
        if found.st_mode & 0o022:
            raise ConfigError(f"run directory {self.path} can be written by others: chmod 700 {self.path}")

    def take(self) -> None:
        """Hold the directory until `release` or this process's end.

        Raises ConfigError when a live cluster holds it or nothing can be written there.
        """
        with self._usable():
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        while not _locked(descriptor, fcntl.LOCK_EX):
            # Whoever looks for a holder shares the lock for a moment, which is in our way, too.
            if not self._look()[0]:
                time.sleep(_LOOK_S)
                continue
            os.close(descriptor)
            raise ConfigError(
                f"a cluster is already running in {self.path}: stop it with `baton down`, "
                "or start another beside it with --run-dir"
            )
        self._lock = descriptor
        self.sign()

    def sign(self) -> None:
        """Write this process's id into the lock that it holds; raises ConfigError on a full disk."""
        assert self._lock is not None
        with self._usable():
            # In this order somebody's id is in it at any time.
            os.ftruncate(self._lock, os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0))

    def clear_logs(self) -> None:
        """Remove the logs of the cluster before; whatever else is there is somebody's."""
        for log in self.logs.iterdir():
            if _LOG_NAME.match(log.name):
                log.unlink()

    def release(self) -> None:
        """Let the directory go and remove the state."""
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                (self.path / _STATE).unlink()
            os.close(self._lock)
            self._lock = None

    def holder(self) -> int | None:
        """Process id of the supervisor that holds the directory; None when nobody does."""
        return self._look()[1]

    def _look(self) -> tuple[bool, int | None]:
        """Whether it is held, and by whom, if that can be read."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY)
        except FileNotFoundError:
            return False, None
        try:
            if _locked(descriptor, fcntl.LOCK_SH):
                return False, None
            said = os.pread(descriptor, 32, 0).split()
            return True, int(said[0]) if said and said[0].isdigit() else None
        finally:
            os.close(descriptor)

    def holders(self, timeout_s: float) -> Iterator[int]:
        """Each one that holds the directory, until nobody does; raises TimeoutError when that takes longer.

        A start in the background has two, one after the other.
        """
        ends_at, before = time.monotonic() + timeout_s, None
        while (holder := self.holder()) is not None:
            if holder != before:
                before = holder
                yield holder
            if time.monotonic() >= ends_at:
                raise TimeoutError
            time.sleep(_LOOK_S)

    def write_state(self, state: ClusterState) -> None:
        """Replace the state in one piece; readable by this user alone. Raises ConfigError on a full disk."""
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
        """The last state that a supervisor wrote; None without one. Raises ConfigError when it can't be read."""
        try:
            return ClusterState.from_json(json.loads((self.path / _STATE).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path / _STATE} can't be read ({error}): stop the cluster and remove it") from None


def _locked(descriptor: int, how: int) -> bool:
    """Lock it now; False: somebody else's lock is in the way."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
