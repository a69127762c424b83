"""Deadlines by key. The earliest one is found without a scan of all."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound="tuple[Any, ...] | str | int")

_SPARE = 64
"""The heap is rebuilt when it has this many entries more than twice the number of deadlines."""


class Deadlines(Generic[Key]):
    """A set of deadlines, at most one for each key, on any clock. Keys must be comparable with each other."""

    def __init__(self) -> None:
        self._until: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        """(deadline, key) of all deadlines, and outdated entries of changed or cleared ones, which are skipped."""

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: Key) -> bool:
        return key in self._until

    def set(self, key: Key, until: float) -> None:
        """Set the deadline of a key, in place of the one that it has."""
        if self._until.get(key) == until:
            return
        self._until[key] = until
        heapq.heappush(self._heap, (until, key))
        if len(self._heap) > 2 * len(self._until) + _SPARE:
            self._heap = [(until, key) for key, until in self._until.items()]
            heapq.heapify(self._heap)

    def clear(self, key: Key) -> None:
        """Remove a key's deadline, if it has one."""
        self._until.pop(key, None)

    def first(self) -> float | None:
        """The earliest deadline; None if there is none."""
        while self._heap and self._until.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[Key]:
        """Remove and return the keys whose deadlines have passed, the earliest first."""
        due = []
        while (until := self.first()) is not None and until <= now:
            key = heapq.heappop(self._heap)[1]
            del self._until[key]
            due.append(key)
        return due
