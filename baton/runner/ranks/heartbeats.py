"""What the first rank and the process of another one tell each other over their channel: heartbeats one way, lines of
commands and answers, and its end both ways.

Needs no torch: a new process sends its first heartbeat before it imports anything slow.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

LOADING = b"\0"
LOADED = b"\1"
"""The heartbeat while the model is loading, and the one afterwards: a loading process may be silent for longer."""
ANSWER = b"\2"
"""Before an answer, which ends with a line feed; anything else is why the process ends."""
INTERVAL_S = 0.5
"""Seconds between two heartbeats."""
_READ_BYTES = 1 << 16


class Heartbeats:
    """Sends heartbeats from a thread of its own, and ends this process as soon as the first rank's has ended.

    The thread also takes the lines that the first rank sends.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._take: Callable[[bytes], None] | None = None
        self._heartbeat = LOADING
        threading.Thread(target=self._send, name="first-rank-watch", daemon=True).start()

    def loaded(self, take: Callable[[bytes], None]) -> None:
        """Say now, and from now on, that the model is loaded. `take` is called with each line of the first rank."""
        self._take = take
        self._heartbeat = LOADED
        self.send(LOADED)

    def answer(self, text: bytes) -> None:
        """Send an answer without a line feed in it, from any thread."""
        self.send(ANSWER + text + b"\n")

    def send(self, text: bytes) -> None:
        """Send bytes without others between them, from any thread."""
        with self._sending:
            self._channel.sendall(text)

    def _send(self) -> None:
        lines, received = b"", select.poll()
        received.register(self._channel, select.POLLIN)
        try:
            while True:
                self.send(self._heartbeat)
                if not received.poll(INTERVAL_S * 1e3):
                    continue
                if not (more := self._channel.recv(_READ_BYTES)):
                    break
                *whole, lines = (lines + more).split(b"\n")
                for line in whole:
                    if self._take is not None:
                        self._take(line)
        except OSError:
            pass
        finally:
            # Not sys.exit: the main thread may wait in a kernel, and nothing here is worth an orderly end.
            os._exit(0)
