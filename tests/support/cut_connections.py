"""Breaks connections of this process, and of others, as a network failure does: neither end closes them."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut_connections_to(address: str) -> int:
    """Cut every connection from this process to `address` (HOST:PORT). Returns their number."""
    return _cut(lambda connection: connection.getpeername()[:2] == _parsed(address))


def cut_connections_at(address: str) -> int:
    """Cut every connection that this process has accepted at `address` (HOST:PORT). Returns their number."""
    # What has no peer is the socket that accepts connections, and raises OSError.
    return _cut(lambda connection: bool(connection.getpeername()) and connection.getsockname()[:2] == _parsed(address))


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _cut(is_meant: Callable[[socket.socket], bool]) -> int:
    cut = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            # The owner's descriptor stays open: it notices that the connection is gone.
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if is_meant(connection):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def cut_connections_between(one: int, other: int) -> int:
    """Cut every TCP connection between two processes. Returns their number. Raises PermissionError."""
    ends = {(remote, local) for local, remote, _ in _connections(other)}
    mine = [descriptor for local, remote, descriptor in _connections(one) if (local, remote) in ends]
    for descriptor in mine:
        cut_descriptor(one, descriptor)
    return len(mine)


def cut_descriptor(pid: int, descriptor: int) -> None:
    """Cut the connection that is this descriptor of another process. Raises PermissionError."""
    process = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        with socket.socket(fileno=copy) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)


def _connections(pid: int) -> Iterator[tuple[str, str, int]]:
    """The TCP connections of a process: local and remote address, as in /proc, and the descriptor."""
    by_inode = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            # An IPv4 address is the end of the IPv6 address that stands for it.
            by_inode[words[9]] = [address[-13:] for address in words[1:3]]
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            inode = os.readlink(f"/proc/{pid}/fd/{entry}").removeprefix("socket:[").removesuffix("]")
            if inode in by_inode:
                local, remote = by_inode[inode]
                yield local, remote, int(entry)
