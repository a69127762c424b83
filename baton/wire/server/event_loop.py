"""The event loop of a process that lives from gRPC."""

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
    """An event loop that gRPC can wake often.

    grpc.aio learns of events on a thread of its own, which leaves each in a queue and writes one byte to a socket to
    wake the loop. Each time the socket is readable, grpc.aio takes one byte, but all events. With more than one event
    a turn the bytes pile up: at first they are turns for nothing, and once the socket is full (at 278 bytes) the thread
    waits in its write, and with it every stream of the process. So here all bytes but one are taken before gRPC looks.
    """

    knows_grpc = False
    """gRPC's reader was recognised. Nothing but its name gives it away, and that is for another version to change."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As in asyncio."""
        if isinstance(fd, socket.socket) and "cygrpc" in repr(callback):
            self.knows_grpc = True
            super().add_reader(fd, _after_all_but_one, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tell of an error as asyncio does, unless asyncio itself caused it by ending a connection twice."""
        if _was_lost_twice(context.get("exception")):
            _log.debug("asyncio told a connection of its end twice")
        else:
            super().call_exception_handler(context)


def _was_lost_twice(error: object) -> bool:
    """Whether a transport called `connection_lost` a second time, after it had let go of everything.

    It does where its protocol ends it from `resume_writing`, as that of TLS may (python/cpython#156512). The first
    call has done all there was to do.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if isinstance(error, AttributeError) else []
    if not frames or frames[-1].f_code.co_name != "_call_connection_lost":
        return False
    transport = frames[-1].f_locals.get("self")
    return isinstance(transport, asyncio.Transport) and getattr(transport, "_sock", transport) is None


def warn_if_unrecognised(loop: asyncio.AbstractEventLoop) -> None:
    """To be called once a gRPC server has been started on the loop: says in the log if it wakes it in the slow way."""
    if not (isinstance(loop, RpcEventLoop) and loop.knows_grpc):
        _log.warning("gRPC's wake-ups are not recognised: under load this process will be slower than it could be")


def _after_all_but_one(woken: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    # Whoever wrote a byte had left its event before: none that belongs to these bytes can be missed.
    (waiting,) = struct.unpack("i", fcntl.ioctl(woken, termios.FIONREAD, b"\0\0\0\0"))
    if waiting > 1:
        woken.recv(waiting - 1)
    callback(*args)
