"""What enters and leaves the prefix cache, in order, for readers elsewhere: who places by prefix must know who has it.

Events are numbered without gaps from 0 on. A reader first takes a snapshot, which also switches the recording on, and
then asks for what happened since. The log is bounded by the keys in it; a reader that was too slow is told so and takes
a snapshot again. While nobody reads, nothing is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from baton.messages.kv_cache import KVCacheEvent, Tier
from baton.values import value


@value(frozen=True, slots=True)
class KVEventBatch:
    """Events from the number that was asked for up to `next_sequence`."""

    events: Sequence[KVCacheEvent]
    next_sequence: int
    """What to ask for next."""
    complete: bool
    """False: some are lost, and there are none in here; take a snapshot."""


@value(frozen=True, slots=True)
class KVSnapshot:
    """Everything that can be found, before the event `next_sequence`."""

    block_hashes: Mapping[Tier, frozenset[bytes]]
    next_sequence: int


class KVEventLog:
    """The last events, up to `capacity` keys in them."""

    def __init__(self, capacity: int = 65536, *, with_tokens: bool = True) -> None:
        """`with_tokens`: readers want to know what is in blocks, not only their keys."""
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
        """Note one event; nothing while nobody reads."""
        if not self.is_recording:
            return
        self._events.append(event)
        self._next_sequence += 1
        self._num_keys += len(event.block_hashes)
        while self._num_keys > self._capacity:
            self._num_keys -= len(self._events.popleft().block_hashes)

    def forget_before(self, sequence: int) -> None:
        """The only reader there is has everything before this number."""
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
        # Most readers are near the end, and a deque is slow to walk to there from its begin.
        latest = list(islice(reversed(self._events), self._next_sequence - sequence))
        return KVEventBatch(latest[::-1], self._next_sequence, complete=True)

    def stop(self) -> None:
        """Nobody reads any more. Whoever does later is told that something is missing."""
        if self.is_recording:
            self.is_recording = False
            self._events.clear()
            self._num_keys = 0
            self._next_sequence += 1
