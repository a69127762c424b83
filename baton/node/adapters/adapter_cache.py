"""The adapters in memory: which are loaded, which are evicted, and which requests wait for one.

Pure: events in, effects out, no I/O (`baton.node.driver` carries the effects out, on the engine's thread).
The rules:

1. An adapter is loaded when the first request with it comes, and stays in memory while any request uses it.
2. At most `most` adapters are in memory, those that are being loaded included. When one more is wanted, the one that
   was wanted least recently and is not in use is evicted. While all are in use, the requests wait.
3. At most MAX_LOADING are loaded at a time, the one that was wanted first before others. A load can't be cancelled: one
   that takes more than WAIT_S fails the requests that wait for it, and those that come before it has ended. It holds up
   no other load, but keeps its room in memory.
4. No request waits longer than WAIT_S for its adapter, whatever the adapter waits for.
5. A failed load fails its requests alone. The next request with the adapter tries again.
6. An adapter that no router wants any more leaves memory once no request uses it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.machine import Machine

MAX_LOADING = 2
WAIT_S = 60.0
"""After so many seconds a request that waits for its adapter fails."""


class AdapterState(enum.Enum):
    """Where an adapter is that requests have wanted."""

    QUEUED = enum.auto()
    """Requests wait for it, and it waits for its turn or for room."""
    LOADING = enum.auto()
    OVERDUE = enum.auto()
    """The adapter has been loading for too long, and the requests that waited for it have failed."""
    LOADED = enum.auto()
    UNLOADING = enum.auto()
    """The adapter is taken out of memory as soon as the steps that may name it are over."""
    GONE = enum.auto()
    """The adapter is not in memory, and nobody waits for it."""


class AdapterEvent(enum.Enum):
    """What happens to an adapter in memory."""

    BEGUN = enum.auto()
    ABANDONED = enum.auto()
    """No request waits for it any more."""
    LOADED = enum.auto()
    FAILED = enum.auto()
    TOOK_TOO_LONG = enum.auto()
    EVICTED = enum.auto()
    UNLOADED = enum.auto()
    UNLOADED_AND_WANTED = enum.auto()
    """The adapter is out of memory, and requests have come for it meanwhile."""


ADAPTER_TABLE = {
    (AdapterState.QUEUED, AdapterEvent.BEGUN): AdapterState.LOADING,
    (AdapterState.QUEUED, AdapterEvent.ABANDONED): AdapterState.GONE,
    (AdapterState.LOADING, AdapterEvent.LOADED): AdapterState.LOADED,
    (AdapterState.LOADING, AdapterEvent.FAILED): AdapterState.GONE,
    (AdapterState.LOADING, AdapterEvent.TOOK_TOO_LONG): AdapterState.OVERDUE,
    (AdapterState.OVERDUE, AdapterEvent.LOADED): AdapterState.LOADED,
    (AdapterState.OVERDUE, AdapterEvent.FAILED): AdapterState.GONE,
    (AdapterState.LOADED, AdapterEvent.EVICTED): AdapterState.UNLOADING,
    (AdapterState.UNLOADING, AdapterEvent.UNLOADED): AdapterState.GONE,
    (AdapterState.UNLOADING, AdapterEvent.UNLOADED_AND_WANTED): AdapterState.QUEUED,
}
_IN_MEMORY = frozenset((AdapterState.LOADING, AdapterState.OVERDUE, AdapterState.LOADED, AdapterState.UNLOADING))
_BEING_LOADED = frozenset((AdapterState.LOADING, AdapterState.OVERDUE))


@dataclass(frozen=True, slots=True)
class AdapterFault:
    """Why an adapter can't be used."""

    reason: str
    may_pass: bool = False
    """Whether its files are not at fault, but memory, a file system or a limit of this process: it may work later."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Effect: read the adapter into memory; `loaded` or `failed` follows."""

    digest: str
    directory: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Effect: take the adapter out of memory, once no step that was begun may name it; `unloaded` follows."""

    digest: str


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """Effect: these requests may run."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class AdapterFailed:
    """Effect: these requests can't be computed here."""

    request_ids: Sequence[str]
    reason: str


