"""How many connections a process takes, in all, at each of its listeners and from each address. Pure accounting.

A connection costs its client nothing and the server a file descriptor and some kilobytes. A process that has no
descriptor left can neither open a file nor reach Redis or a node, so those who only connect must not get them all; nor
must one client get all that there are for clients.

A connection is silent while its peer is to speak and has asked for nothing so far. Clients are silent for the time that
it takes to answer a greeting; a crowd that only connects is so for ever, and what it takes of memory stays with the
process: CPython gives an arena of a mebibyte back only once nothing in it is in use. So silent connections have a limit
of their own, far below the others, and the longest silent one makes room for a new one. Whoever speaks soon is served.
"""

from __future__ import annotations

import enum
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_CONNECTIONS = 16_384
"""The most connections of one process, however many descriptors it may have: each takes some kilobytes, too."""
MAX_SILENT = 1024
"""The most silent ones of a process. A router accepts some thousands in a second at most, so that each has some tenths
of a second to ask for something, however many others come.
"""
_LEAST = 8


class Refusal(enum.Enum):
    """Which limit is reached; the value says so in a log."""

    PROCESS = "of this process"
    LISTENER = "at one port"
    PEER = "from one address at one port"
    SILENT = "of connections that have asked for nothing"
    """The longest silent one is closed for a new one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections there may be."""

    process: int
    listener: int
    peer: int
    """From one address at one listener. Many clients may come from one: behind a proxy, or on the same machine."""
    silent: int = MAX_SILENT
    """Connections of the process that have asked for nothing."""

    @classmethod
    def of_descriptors(cls, descriptors: int) -> Limits:
        """For a process that may have so many open. Half are for connections that others begin; the rest is for
        connections of its own, files, and what libraries open. No listener gets all of them, no address most of those.
        """
        process = max(_LEAST, min(MAX_CONNECTIONS, descriptors // 2))
        listener = process * 3 // 4
        return cls(process, listener, listener * 2 // 3, min(MAX_SILENT, max(1, process // 4)))

    @classmethod
    def of_this_process(cls) -> Limits:
        """From its limit of open files (RLIMIT_NOFILE)."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of_descriptors(MAX_CONNECTIONS * 2 if soft == resource.RLIM_INFINITY else soft)


class Place:
    """One connection's share of a limit. Give it back when the connection is gone."""

    __slots__ = ("_has_asked", "_limit", "_listener", "peer")

    def __init__(self, limit: ConnectionLimit, listener: str, peer: str) -> None:
        self._limit: ConnectionLimit | None = limit
        self._listener = listener
        self.peer = peer
        """The address that it comes from."""
        self._has_asked = False

    def waits_for_peer(self, close: Callable[[], None]) -> None:
        """The connection is silent from now on, as its peer is to speak; one on which something has been asked for is
        not. `close` ends the connection, and is called if another one needs the room.
        """
        if self._limit is not None and not self._has_asked:
            self._limit.add_silent(self, close)

    def waits_for_us(self) -> None:
        """The connection is not silent: its peer has spoken, and this process has not looked at it yet. Idempotent."""
        if self._limit is not None:
            self._limit.discard_silent(self)

    def asked(self) -> None:
        """The connection is never silent again: something was asked for on it. Idempotent."""
        self._has_asked = True
        self.waits_for_us()

    def release(self) -> None:
        """Idempotent."""
        limit, self._limit = self._limit, None
        if limit is not None:
            limit.discard_silent(self)
            limit.give_back(self._listener, self.peer)


class ConnectionLimit:
    """Counts the connections of one process. All its listeners share one."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Without limits: those of this process, as they are when the first connection comes."""
        self._limits = limits
        self._by_listener: Counter[str] = Counter()
        self._by_peer: Counter[tuple[str, str]] = Counter()
        self._silent: dict[Place, Callable[[], None]] = {}
        """The longest silent one first, with what ends it."""
        self.refused: Counter[tuple[str, Refusal]] = Counter()
        """By listener and limit, since the process began; of silent ones the listener is that of the new connection."""

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
        """A place for a connection from this address, or the limit that is in its way."""
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
        """The longest silent connection makes room for a new one at `listener`: returns what ends it, which the caller
        must call, or None while there are not too many.
        """
        if self.num_silent <= self.limits.silent:
            return None
        self.refused[listener, Refusal.SILENT] += 1
        return self._silent.pop(next(iter(self._silent)))

    def add_silent(self, place: Place, close: Callable[[], None]) -> None:
        """For `Place`."""
        self._silent[place] = close

    def discard_silent(self, place: Place) -> None:
        """For `Place`."""
        self._silent.pop(place, None)

    def give_back(self, listener: str, peer: str) -> None:
        """For `Place`."""
        self._by_listener[listener] -= 1
        self._by_peer[listener, peer] -= 1
        if not self._by_peer[listener, peer]:
            del self._by_peer[listener, peer]
