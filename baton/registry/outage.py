"""What a reader believes after the registry was away or came back empty. Pure: time is an argument.

A registry that lost its records says nothing about the nodes. Its *epoch*, a random word that the first writer puts
beside the records, tells such a loss from an orderly good-bye: when the epoch changed, a record that is missing stands
until its process had the time to publish it again.
"""

from __future__ import annotations

from types import MappingProxyType

from baton.registry.records import NodeRecord, Snapshot


class OutageGrace:
    """Merges each full read with what was known before the registry lost its memory."""

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._latest: Snapshot = MappingProxyType({})
        self._kept: dict[str, tuple[NodeRecord, float]] = {}

    def merge(self, epoch: str | None, fresh: Snapshot, now: float) -> Snapshot:
        """The snapshot to believe. `epoch` is None in an empty registry; `now` is monotonic seconds."""
        if self._epoch is not None and epoch != self._epoch:
            self._kept = {name: (record, now + record.lease_s) for name, record in self._latest.items()}
        self._epoch = epoch
        self._kept = {
            name: (record, until) for name, (record, until) in self._kept.items() if name not in fresh and now < until
        }
        merged = {name: record for name, (record, _) in self._kept.items()} | dict(fresh)
        self._latest = MappingProxyType(dict(sorted(merged.items())))
        return self._latest
