"""Finds free ports for programs that can not choose their own."""

from __future__ import annotations

import random
import socket

_NOT_EPHEMERAL = range(20_000, 30_000)
"""The kernel assigns none of these ports itself, so only another program that asks for one takes them."""


def first_free_port(count: int) -> int:
    """Return the first of `count` consecutive ports on which nobody listened a moment ago."""
    while True:
        first = random.choice(_NOT_EPHEMERAL)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
