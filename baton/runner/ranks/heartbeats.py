"""What the first rank and the process of another one tell each other over their channel: heartbeats one way, and its
end both ways.

Needs no torch: a new process sends its first heartbeat before it imports anything slow.
"""

from __future__ import annotations

import os
import socket
import threading

LOADING = b"\0"
LOADED = b"\1"
"""The heartbeat while the model is loading, and the one afterwards: a loading process may be silent for longer."""
INTERVAL_S = 0.5
"""Seconds between two heartbeats."""


class Heartbeats:
    """Sends heartbeats from a thread of its own, and ends this process as soon as the first rank's has ended."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._heartbeat = LOADING
        threading.Thread(target=self._send, name="first-rank-watch", daemon=True).start()

    def loaded(self) -> None:
        """Say now, and from now on, that the model is loaded."""
        self._heartbeat = LOADED
        self._channel.sendall(LOADED)

    def _send(self) -> None:
        self._channel.settimeout(INTERVAL_S)
        while True:
            try:
                self._channel.sendall(self._heartbeat)
                ended = not self._channel.recv(1)
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                # Not sys.exit: the main thread may wait in a kernel, and nothing here is worth an orderly end.
                os._exit(0)
