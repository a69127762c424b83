"""How many nodes are wanted: more at once when they are too busy, one less when that has been enough for long. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from baton.values import value


@dataclass(frozen=True, slots=True)
class SizeSettings:
    """The bounds of the number of nodes."""

    min_nodes: int = 2
    max_nodes: int | None = None
    """None: the number of nodes is not planned."""
    most_pressure: float = 0.8
    """There are to be as many nodes as keep the pressure below it."""
    busy_s: float = 0.0
    """Nodes are added once the pressure has been above it for so long."""
    idle_pressure: float = 0.6
    """One node less is enough if the pressure without it has been below this for `idle_s`."""
    idle_s: float = 300.0
    most_added_a_minute: int = 2


class PoolState(enum.Enum):
    """What is known of the pools of nodes when the number is decided."""

    UNSCALED = "unscaled"
    """Nobody can be told to change the number."""
    BLIND = "blind"
    """Their sizes are not known, or whoever runs them can't be asked at the moment: nothing is decided."""
    CHANGING = "changing"
    """Nodes start, leave, or move: the nodes that serve are not those that are to be."""
    SETTLED = "settled"
    """All nodes that are to serve do so, and no others."""


@value(frozen=True, slots=True)
class Size:
    """How many nodes are wanted, and what that changes."""

    wanted: int
    to_add: int = 0
    to_remove: int = 0


class SizeLaw:
    """Decides on the number of nodes."""

    def __init__(self, settings: SizeSettings) -> None:
        self._settings = settings
        self._wanted: int | None = None
        """None: nothing has been decided yet."""
        self._added_at: list[float] = []
        self._busy_since = math.inf
        self._idle_since: float | None = None

    def decide(
        self,
        num_nodes: int,
        pressure_with: Callable[[int], float],
        now: float,
        pools: PoolState = PoolState.UNSCALED,
    ) -> Size:
        """The number that is wanted. `pressure_with`: the pressure with so many nodes, in their best division.

        `num_nodes`: the nodes that there are or that start. Where the pools are settled this is the number to begin
        from, whoever has changed it, and only then a node is taken away.
        """
        settings, wanted = self._settings, self._wanted
        if settings.max_nodes is None:
            return Size(num_nodes)
        if wanted is None or pools is PoolState.SETTLED:
            if wanted != num_nodes:
                self._idle_since = None
            wanted = num_nodes
        if pools is PoolState.BLIND:
            return Size(wanted)
        may_remove = pools is not PoolState.CHANGING
        least, most = settings.min_nodes, settings.max_nodes
        before, wanted = wanted, min(most, max(least, wanted))
        bounded = wanted
        self._added_at = [at for at in self._added_at if now < at + 60.0]
        is_busy = pressure_with(wanted) > settings.most_pressure
        self._busy_since = min(self._busy_since, now) if is_busy else math.inf
        while (
            now >= self._busy_since + settings.busy_s
            and wanted < most
            and len(self._added_at) < settings.most_added_a_minute
            and pressure_with(wanted) > settings.most_pressure
        ):
            wanted += 1
            self._added_at.append(now)
        if wanted > bounded or wanted == least or pressure_with(wanted - 1) >= settings.idle_pressure:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif may_remove and now >= self._idle_since + settings.idle_s:
            wanted, self._idle_since = wanted - 1, now
        self._wanted = wanted
        return Size(wanted, max(0, wanted - before), max(0, before - wanted) * may_remove)
