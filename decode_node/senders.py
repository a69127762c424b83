"""The prefill nodes that a decode node meets as they join the cluster, before a request needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from baton.messages.ids import Peer
from baton.messages.kv_cache import KVFormat
from baton.registry import Snapshot
from kv_transfer.layout import LinkIdentity


def own_kv_format(dtype: str, identity: LinkIdentity) -> KVFormat:
    """The format of the KV of this node. `dtype`: that of the model, which the KV's may differ from."""
    ours = identity.layout
    return KVFormat(
        ours.model_fingerprint, ours.numerics, dtype, ours.block_size, identity.protocol, kv_shape=ours.kv_shape
    )


class KnownSenders:
    """The prefill nodes in the registry that a decode node can read from."""

    def __init__(self, kv_format: KVFormat, joined: Callable[[Peer], None], left: Callable[[str], None]) -> None:
        """`joined` is called when an incarnation has come, and `left` when it has gone."""
        self._format = kv_format
        self._joined = joined
        self._left = left
        self._known: set[str] = set()

    async def follow(self, snapshots: AsyncIterator[Snapshot]) -> None:
        """Take every snapshot until there are no more."""
        async for snapshot in snapshots:
            self.update(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        """Meet the prefill nodes that are new, and forget those that have left."""
        fitting = [
            description
            for description in snapshot.values()
            if description.role == "prefill" and KVFormat.of(description).fits(self._format, across=True)
        ]
        for record in fitting:
            if record.incarnation not in self._known:
                self._joined(Peer(record.name, record.incarnation, record.address))
        known = {record.incarnation for record in fitting}
        for incarnation in self._known - known:
            self._left(incarnation)
        self._known = known
