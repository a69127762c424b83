"""Which records a reader takes as valid after the registry has lost its data. It does no I/O; time is an argument.

When the registry has lost its records, their absence does not mean that the processes have ended. The *epoch*, a random
word that the first writer stores beside the records, tells the two cases apart: after a change of the epoch a missing
record remains valid until its process has had time to publish it again.
"""

from __future__ import annotations

from types import MappingProxyType

from baton.registry.records import NodeRecord, Snapshot


class OutageGrace:
    """Merges each full read with the records that were known before the registry lost its data."""

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._latest: Snapshot = MappingProxyType({})
        self._kept: dict[str, tuple[NodeRecord, float]] = {}

    def merge(self, epoch: str | None, fresh: Snapshot, now: float) -> Snapshot:
        """The records that are valid now. `epoch`: None for an empty registry; `now`: monotonic seconds."""
        if self._epoch is not None and epoch != self._epoch:
            self._kept = {name: (record, now + record.lease_s) for name, record in self._latest.items()}
        self._epoch = epoch
        self._kept = {
            name: (record, until) for name, (record, until) in self._kept.items() if name not in fresh and now < until
        }
        merged = {name: record for name, (record, _) in self._kept.items()} | dict(fresh)
        self._latest = MappingProxyType(dict(sorted(merged.items())))
        return self._latest
