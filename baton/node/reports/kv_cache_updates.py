"""Turns changes of an engine's prefix cache into updates for routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.messages.kv_cache import BlockStored, KVCacheUpdate

_MAX_HASHES = 100_000
"""The most hashes in one update: 3.4 MB, well below the largest message that gRPC takes."""


def kv_cache_updates(news: KVEventBatch | KVSnapshot, max_hashes: int = _MAX_HASHES) -> Sequence[KVCacheUpdate]:
    """The updates to send, in order; a large snapshot is divided among several."""
    if isinstance(news, KVEventBatch):
        return [KVCacheUpdate(news.next_sequence - len(news.events), news.next_sequence, news.events)]
    number = news.next_sequence
    first, *others = [[event] for event in _stored(news, max_hashes)] or [[]]
    return [
        KVCacheUpdate(number, number, first, restart=True),
        *(KVCacheUpdate(number, number, events) for events in others),
    ]


def _stored(snapshot: KVSnapshot, max_hashes: int) -> Iterator[BlockStored]:
    for tier, found in snapshot.block_hashes.items():
        hashes = list(found)
        for start in range(0, len(hashes), max_hashes):
            yield BlockStored(hashes[start : start + max_hashes], tier=tier)
