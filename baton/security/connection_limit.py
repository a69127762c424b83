"""How many connections a process takes, in all, at each of its listeners and from each address. Pure accounting.

A connection costs its client nothing and the server a file descriptor. A process that has none left can neither open a
file nor reach Redis or a node, so those who only connect must not get them all; nor must one client get all that there
are for clients.
"""

from __future__ import annotations

import enum
import resource
from collections import Counter
from dataclasses import dataclass

MAX_CONNECTIONS = 16_384
"""The most connections of one process, however many descriptors it may have: each takes some kilobytes, too."""
_LEAST = 8


class Refusal(enum.Enum):
    """Which limit is reached; the value says so in a log."""

    PROCESS = "of this process"
    LISTENER = "at one port"
    PEER = "from one address at one port"


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections there may be."""

    process: int
    listener: int
    peer: int
    """From one address at one listener. Many clients may come from one: behind a proxy, or on the same machine."""

    @classmethod
    def of_descriptors(cls, descriptors: int) -> Limits:
        """For a process that may have so many open. Half are for connections that others begin; the rest is for
        connections of its own, files, and what libraries open. No listener gets all of them, no address most of those.
        """
        process = max(_LEAST, min(MAX_CONNECTIONS, descriptors // 2))
        listener = process * 3 // 4
        return cls(process, listener, listener * 2 // 3)

    @classmethod
    def of_this_process(cls) -> Limits:
        """From its limit of open files (RLIMIT_NOFILE)."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of_descriptors(MAX_CONNECTIONS * 2 if soft == resource.RLIM_INFINITY else soft)


class Place:
    """One connection's share of a limit. Give it back when the connection is gone."""

    __slots__ = ("_limit", "_listener", "_peer")

    def __init__(self, limit: ConnectionLimit, listener: str, peer: str) -> None:
        self._limit: ConnectionLimit | None = limit
        self._listener = listener
        self._peer = peer

    def release(self) -> None:
        """Idempotent."""
        limit, self._limit = self._limit, None
        if limit is not None:
            limit.give_back(self._listener, self._peer)


class ConnectionLimit:
    """Counts the connections of one process. All its listeners share one."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Without limits: those of this process, as they are when the first connection comes."""
        self._limits = limits
        self._by_listener: Counter[str] = Counter()
        self._by_peer: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, Refusal]] = Counter()
        """By listener and limit, since the process began."""

    @property
    def limits(self) -> Limits:
        if self._limits is None:
            self._limits = Limits.of_this_process()
        return self._limits

    @property
    def num_open(self) -> int:
        return self._by_listener.total()

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

    def give_back(self, listener: str, peer: str) -> None:
        """For `Place`."""
        self._by_listener[listener] -= 1
        self._by_peer[listener, peer] -= 1
        if not self._by_peer[listener, peer]:
            del self._by_peer[listener, peer]
