"""Accepts the connections of a listening socket, within limits, and logs in one line why it can't accept more.

It replaces asyncio's own accept loop. In a process without free descriptors that loop tries as often as the backlog is
long, writes a traceback each time, and begins again a second later: that was 157,606 tracebacks in eight seconds, and a
full disk."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import traceback
from asyncio import selector_events, sslproto
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from baton.observe.log_limit import LimitedLog
from baton.security.connection_limit import ConnectionLimit, Place, Refusal

_log = logging.getLogger(__name__)

BACKLOG = 2048
"""The most connections that wait in the kernel, where they take no descriptor of this process."""
ACCEPTED_AT_ONCE = 32
"""The most connections that are accepted in one turn of the event loop."""
UNHEARD_AT_ONCE = 64
"""While more connections than this have sent something that is not handled yet, one new connection is accepted in a
turn, and the others wait in the kernel. If connections were accepted faster than they are handled, they would pile up
here, each with what it has sent."""
PAUSE_S = 1.0
"""How long nothing is accepted after the process ran out of descriptors or memory."""
HANDSHAKE_S = 10.0
"""How long a TLS handshake may take; until it is done nobody knows who the client is."""
HANDSHAKES_AT_ONCE = 4
"""The most TLS handshakes that begin in one turn of the event loop: each needs a signature, which takes half a
millisecond or more."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER by which closing resets the connection, so that a refused connection leaves nothing behind."""
_SocketTransport: Any = vars(selector_events)["_SelectorSocketTransport"]
_connection_lost = _SocketTransport._call_connection_lost


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at this address (port 0: a free port; no host: all addresses); raises OSError.

    It listens at once, because two sockets can be bound to one port as long as neither listens.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


# asyncio gives each TLS connection a buffer of 256 KiB to read into, so that a thousand connections of a stranger take
# 256 MB before one of them has sent anything. A TLS record has at most 16 KiB (RFC 8446, 5.1).
sslproto.SSLProtocol.max_size = 32 << 10


def _call_connection_lost(transport: Any, error: Exception | None) -> None:
    """Ends a transport as asyncio does, and cuts the cycle that asyncio leaves: the transport keeps its own bound
    method that reads. Python 3.12 cuts it where a connection is closed, though not where it is aborted. Each cycle is
    1.3 kB until the garbage collector finds it.
    """
    try:
        _connection_lost(transport, error)
    finally:
        transport._read_ready_cb = None


_SocketTransport._call_connection_lost = _call_connection_lost


class Listener:
    """Accepts connections at one port. Belongs to the running event loop, and does not close the listening socket."""

    def __init__(
        self,
        name: str,
        listening: socket.socket,
        protocol: Callable[[Place], asyncio.BaseProtocol],
        limit: ConnectionLimit,
        tls: ssl.SSLContext | None = None,
        num_unheard: Callable[[], int] = lambda: 0,
    ) -> None:
        """`name` is the port's name in logs; no other listener of the process may have it. `listening` comes from
        `listening_socket`. A protocol calls its `Place` when a request comes, and releases it when its connection is
        lost. `num_unheard` counts connections of the process that have sent something that is not handled yet.
        """
        self._name = name
        self._listening = listening
        self._protocol = protocol
        self._limit = limit
        self._tls = tls
        self._num_unheard = num_unheard
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting: deque[asyncio.Future[None]] = deque()
        """Connections that have sent something and wait until their handshake may begin."""
        self._pause: asyncio.TimerHandle | None = None
        self._is_open = False
        self._full = LimitedLog(_log)
        self._crowded = LimitedLog(_log)
        self._failing = LimitedLog(_log)

    def start(self) -> None:
        """Accept from now on."""
        self._is_open = True
        self._go_on()

    def stop(self) -> None:
        """Accept no more, and drop connections in the middle of their handshakes. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._listening)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the end of what `close` dropped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        # At least one is accepted: a flood may last for ever, and a new client must be heard during it.
        num_unheard = self._num_unheard() + len(self._greeting)
        for _ in range(ACCEPTED_AT_ONCE if num_unheard <= UNHEARD_AT_ONCE else 1):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._wait(error)
                return
            self._failing.is_over("the port %s accepts connections again", self._name)
            self._take(accepted, address[0] if isinstance(address, tuple) else "")

    def _wait(self, error: OSError) -> None:
        """The process is out of descriptors or memory: connections go on waiting in the kernel for PAUSE_S."""
        self._failing.happened(
            "the port %s can't accept connections (%s): those who connect wait until others leave; a higher limit of"
            " open files (ulimit -n) allows more",
            self._name,
            error,
        )
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(PAUSE_S, self._go_on)

    def _take(self, accepted: socket.socket, peer: str) -> None:
        place = self._limit.take(self._name, peer)
        if isinstance(place, Refusal):
            limits = self._limit.limits
            self._full.happened(
                "the port %s closes new connections, like one from %s: the limit %s is reached (%d in all, %d at one"
                " port, %d from one address at one port; half of `ulimit -n` is the first of them)",
                self._name,
                peer,
                place.value,
                limits.process,
                limits.listener,
                limits.peer,
            )
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            accepted.close()
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._connect(accepted, place), name=f"accept-{self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._waits_for_peer(accepted, place)

    def _waits_for_peer(self, accepted: socket.socket, place: Place) -> None:
        place.waits_for_peer(partial(_end, accepted))
        close_silent = self._limit.pop_crowded_out(self._name)
        if close_silent is not None:
            self._crowded.happened(
                "the port %s has new connections, like one from %s, and the limit %s is reached (%d): the longest"
                " silent one is closed for each",
                self._name,
                place.peer,
                Refusal.SILENT.value,
                self._limit.limits.silent,
            )
            close_silent()

    async def _connect(self, accepted: socket.socket, place: Place) -> None:
        try:
            if self._tls is not None:
                await self._wait_for_handshake(accepted, place)
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(place),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls is not None else None,
            )
        except BaseException as error:
            # The protocol has not got the connection, so it will not release the place either.
            place.release()
            accepted.close()
            if not isinstance(error, Exception):
                raise
            _log.debug("a connection to the port %s failed in its handshake: %s", self._name, str(error))
            # The error keeps asyncio's frames, and those keep the error. Without this, the cycle would keep TLS buffers
            # until the garbage collector finds it.
            traceback.clear_frames(error.__traceback__)

    async def _wait_for_handshake(self, accepted: socket.socket, place: Place) -> None:
        """Wait until the client has sent something, then until its handshake may begin: a crowd of clients that begin
        at one moment must not hold up the others.
        """
        begun = self._loop.create_future()
        self._loop.add_reader(accepted, _done, begun)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await begun
        finally:
            self._loop.remove_reader(accepted)
        place.waits_for_us()
        turn = self._loop.create_future()
        self._greeting.append(turn)
        if len(self._greeting) == 1:
            self._loop.call_soon(self._begin_some_handshakes)
        await turn
        self._waits_for_peer(accepted, place)

    def _begin_some_handshakes(self) -> None:
        for _ in range(min(HANDSHAKES_AT_ONCE, len(self._greeting))):
            _done(self._greeting.popleft())
        if self._greeting:
            self._loop.call_soon(self._begin_some_handshakes)


def _end(accepted: socket.socket) -> None:
    """Shut a connection down: the handshake or transport that reads from the socket finds its end and closes it."""
    with suppress(OSError):  # the socket is closed already, or its peer has left
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        accepted.shutdown(socket.SHUT_RDWR)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def close_transport(transport: asyncio.Transport) -> None:
    """Close the transport, so that its connection ends even if reading was paused when the peer closed it.

    asyncio's TLS transport handles the end of the stream only while reading is not paused, and after that end `close`
    does nothing (`SSLProtocol._start_shutdown`): without `resume_reading` the socket would stay open for ever.
    """
    transport.close()
    transport.resume_reading()
