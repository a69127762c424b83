"""How long the mover's thread sleeps before it looks again."""

from __future__ import annotations

LEASE_PUMP_S = 0.001
SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 0.001
_PAUSE_SHARE = 0.01


def pause(quiet_s: float | None, open_leases: int) -> float | None:
    """Seconds that the mover waits for a command before it looks again; None: until one comes.

    `quiet_s` is the time since anything of the reads in flight was posted or finished, None without any. A pause is 1 %
    of it, so that polling delays no completion by more than that share of the time it took (or the shortest pause).
    """
    if quiet_s is not None:
        return min(max(quiet_s * _PAUSE_SHARE, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
    return LEASE_PUMP_S if open_leases else None
