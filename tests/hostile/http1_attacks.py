"""Attacks on the HTTP port by HTTP/1.1 bytes. None of them needs a key."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from tests.hostile.peers import Answers, Says, Target, crowd, flood, many_peers, saying

_HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_COMPLETIONS = b"/v1/completions"
Attack = Callable[[Target, threading.Event], Answers]


def _forever(first: bytes, again: bytes) -> Says:
    def says(_: int) -> Iterator[bytes]:
        yield first
        while True:
            yield again

    return says


def _slowly(first: bytes, again: bytes) -> Says:
    """A line now and then: what comes is never whole."""

    def says(_: int) -> Iterator[bytes]:
        yield first
        pause = threading.Event()
        for number in range(2_000):
            yield again % number
            pause.wait(0.01)

    return says


def _pipelined(_: int) -> Iterator[bytes]:
    while True:
        yield b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500


def _after_an_answer(_: int) -> Iterator[bytes]:
    """What follows a request that was refused: two hundred megabytes of its body."""
    yield _HEAD % b"/nothing" + b"Content-Length: 200000000\r\n\r\n"
    for _ in range(3_000):
        yield bytes(1 << 16)


def _expects(_: int) -> Iterator[bytes]:
    while True:
        yield _HEAD % _COMPLETIONS + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"


def _two_lengths(_: int) -> Iterator[bytes]:
    yield (
        _HEAD % _COMPLETIONS
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
    )
    raise ConnectionResetError


def _odd_heads(number: int) -> Iterator[bytes]:
    heads = (
        b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /metrics%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /metrics\x01 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"k" * 60_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x: y\r\n" * 9_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nx:  \x00\r\n\r\n",
        b"\r\n" * 30_000,
    )
    yield heads[number % len(heads)]
    raise ConnectionResetError


def _unread_page(_: int) -> Iterator[bytes]:
    for _ in range(200):
        yield b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100


def _by(count: int, says: Says, *, reads: bool = True) -> Attack:
    return lambda target, over: flood(target, over, "http", count, saying(says, reads=reads))


_ONE_BYTE_CHUNKS = b"1\r\na\r\n" * 4_000

ATTACKS: Mapping[str, Attack] = {
    "http1 chunks of one byte, 12 connections": _by(12, _forever(_CHUNKED % _COMPLETIONS, _ONE_BYTE_CHUNKS)),
    "http1 chunks of one byte, 80 connections": _by(80, _forever(_CHUNKED % _COMPLETIONS, _ONE_BYTE_CHUNKS)),
    "http1 chunks of one byte to nothing": _by(12, _forever(_CHUNKED % b"/nothing", _ONE_BYTE_CHUNKS)),
    "http1 chunk extensions": _by(4, _forever(_CHUNKED % _COMPLETIONS, b"1;" + b"e=f;" * 4_000 + b"\r\na\r\n")),
    "http1 endless trailers": _by(4, _forever(_CHUNKED % _COMPLETIONS + b"0\r\n", b"x: y\r\n" * 4_000)),
    "http1 a head line by line": _by(200, _slowly(b"GET /livez HTTP/1.1\r\n", b"x-%d: y\r\n")),
    "http1 a body byte by byte": _by(40, _slowly(_HEAD % _COMPLETIONS + b"Content-Length: 10000\r\n\r\n", b"%d")),
    "http1 bytes behind an answer": _by(12, _after_an_answer),
    "http1 pipelined requests": _by(12, _pipelined),
    "http1 pipelined and not read": _by(12, _unread_page, reads=False),
    "http1 Expect: 100-continue": _by(12, _expects),
    "http1 two lengths": _by(4, _two_lengths),
    "http1 heads, keys and paths": _by(14, _odd_heads),
    "http1 connections of one peer": lambda target, over: crowd(target, over, "http", 4_000, b""),
    "http1 connections of many peers": lambda target, over: crowd(target, over, "http", 4_000, b"", many_peers),
    "http1 half a head of many peers": lambda target, over: crowd(
        target, over, "http", 2_000, b"GET /livez HTTP/1.1\r\n", many_peers
    ),
}


def exchange(target: Target, head: bytes, body: bytes, over: threading.Event, wait_s: float = 20.0) -> str:
    """One request with its answer; returns the answer's status, "closed" or "left" when nobody waited for it."""
    with contextlib.closing(target.connect("http")) as connection:
        key = b"Authorization: Bearer %s\r\n" % target.key.encode() if target.key else b""
        lines = b"Content-Length: %d\r\nConnection: close\r\n" % len(body)
        connection.sendall(head + key + lines + b"\r\n" + body)
        connection.settimeout(0.2)
        said, waited = b"", 0.0
        while b"\r\n" not in said:
            try:
                got = connection.recv(1 << 16)
            except TimeoutError:
                waited += 0.2
                if over.is_set() or waited >= wait_s:
                    return "left"
                continue
            if not got:
                return "closed"
            said += got
        with contextlib.suppress(OSError):
            while connection.recv(1 << 16) and not over.is_set():
                pass
        return said.split(b" ", 2)[1].decode()
