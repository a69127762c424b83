"""The effects that leases and transfers share."""

from __future__ import annotations

from dataclasses import dataclass

from baton.messages.ids import AttemptKey


@dataclass(frozen=True, slots=True)
class Released:
    """No read touches the blocks of this ended request any more; said once for each request."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class Recorded:
    """Write an entry to the node's event log."""

    name: str
    attempt: AttemptKey
    value: int = 0
    detail: str = ""
