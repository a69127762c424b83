"""Accepts the connections of a listening socket, within limits, and says in one line what it can't accept.

It takes the place of asyncio's own loop of accepting, which on a process without free descriptors tries as often as the
backlog is long, writes a traceback each time, and begins again a second later: 157,606 of them in eight seconds, and a
full disk.
"""

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
"""Connections that wait in the kernel, where they take no descriptor of this process."""
ACCEPTED_AT_ONCE = 32
"""In one turn of the loop."""
UNHEARD_AT_ONCE = 64
"""While more connections than that wait to be heard one new one is accepted in a turn; the others wait in the kernel:
taken faster than they are heard they would pile up here, each with what it has sent, to as many as may be open."""
PAUSE_S = 1.0
"""After the kernel had no connection to give: it will not have one in the next turn either."""
HANDSHAKE_S = 10.0
"""For TLS: until then nobody knows who is there."""
HANDSHAKES_AT_ONCE = 4
"""Handshakes that begin in one turn of the loop: each is a signature, half a millisecond's work or more."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: to close is to reset, so that a refused connection leaves nothing behind."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there (port 0: on a free one; no host: on every address); raises OSError.

    It listens at once: two may be bound to one port as long as neither listens.
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


# asyncio gives each TLS connection a buffer of 256 KiB to read into: a thousand of a stranger's take 256 MB before one
# of them has said anything. A TLS record has at most 16 KiB (RFC 8446, 5.1).
sslproto.SSLProtocol.max_size = 32 << 10

_SocketTransport: Any = vars(selector_events)["_SelectorSocketTransport"]
_connection_lost = _SocketTransport._call_connection_lost


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
    """One port. Belongs to the running loop; it does not close the socket that it was given."""

    def __init__(
        self,
        name: str,
        listening: socket.socket,
        protocol: Callable[[Place], asyncio.BaseProtocol],
        limit: ConnectionLimit,
        tls: ssl.SSLContext | None = None,
        num_unheard: Callable[[], int] = lambda: 0,
    ) -> None:
        """`name` is what logs call it, and no other listener of the process has it. `listening`: from
        `listening_socket`. The protocol tells its place when something is asked for, and gives it back when its
        connection is lost. `num_unheard`: connections of the process that have said what nobody has had the time to
        look at.
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
        """Connections that have sent something and wait for their handshake's turn."""
        self._pause: asyncio.TimerHandle | None = None
        self._is_open = False
        self._full = LimitedLog(_log)
        self._crowded = LimitedLog(_log)
        self._failing = LimitedLog(_log)

    def start(self) -> None:
        """Accept from now on."""
        self._is_open = True
        self._go_on()

    def close(self) -> None:
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
        # Never none: who floods may be many for ever, and whoever is new is heard before those.
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
        """Out of descriptors or of memory: whoever waits in the kernel goes on waiting."""
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
                await self._may_shake_hands(accepted, place)
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(place),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls is not None else None,
            )
        except BaseException as error:
            # Its protocol has heard of no connection, and so of no end of one.
            place.release()
            accepted.close()
            if not isinstance(error, Exception):
                raise
            _log.debug("a connection to the port %s failed in its handshake: %s", self._name, str(error))
            # asyncio's frames keep the future that keeps the error that keeps them, and TLS's buffers until that is
            # collected.
            traceback.clear_frames(error.__traceback__)

    async def _may_shake_hands(self, accepted: socket.socket, place: Place) -> None:
        """Wait until the client has begun, and then for a turn: a crowd that begins at one moment holds nobody up."""
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
            self._loop.call_soon(self._let_some)
        await turn
        self._waits_for_peer(accepted, place)

    def _let_some(self) -> None:
        for _ in range(min(HANDSHAKES_AT_ONCE, len(self._greeting))):
            _done(self._greeting.popleft())
        if self._greeting:
            self._loop.call_soon(self._let_some)


def _end(accepted: socket.socket) -> None:
    """Ends a connection: the handshake or transport that reads from the socket finds its end there, and closes it."""
    with suppress(OSError):  # it is closed already, or its peer has left
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        accepted.shutdown(socket.SHUT_RDWR)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