CacheEffect = LoadAdapter | UnloadAdapter | AdapterReady | AdapterFailed


@dataclass(frozen=True, slots=True)
class AdapterNews:
    """The adapters in memory, and those whose load has failed since the last news."""

    loaded: Set[str]
    faults: Mapping[str, AdapterFault]
    """What was wrong with the adapters whose load has failed, by digest."""
    num_loads: int = 0
    """How many adapters were loaded since the engine's start; one that was evicted counts again."""


@dataclass(slots=True)
class _Entry:
    machine: Machine[AdapterState, AdapterEvent]
    directory: str
    waiting: dict[str, float] = field(default_factory=dict)
    """Until when each request waits for it, by id, in the order of their arrival."""
    overdue_at: float = math.inf
    """When its load takes too long."""

    @property
    def state(self) -> AdapterState:
        return self.machine.state

    @property
    def deadline(self) -> float:
        """When something is to be given up."""
        load = self.overdue_at if self.state is AdapterState.LOADING else math.inf
        return min(load, next(iter(self.waiting.values()), math.inf))

    def take_late(self, now: float) -> tuple[str, ...]:
        """Remove and return the requests that have waited for too long."""
        late = tuple(request_id for request_id, until in self.waiting.items() if until <= now)
        for request_id in late:
            del self.waiting[request_id]
        return late

    def take_waiting(self) -> tuple[str, ...]:
        waiting = tuple(self.waiting)
        self.waiting.clear()
        return waiting


class AdapterCache:
    """The adapters of one engine. Called from one thread."""

    def __init__(self, most: int, clock: Clock) -> None:
        """`most`: how many adapters may be in memory."""
        self._most = most
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        """All that are not gone, by digest; the one that was wanted least recently comes first."""
        self._deadline: float | None = math.inf
        """The result of `deadline`, which is asked for in each step; None: it may have changed."""
        self._wanted: Set[str] | None = None
        """The adapters that routers want; None: no router has said so yet."""

    @property
    def loaded(self) -> frozenset[str]:
        """The digests of the adapters that requests may use at once."""
        return frozenset(digest for digest, entry in self._entries.items() if entry.state is AdapterState.LOADED)

    @property
    def in_memory(self) -> frozenset[str]:
        """The digests of all adapters that may take memory now."""
        return frozenset(digest for digest, entry in self._entries.items() if entry.state in _IN_MEMORY)

    @property
    def deadline(self) -> float:
        """When `expire` is to be called next, on the clock's monotonic time; infinite: not at all."""
        if self._deadline is None:
            self._deadline = min((entry.deadline for entry in self._entries.values()), default=math.inf)
        return self._deadline

    @property
    def needs_turn(self) -> bool:
        """Whether `turn` may decide something."""
        wanted = self._wanted
        return any(
            entry.state is AdapterState.QUEUED
            or (wanted is not None and entry.state is AdapterState.LOADED and digest not in wanted)
            for digest, entry in self._entries.items()
        )

    def want(self, request_id: str, digest: str, directory: str) -> Sequence[CacheEffect]:
        """A request with this adapter has come. `turn` is to be called next."""
        self._deadline = None
        entry = self._entries.get(digest)
        if entry is None:
            entry = _Entry(Machine(f"adapter {digest:.12}", AdapterState.QUEUED, ADAPTER_TABLE), directory)
            self._entries[digest] = entry
        elif entry.state is not AdapterState.QUEUED:
            # One that is queued keeps its turn.
            self._entries[digest] = self._entries.pop(digest)
        if entry.state is AdapterState.LOADED:
            return [AdapterReady((request_id,))]
        if entry.state is AdapterState.OVERDUE:
            return [AdapterFailed((request_id,), _TOO_LONG)]
        if entry.state is AdapterState.QUEUED:
            # The newest directory is the one where its files are now.
            entry.directory = directory
        entry.waiting[request_id] = self._clock.monotonic() + WAIT_S
        return ()

    def keep_only(self, wanted: Set[str]) -> None:
        """Take the adapters that routers want. `turn` is to be called next."""
        self._wanted = wanted

    def turn(self, in_use: Set[str]) -> Sequence[CacheEffect]:
        """Begin the loads that may begin, and evict what has to make room. `in_use`: adapters of all live requests."""
        self._deadline = None
        effects: list[CacheEffect] = []
        for digest, entry in list(self._entries.items()):
            if digest in in_use:
                continue
            if entry.state is AdapterState.QUEUED:
                self._feed(digest, AdapterEvent.ABANDONED)
            elif entry.state is AdapterState.LOADED and self._wanted is not None and digest not in self._wanted:
                effects.append(self._evict(digest))
        for digest, entry in list(self._entries.items()):
            if entry.state is AdapterState.QUEUED and self._num({AdapterState.LOADING}) < MAX_LOADING:
                if self._num(_IN_MEMORY) >= self._most:
                    effects += self._make_room(in_use)
                    break
                self._feed(digest, AdapterEvent.BEGUN)
                entry.overdue_at = self._clock.monotonic() + WAIT_S
                effects.append(LoadAdapter(digest, entry.directory))
        return effects

    def load_ended(self, digest: str, refusal: str = "") -> Sequence[CacheEffect]:
        """A load has ended; `refusal`: why it failed."""
        self._deadline = None
        entry = self._entries.get(digest)
        if entry is None or entry.state not in _BEING_LOADED:
            return ()
        waiting = entry.take_waiting()
        self._feed(digest, AdapterEvent.FAILED if refusal else AdapterEvent.LOADED)
        if not waiting:
            return ()
        return [AdapterFailed(waiting, refusal) if refusal else AdapterReady(waiting)]

    def expire(self) -> Sequence[CacheEffect]:
        """Give up what has taken too long. `turn` is to be called next."""
        self._deadline = None
        now, effects = self._clock.monotonic(), []
        for digest, entry in list(self._entries.items()):
            if entry.state is AdapterState.LOADING and entry.overdue_at <= now:
                self._feed(digest, AdapterEvent.TOOK_TOO_LONG)
                effects.append(AdapterFailed(entry.take_waiting(), _TOO_LONG))
            elif late := entry.take_late(now):
                effects.append(AdapterFailed(late, _NO_ROOM if entry.state is AdapterState.QUEUED else _TOO_LONG))
                if entry.state is AdapterState.QUEUED and not entry.waiting:
                    self._feed(digest, AdapterEvent.ABANDONED)
        return effects

    def unloaded(self, digest: str) -> None:
        """The adapter is out of memory. `turn` is to be called next."""
        self._deadline = None
        wanted = bool(self._entries[digest].waiting)
        self._feed(digest, AdapterEvent.UNLOADED_AND_WANTED if wanted else AdapterEvent.UNLOADED)

    def _make_room(self, in_use: Set[str]) -> Sequence[CacheEffect]:
        if self._num({AdapterState.UNLOADING}):
            return ()
        for digest, entry in self._entries.items():
            if entry.state is AdapterState.LOADED and digest not in in_use:
                return [self._evict(digest)]
        return ()

    def _evict(self, digest: str) -> UnloadAdapter:
        self._feed(digest, AdapterEvent.EVICTED)
        return UnloadAdapter(digest)

    def _feed(self, digest: str, event: AdapterEvent) -> None:
        if self._entries[digest].machine.feed(event) is AdapterState.GONE:
            del self._entries[digest]

    def _num(self, states: Set[AdapterState]) -> int:
        return sum(entry.state in states for entry in self._entries.values())


_TOO_LONG = "its adapter is being loaded for too long"
_NO_ROOM = f"for {WAIT_S:g} s there was no room in memory for its adapter: all others are in use (--max-cpu-loras)"
