"""How many nodes are wanted: more at once when they are too busy, one less when that has been enough for long. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizeSettings:
    """The bounds of the number of nodes."""

    min_nodes: int = 2
    max_nodes: int | None = None
    """None: the number of nodes is not planned."""
    most_pressure: float = 0.8
    """There are to be as many nodes as keep the pressure below it."""
    idle_pressure: float = 0.6
    """One node less is enough if the pressure without it has been below this for `idle_s`."""
    idle_s: float = 300.0
    most_added_a_minute: int = 2


class SizeLaw:
    """Decides on the number of nodes."""

    def __init__(self, settings: SizeSettings) -> None:
        self._settings = settings
        self._wanted: int | None = None
        """None: nothing has been decided yet."""
        self._added_at: list[float] = []
        self._idle_since: float | None = None

    def decide(self, num_nodes: int, pressure_with: Callable[[int], float], now: float) -> int:
        """The number that is wanted. `pressure_with`: the pressure with so many nodes, in their best division."""
        settings = self._settings
        if settings.max_nodes is None:
            return num_nodes
        least, most = max(2, settings.min_nodes), max(2, settings.max_nodes)
        wanted = min(most, max(least, num_nodes if self._wanted is None else self._wanted))
        self._added_at = [at for at in self._added_at if now < at + 60.0]
        before = wanted
        while (
            wanted < most
            and len(self._added_at) < settings.most_added_a_minute
            and pressure_with(wanted) > settings.most_pressure
        ):
            wanted += 1
            self._added_at.append(now)
        if wanted > before or wanted == least or pressure_with(wanted - 1) >= settings.idle_pressure:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now >= self._idle_since + settings.idle_s:
            wanted, self._idle_since = wanted - 1, now
        self._wanted = wanted
        return wanted
