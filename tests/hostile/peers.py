"""What attackers are made of: connections that say anything to a router, from any address of the loopback network."""

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
"""What an attacker was told, and how often."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CONNECT_S = 5.0
_SEND_BUFFER_BYTES = 64 << 10
"""What the kernel still delivers when a connection has been closed: an attack that is over is over soon."""
_PATIENCE_S = 0.2
"""How long an attacker waits where a router takes nothing, or says nothing, before it looks whether it is to stop."""
_PAUSE_S = 0.02
"""Before it connects again."""
ATTACKER = "127.0.0.66"
"""The victims are another peer."""


@dataclass(frozen=True)
class Target:
    """A router, as its attacker knows it."""

    grpc: tuple[str, int]
    http: tuple[str, int]
    has_tls: bool
    key: str = ""
    """Of a client, for attacks by somebody who has one; empty: none is asked for."""

    def connect(self, port: Port, source: str = ATTACKER, *, speaks: bool = True) -> socket.socket:
        """`speaks`: with TLS where the router wants it; else only the connection is made. Raises OSError."""
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
    """Throw away what has come; returns how much that was. Raises OSError when the other side has closed."""
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
    """All of it, or what is taken of it until the attack is over. Raises OSError."""
    connection.settimeout(_PATIENCE_S)
    left = memoryview(data)
    while left and not over.is_set():
        with contextlib.suppress(TimeoutError):
            left = left[connection.send(left) :]


Says = Callable[[int], Iterator[bytes]]
"""What a connection says, piece by piece; its argument is the connection's number."""
Talk = Callable[[socket.socket, threading.Event, int, Answers], None]
"""What one connection does until it, or the attack, is over, and where it counts what it is told; raises OSError."""


def flood(target: Target, over: threading.Event, port: Port, count: int, talk: Talk) -> Answers:
    """So many connections at a time, each of which is replaced when it is closed."""
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

    together([lambda number=number: one(number) for number in range(count)])  # type: ignore[misc]
    return answers


def saying(says: Says, *, reads: bool = True) -> Talk:
    """Say it as fast as it is taken, and then hold the connection open. `reads`: take what is answered."""

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


def together(works: list[Callable[[], None]]) -> None:
    """All of these, each in a thread of its own."""
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
    """So many connections at a time, until the end; each says `first` and nothing more, in clear text. Another one
    takes the place of one that is closed.
    """
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
    """An address of the loopback network; none that a victim has."""
    return f"127.{rng.randrange(1, 255)}.{rng.randrange(256)}.{rng.randrange(1, 255)}"
