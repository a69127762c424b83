"""The building blocks of attacks: connections that send anything to a router, from any loopback address."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Port = Literal["grpc", "http"]
Answers = Counter[str]
"""The answers that an attacker got, counted by kind."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CONNECT_S = 5.0
_SEND_BUFFER_BYTES = 64 << 10
"""The kernel still delivers this much after a connection was closed; small, so that an attack ends soon."""
_PATIENCE_S = 0.2
"""Seconds that an attacker waits for the router to read or answer before it checks whether to stop."""
_PAUSE_S = 0.02
"""Seconds before it connects again."""
ATTACKER = "127.0.0.66"
"""The attacker's address; the victims have another one."""


@dataclass(frozen=True)
class Target:
    """The addresses of a router, and the attacker's key."""

    grpc: tuple[str, int]
    http: tuple[str, int]
    has_tls: bool
    key: str = ""
    """The key of a client, for attacks that need one; empty: no keys are required."""

    def connect(self, port: Port, source: str = ATTACKER, *, speaks: bool = True) -> socket.socket:
        """Connect to a port. `speaks`: use TLS if the router requires it; else only connect. Raises OSError."""
        raw = socket.create_connection(getattr(self, port), _CONNECT_S, source_address=(source, 0))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if not (self.has_tls and speaks):
            return raw
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"] if port == "grpc" else ["http/1.1"])
        try:
            return context.wrap_socket(raw)
        except BaseException:
            raw.close()
            raise


def drain(connection: socket.socket) -> int:
    """Discard the received bytes and return their number. Raises OSError if the other side has closed."""
    num_bytes = 0
    connection.setblocking(False)
    try:
        while True:
            got = connection.recv(1 << 16)
            if not got:
                raise ConnectionResetError
            num_bytes += len(got)
    except (BlockingIOError, ssl.SSLWantReadError):
        return num_bytes
    finally:
        connection.settimeout(_PATIENCE_S)


def send(connection: socket.socket, data: bytes, over: threading.Event) -> None:
    """Send all data, or as much as is read until the attack is over. Raises OSError."""
    connection.settimeout(_PATIENCE_S)
    left = memoryview(data)
    while left and not over.is_set():
        with contextlib.suppress(TimeoutError):
            left = left[connection.send(left) :]


Says = Callable[[int], Iterator[bytes]]
"""Yields the pieces that a connection sends; its argument is the connection's number."""
Talk = Callable[[socket.socket, threading.Event, int, Answers], None]
"""Runs one connection until it or the attack is over, and counts the answers. Raises OSError."""


def flood(target: Target, over: threading.Event, port: Port, count: int, talk: Talk) -> Answers:
    """Keep `count` connections open, each with `talk`; a closed connection is replaced."""
    answers: Answers = Counter()

    def one(number: int) -> None:
        while True:
            try:
                with contextlib.closing(target.connect(port)) as connection:
                    answers["connected"] += 1
                    talk(connection, over, number, answers)
            except OSError:
                answers["closed"] += 1
            if over.wait(_PAUSE_S):
                return

    run_in_threads([lambda number=number: one(number) for number in range(count)])  # type: ignore[misc]
    return answers


def saying(says: Says, *, reads: bool = True) -> Talk:
    """Return a talk that sends as fast as possible and then holds the connection open. `reads`: read the answers."""

    def talk(connection: socket.socket, over: threading.Event, number: int, _: Answers) -> None:
        for piece in says(number):
            if over.is_set():
                return
            send(connection, piece, over)
            if reads:
                drain(connection)
        while not over.wait(0.1):
            if reads:
                drain(connection)

    return talk


def run_in_threads(works: list[Callable[[], None]]) -> None:
    """Run all functions, each in its own thread."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def crowd(
    target: Target,
    over: threading.Event,
    port: Port,
    count: int,
    first: bytes,
    source: Callable[[random.Random], str] = lambda rng: ATTACKER,
) -> Answers:
    """Keep `count` connections open; each sends `first` and nothing more, without TLS. A closed one is replaced."""
    answers: Answers = Counter()
    rng = random.Random(7)
    held: deque[socket.socket] = deque()
    try:
        while not over.is_set():
            if len(held) >= count:
                over.wait(_PAUSE_S)
            while held and _is_closed(held[0]):
                held.popleft().close()
                answers["closed"] += 1
            if len(held) >= count:
                continue
            try:
                connection = target.connect(port, source(rng), speaks=False)
                held.append(connection)
                connection.sendall(first)
                answers["connected"] += 1
            except OSError:
                answers["refused"] += 1
                over.wait(_PAUSE_S)
    finally:
        for connection in held:
            connection.close()
    return answers


def _is_closed(connection: socket.socket) -> bool:
    try:
        drain(connection)
    except OSError:
        return True
    return False


def many_peers(rng: random.Random) -> str:
    """Return a random address of the loopback network that no victim has."""
    return f"127.{rng.randrange(1, 255)}.{rng.randrange(256)}.{rng.randrange(1, 255)}"
