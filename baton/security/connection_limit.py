"""Limits of the connections that a process accepts: in total, at each listener, and from each address. Does no I/O.

A connection costs its client nothing, but the server a file descriptor and some kilobytes of memory. A process without
free descriptors can neither open a file nor connect to Redis or to a node. Therefore clients together must not get all
descriptors, and one client must not get all those that are meant for clients.

A connection is *silent* while the server waits for its peer's first request. An honest client is silent for one round
trip. An attacker who only connects is silent for ever, and the memory that the connections took stays with the process,
because CPython returns an arena of one mebibyte only when nothing in it is in use. Silent connections therefore have a
much lower limit of their own, and the connection that has been silent longest is closed when a new one needs its place.
"""

from __future__ import annotations

import enum
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_CONNECTIONS = 16_384
"""Limit of the connections of one process, even if it may have more descriptors: each takes some kilobytes of memory.
"""
MAX_SILENT = 1024
"""Limit of the silent connections of a process. A router accepts at most some thousands of connections per second, so
that each has some tenths of a second for its first request, however many others come.
"""
_LEAST = 8
"""A process accepts at least this many connections, however few descriptors it may have."""


class Refusal(enum.Enum):
    """The limit that refuses a connection. The value is its description in logs."""

    PROCESS = "of this process"
    LISTENER = "at one port"
    PEER = "from one address at one port"
    SILENT = "of connections without a request"
    """The connection that has been silent longest is closed for a new one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one process."""

    process: int
    listener: int
    peer: int
    """Connections from one address at one listener. Many clients may share an address: behind a proxy, or on one
    machine."""
    silent: int = MAX_SILENT
    """Silent connections of the process."""

    @classmethod
    def of_descriptors(cls, descriptors: int) -> Limits:
        """The limits of a process that may open this many descriptors.

        Half of the descriptors are for incoming connections; the rest is for outgoing connections, files and libraries.
        One listener gets at most three quarters of that half, and one address at most two thirds of a listener's.
        """
        process = max(_LEAST, min(MAX_CONNECTIONS, descriptors // 2))
        listener = process * 3 // 4
        return cls(process, listener, listener * 2 // 3, min(MAX_SILENT, max(1, process // 4)))

    @classmethod
    def of_this_process(cls) -> Limits:
        """The limits for this process's number of open files (RLIMIT_NOFILE)."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of_descriptors(MAX_CONNECTIONS * 2 if soft == resource.RLIM_INFINITY else soft)


class Place:
    """One connection's place within the limits. `release` it when the connection is closed."""

    __slots__ = ("_has_asked", "_limit", "_listener", "peer")

    def __init__(self, limit: ConnectionLimit, listener: str, peer: str) -> None:
        self._limit: ConnectionLimit | None = limit
        self._listener = listener
        self.peer = peer
        """The address of the connection's peer."""
        self._has_asked = False

    def waits_for_peer(self, close: Callable[[], None]) -> None:
        """Count the connection as silent until its peer speaks, unless a request has arrived on it before.

        `close` is called to end the connection if another one needs its place.
        """
        if self._limit is not None and not self._has_asked:
            self._limit.add_silent(self, close)

    def waits_for_us(self) -> None:
        """Count the connection as not silent: its peer has sent something that is not read yet. Idempotent."""
        if self._limit is not None:
            self._limit.discard_silent(self)

    def asked(self) -> None:
        """Note that a request has arrived: the connection does not count as silent any more. Idempotent."""
        self._has_asked = True
        self.waits_for_us()

    def release(self) -> None:
        """Give the place back. Idempotent."""
        limit, self._limit = self._limit, None
        if limit is not None:
            limit.discard_silent(self)
            limit.give_back(self._listener, self.peer)


class ConnectionLimit:
    """Counts the connections of one process. All listeners of the process share one instance."""

    def __init__(self, limits: Limits | None = None) -> None:
        """`limits`: None takes `Limits.of_this_process` when the first connection comes."""
        self._limits = limits
        self._by_listener: Counter[str] = Counter()
        self._by_peer: Counter[tuple[str, str]] = Counter()
        self._silent: dict[Place, Callable[[], None]] = {}
        """The silent connections, the longest silent one first, each with the function that closes it."""
        self.refused: Counter[tuple[str, Refusal]] = Counter()
        """Refused and closed connections since the process started, by listener and limit. A silent connection that was
        closed counts for the listener of the new connection."""

    @property
    def limits(self) -> Limits:
        if self._limits is None:
            self._limits = Limits.of_this_process()
        return self._limits

    @property
    def num_open(self) -> int:
        return self._by_listener.total()

    @property
    def num_silent(self) -> int:
        return len(self._silent)

    def take(self, listener: str, peer: str) -> Place | Refusal:
        """A place for a connection from this address, or the limit that refuses it."""
        limits, refusal = self.limits, None
        if self._by_peer[listener, peer] >= limits.peer:
            refusal = Refusal.PEER
        elif self._by_listener[listener] >= limits.listener:
            refusal = Refusal.LISTENER
        elif self.num_open >= limits.process:
            refusal = Refusal.PROCESS
        if refusal is not None:
            self.refused[listener, refusal] += 1
            return refusal
        self._by_listener[listener] += 1
        self._by_peer[listener, peer] += 1
        return Place(self, listener, peer)

    def pop_crowded_out(self, listener: str) -> Callable[[], None] | None:
        """Remove the longest silent connection if there are too many, for a new one at `listener`.

        Returns the function that closes it, which the caller must call; None while there are not too many.
        """
        if self.num_silent <= self.limits.silent:
            return None
        self.refused[listener, Refusal.SILENT] += 1
        return self._silent.pop(next(iter(self._silent)))

    def add_silent(self, place: Place, close: Callable[[], None]) -> None:
        """Called by `Place.waits_for_peer`."""
        self._silent[place] = close

    def discard_silent(self, place: Place) -> None:
        """Called by `Place`."""
        self._silent.pop(place, None)

    def give_back(self, listener: str, peer: str) -> None:
        """Called by `Place.release`."""
        self._by_listener[listener] -= 1
        self._by_peer[listener, peer] -= 1
        if not self._by_peer[listener, peer]:
            del self._by_peer[listener, peer]
