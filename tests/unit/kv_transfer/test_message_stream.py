"""The stream of messages between two processes of a node, over a plain socket and over TLS."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from kv_transfer.mover.message_stream import MAX_FRAME, MAX_QUEUED, MessageStream, StreamEnded, StreamLost
from tests.support.tls_pair import tls_pair

WITHIN_S = 20.0
ENDS: list[End] = []
"""All ends of a test."""


class End:
    """One end of a stream and the thread that runs it."""

    def __init__(self, stream: socket.socket, start: bool = True) -> None:
        self.socket = stream
        self.stream = MessageStream(stream)
        self.received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.ended: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, daemon=True)
        ENDS.append(self)
        if start:
            self.thread.start()

    def _run(self) -> None:
        try:
            self.stream.run(self.received.put)
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def next(self) -> bytes:
        return self.received.get(timeout=WITHIN_S)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Nothing reads a socket any more when it is closed, since its number may be another's then."""
    yield
    for end in ENDS:
        with contextlib.suppress(OSError):
            end.socket.shutdown(socket.SHUT_RDWR)
    for end in ENDS:
        if end.thread.is_alive():
            end.thread.join(WITHIN_S)
        end.socket.close()
    ENDS.clear()


@pytest.fixture(params=["plain", "tls"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[socket.socket, socket.socket]:
    return tls_pair(tmp_path) if request.param == "tls" else socket.socketpair()


def test_messages_of_any_length_arrive_in_order_in_both_directions(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    """Both ends send more than the sockets hold, so neither may wait for the other to read."""
    ends = [End(each) for each in sockets]
    messages = [bytes([n % 251]) * size for n, size in enumerate([1, 2, 300_000, 5, 70_000, 3_000_000, 1] * 3)]
    for message in messages:
        for end in ends:
            end.stream.send(message)
    for end in ends:
        assert [end.next() for _ in messages] == messages


def test_messages_of_many_threads_arrive_whole(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = (End(each) for each in sockets)

    def send(n: int) -> None:
        for each in range(200):
            ours.stream.send(bytes([n]) * (each * 37 + 1))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    found = [theirs.next() for _ in range(800)]
    for n in range(4):
        assert [len(message) for message in found if message[0] == n] == [each * 37 + 1 for each in range(200)]
    assert all(set(message) == {message[0]} for message in found)


def test_a_message_is_sent_while_the_other_end_is_silent(sockets: tuple[socket.socket, socket.socket]) -> None:
    """The thread that waits for something to read is woken."""
    ours, theirs = (End(each) for each in sockets)
    for n in range(20):
        ours.stream.send(b"%d" % n)
        assert theirs.next() == b"%d" % n


def test_an_end_that_leaves_has_sent_everything_and_took_nothing_of_the_next(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = (End(each) for each in sockets)
    for generation in range(3):
        # More than the socket holds at once.
        ours.stream.send(bytes([generation]) * 5_000_000)
        ours.stream.leave()
        assert theirs.next() == bytes([generation]) * 5_000_000
        ours.ended.result(WITHIN_S)
        theirs.stream.send(b"first of %d" % (generation + 1))
        theirs.stream.send(b"x" * 100_000)
        ours = End(ours.socket)
        assert ours.next() == b"first of %d" % (generation + 1)
        assert len(ours.next()) == 100_000


def test_messages_that_tls_has_decrypted_together_are_all_received(tmp_path: Path) -> None:
    """The socket has nothing more to read then, so nothing would wake a thread that waits for it."""
    ours, theirs = tls_pair(tmp_path)
    end = End(ours)
    messages = [b"%d" % n for n in range(1000)]
    theirs.sendall(b"".join(len(message).to_bytes(4, "big") + message for message in messages))
    assert [end.next() for _ in messages] == messages
    theirs.close()


def test_the_end_of_the_stream_is_reported(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = (End(each) for each in sockets)
    theirs.socket.shutdown(socket.SHUT_RDWR)
    for end in (ours, theirs):
        with pytest.raises(StreamEnded):
            end.ended.result(WITHIN_S)
    ours.stream.send(b"to nobody")


def test_an_end_that_cuts_the_stream_ends_it_for_both(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = (End(each) for each in sockets)
    ours.stream.send(b"before")
    assert theirs.next() == b"before"
    ours.stream.cut()
    for end in (ours, theirs):
        with pytest.raises(StreamEnded):
            end.ended.result(WITHIN_S)
    assert theirs.received.empty()


def test_a_stream_is_cut_though_the_other_end_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    end.stream.send(bytes(MAX_FRAME))
    end.stream.cut()
    with pytest.raises(StreamEnded):
        end.ended.result(WITHIN_S)
    theirs.close()


@pytest.mark.parametrize("header", [(0).to_bytes(4, "big"), (MAX_FRAME + 1).to_bytes(4, "big"), b"GET "])
def test_a_length_out_of_bounds_ends_the_stream(header: bytes) -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    theirs.sendall(header)
    with pytest.raises(StreamLost, match="was announced"):
        end.ended.result(WITHIN_S)
    theirs.close()


def test_a_stream_that_ends_within_a_message_has_ended() -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    theirs.sendall((10).to_bytes(4, "big") + b"half")
    theirs.close()
    with pytest.raises(StreamEnded):
        end.ended.result(WITHIN_S)
    assert end.received.empty()


def test_what_is_too_long_or_is_never_read_is_refused() -> None:
    ours, theirs = socket.socketpair()
    stream = MessageStream(ours)
    with pytest.raises(StreamLost, match="longer than"):
        stream.send(bytes(MAX_FRAME + 1))
    message = bytes(MAX_FRAME - 4)
    for _ in range(MAX_QUEUED // MAX_FRAME):
        stream.send(message)
    with pytest.raises(StreamLost, match="does not read"):
        stream.send(message)
    ours.close()
    theirs.close()


def test_a_stream_that_never_runs_opens_nothing() -> None:
    ours, theirs = socket.socketpair()
    before = os.listdir("/proc/self/fd")
    stream = MessageStream(ours)
    stream.send(b"x")
    stream.cut()
    assert os.listdir("/proc/self/fd") == before
    ours.close()
    theirs.close()


def test_what_the_receiver_raises_ends_the_run() -> None:
    ours, theirs = (End(each, start=False) for each in socket.socketpair())
    theirs.thread.start()
    theirs.stream.send(b"x")

    def fail(frame: bytes) -> None:
        raise ZeroDivisionError(frame)

    with pytest.raises(ZeroDivisionError):
        ours.stream.run(fail)
