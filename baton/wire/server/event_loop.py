"""The event loop of processes that serve gRPC."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import traceback
from collections.abc import Callable
from typing import Any

from baton.observe.loop_probe import ProbedEventLoop

_log = logging.getLogger(__name__)


class RpcEventLoop(ProbedEventLoop):
    """An event loop that stays fast when grpc.aio wakes it often.

    grpc.aio receives events on a thread of its own, which puts each into a queue and writes one byte to a socket to
    wake the loop. When the socket is readable, grpc.aio reads one byte but takes all events. With more than one event
    per turn the bytes accumulate. Each is then a turn without work, and when the socket is full (at 278 bytes) the
    thread blocks in its write, and all streams of the process with it. This loop therefore reads all bytes but one
    before it calls grpc.aio.
    """

    has_recognised_grpc = False
    """Whether grpc.aio's reader was recognised. It is recognised by its name, which another version may change."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Register a reader as asyncio does, with a wrapper around grpc.aio's."""
        if isinstance(fd, socket.socket) and "cygrpc" in repr(callback):
            self.has_recognised_grpc = True
            super().add_reader(fd, _drain_and_call, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error as asyncio does, unless asyncio caused it by calling `connection_lost` twice."""
        if _was_lost_twice(context.get("exception")):
            _log.debug("asyncio called connection_lost twice on one connection")
        else:
            super().call_exception_handler(context)


def _was_lost_twice(error: object) -> bool:
    """Whether the error comes from a transport that called `connection_lost` a second time, after it was cleaned up.

    That happens when a protocol, such as that of TLS, closes the transport in `resume_writing` (python/cpython#156512).
    The first call has done everything that was necessary.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if isinstance(error, AttributeError) else []
    if not frames or frames[-1].f_code.co_name != "_call_connection_lost":
        return False
    transport = frames[-1].f_locals.get("self")
    return isinstance(transport, asyncio.Transport) and getattr(transport, "_sock", transport) is None


def warn_if_unrecognised(loop: asyncio.AbstractEventLoop) -> None:
    """Log a warning if grpc.aio's reader was not recognised.

    To be called after a gRPC server was started on the loop.
    """
    if not (isinstance(loop, RpcEventLoop) and loop.has_recognised_grpc):
        _log.warning("the event loop does not recognise this version of grpcio: the process will be slower under load")


def _drain_and_call(woken: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Read all bytes but one from the socket, then call grpc.aio's reader."""
    # The thread queues an event before it writes the byte, so that all events of these bytes are already queued.
    (waiting,) = struct.unpack("i", fcntl.ioctl(woken, termios.FIONREAD, b"\0\0\0\0"))
    if waiting > 1:
        woken.recv(waiting - 1)
    callback(*args)
