"""How long the mover's thread sleeps before it looks again."""

from __future__ import annotations

READER_PUMP_S = 0.001
"""Pause between two pumps while there are readers and no read of this node is in flight."""
SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 0.001
"""Bounds of the pause between two polls of reads in flight."""
_PAUSE_SHARE = 0.01
"""The pause as a share of the time since the last progress."""


def pause(quiet_s: float | None, num_readers: int) -> float | None:
    """Seconds that the mover waits for a command before it polls again; None: until a command comes.

    `quiet_s` is the time since a piece of a read was posted or finished; None: no read is in flight. A pause is 1 % of
    it, so that polling delays no completion by more than that share of the time it took (or by the shortest pause).
    """
    if quiet_s is not None:
        return min(max(quiet_s * _PAUSE_SHARE, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
    return READER_PUMP_S if num_readers else None
