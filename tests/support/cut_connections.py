"""Breaks TCP connections of this process as a network failure does: neither end closes them."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def cut_connections_to(address: str) -> int:
    """Cut every connection from this process to `address` (HOST:PORT). Returns their number."""
    host, _, port = address.rpartition(":")
    cut = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            # The owner's descriptor stays open: it notices that the connection is gone.
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.getpeername()[:2] == (host, int(port)):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut
