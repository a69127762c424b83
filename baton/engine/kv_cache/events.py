"""The log of changes of the prefix cache, in order, for routers, which place requests where their prefix is cached.

Events are numbered without gaps from 0 on. A reader first takes a snapshot, which also switches the recording on, and
then asks for the events since. The log is bounded by the number of keys in it; a reader that was too slow gets an
incomplete batch and takes a snapshot again. While the log has no reader, nothing is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from baton.messages.kv_cache import KVCacheEvent, Tier
from baton.values import value


@value(frozen=True, slots=True)
class KVEventBatch:
    """The events from the requested number up to `next_sequence`."""

    events: Sequence[KVCacheEvent]
    next_sequence: int
    """The number to request next."""
    complete: bool
    """False: some requested events are lost, and `events` is empty; the reader has to take a snapshot."""


@value(frozen=True, slots=True)
class KVSnapshot:
    """The keys of all blocks that can be found, before the event `next_sequence`."""

    block_hashes: Mapping[Tier, frozenset[bytes]]
    next_sequence: int


class KVEventLog:
    """The latest events, with at most `capacity` keys in them."""

    def __init__(self, capacity: int = 65536, *, with_tokens: bool = True) -> None:
        """`with_tokens`: events of stored blocks contain the blocks' tokens, not only their keys."""
        self.is_recording = False
        self.with_tokens = with_tokens
        self._capacity = capacity
        self._events: deque[KVCacheEvent] = deque()
        self._num_keys = 0
        self._next_sequence = 0

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    def record(self, event: KVCacheEvent) -> None:
        """Append one event, if the log has a reader."""
        if not self.is_recording:
            return
        self._events.append(event)
        self._next_sequence += 1
        self._num_keys += len(event.block_hashes)
        while self._num_keys > self._capacity:
            self._num_keys -= len(self._events.popleft().block_hashes)

    def forget_before(self, sequence: int) -> None:
        """Drop the events before this number, which the log's only reader has."""
        if sequence >= self._next_sequence:
            self._events.clear()
            self._num_keys = 0
        while self._events and self._next_sequence - len(self._events) < sequence:
            self._num_keys -= len(self._events.popleft().block_hashes)

    def since(self, sequence: int) -> KVEventBatch:
        """The events from this number on."""
        oldest = self._next_sequence - len(self._events)
        if not self.is_recording or not oldest <= sequence <= self._next_sequence:
            return KVEventBatch((), self._next_sequence, complete=False)
        if sequence == oldest:
            return KVEventBatch(list(self._events), self._next_sequence, complete=True)
        # Most readers ask for the last few events, and walking a deque from its beginning is slow.
        latest = list(islice(reversed(self._events), self._next_sequence - sequence))
        return KVEventBatch(latest[::-1], self._next_sequence, complete=True)

    def stop(self) -> None:
        """Stop recording, as the log has no reader any more. A later reader has to begin with a snapshot."""
        if self.is_recording:
            self.is_recording = False
            self._events.clear()
            self._num_keys = 0
            self._next_sequence += 1
