"""Until when things wait; the first deadline is known without a look at the others."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound="tuple[Any, ...] | str | int")

_SPARE = 64


class Deadlines(Generic[Key]):
    """One for each key. Keys can be ordered."""

    def __init__(self) -> None:
        self._until: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        """All of them, and some that were changed or cleared since: those are skipped."""

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: Key) -> bool:
        return key in self._until

    def set(self, key: Key, until: float) -> None:
        """In place of the one that it had."""
        if self._until.get(key) == until:
            return
        self._until[key] = until
        heapq.heappush(self._heap, (until, key))
        if len(self._heap) > 2 * len(self._until) + _SPARE:
            self._heap = [(until, key) for key, until in self._until.items()]
            heapq.heapify(self._heap)

    def clear(self, key: Key) -> None:
        """It waits no more, or for something else; fine for one that has none."""
        self._until.pop(key, None)

    def first(self) -> float | None:
        """The earliest; None: nothing has one."""
        while self._heap and self._until.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[Key]:
        """Those whose time has come, the earliest first; they have none any more."""
        due = []
        while (until := self.first()) is not None and until <= now:
            key = heapq.heappop(self._heap)[1]
            del self._until[key]
            due.append(key)
        return due
