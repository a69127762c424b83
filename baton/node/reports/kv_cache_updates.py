"""An engine's news of its prefix cache as updates for routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.messages.kv_cache import BlockStored, KVCacheUpdate

_MOST_HASHES = 100_000
"""In one update of a snapshot: 3.4 MB, well under what gRPC takes."""


def kv_cache_updates(news: KVEventBatch | KVSnapshot, most_hashes: int = _MOST_HASHES) -> Sequence[KVCacheUpdate]:
    """What to send, in order; a snapshot may be too much for one message."""
    if isinstance(news, KVEventBatch):
        return [KVCacheUpdate(news.next_sequence - len(news.events), news.next_sequence, news.events)]
    number = news.next_sequence
    first, *others = [[event] for event in _stored(news, most_hashes)] or [[]]
    return [
        KVCacheUpdate(number, number, first, restart=True),
        *(KVCacheUpdate(number, number, events) for events in others),
    ]


def _stored(snapshot: KVSnapshot, most_hashes: int) -> Iterator[BlockStored]:
    for tier, found in snapshot.block_hashes.items():
        hashes = list(found)
        for start in range(0, len(hashes), most_hashes):
            yield BlockStored(hashes[start : start + most_hashes], tier=tier)
