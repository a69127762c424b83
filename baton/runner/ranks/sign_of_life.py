"""The channel between a rank's process and the first rank's: signs of life one way, and its end both ways.

Needs no torch: a new process gives its first sign before it imports anything slow.
"""

from __future__ import annotations

import os
import socket
import threading

SIGN = b"\0"
INTERVAL_S = 0.5
"""How often a sign is given."""


def give_signs(channel: socket.socket) -> None:
    """Give signs of life from a thread of its own, and end this process as soon as the first rank's has ended."""
    threading.Thread(target=_give_signs, args=(channel,), name="first-rank-watch", daemon=True).start()


def _give_signs(channel: socket.socket) -> None:
    channel.settimeout(INTERVAL_S)
    while True:
        try:
            channel.sendall(SIGN)
            ended = not channel.recv(1)
        except TimeoutError:
            continue
        except OSError:
            ended = True
        if ended:
            # Not sys.exit: the main thread may wait in a kernel, and nothing here is worth an orderly end.
            os._exit(0)
