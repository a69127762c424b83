"""Ports for programs that can't pick their own."""

from __future__ import annotations

import random
import socket

_BELOW_THE_KERNELS_OWN = range(20_000, 30_000)
"""From here the kernel gives none to connections or to port 0, so nobody but another such program takes them."""


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on: they were free a moment ago."""
    while True:
        first = random.choice(_BELOW_THE_KERNELS_OWN)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
