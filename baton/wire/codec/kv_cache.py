"""The codec of a node's prefix cache events, to Protocol Buffers and back."""

from __future__ import annotations

from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVCacheUpdate, Tier
from baton.v1 import node_pb2 as node

_TIERS: dict[Tier, node.KVCacheTier] = {
    "device": node.KV_CACHE_TIER_DEVICE,
    "host": node.KV_CACHE_TIER_HOST,
    "encoder": node.KV_CACHE_TIER_ENCODER,
}
_TIER_NAMES: dict[int, Tier] = {number: tier for tier, number in _TIERS.items()}


def kv_update_to_pb(update: KVCacheUpdate) -> node.KVCacheUpdate:
    """The message of an update. It leaves out the token ids: routers look up prompts by their hashes."""
    return node.KVCacheUpdate(
        first_sequence=update.first_sequence,
        next_sequence=update.next_sequence,
        restart=update.restart,
        events=[_event_to_pb(event) for event in update.events],
    )


def kv_update_from_pb(pb: node.KVCacheUpdate) -> KVCacheUpdate:
    """The update in a message, without events of a kind or tier that this version does not know."""
    events = [event for event in map(_event_from_pb, pb.events) if event is not None]
    return KVCacheUpdate(pb.first_sequence, pb.next_sequence, events, pb.restart)


def _event_to_pb(event: KVCacheEvent) -> node.KVCacheEvent:
    match event:
        case BlockStored(hashes, parent, _, group, tier):
            stored = node.BlockStored(block_hashes=hashes, parent_block_hash=parent, group=group, tier=_TIERS[tier])
            return node.KVCacheEvent(block_stored=stored)
        case BlockRemoved(hashes, tier):
            return node.KVCacheEvent(block_removed=node.BlockRemoved(block_hashes=hashes, tier=_TIERS[tier]))
        case AllBlocksCleared():
            return node.KVCacheEvent(all_blocks_cleared=node.AllBlocksCleared())


def _event_from_pb(pb: node.KVCacheEvent) -> KVCacheEvent | None:
    match pb.WhichOneof("event"):
        case "block_stored" if pb.block_stored.tier in _TIER_NAMES:
            stored = pb.block_stored
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            hashes = tuple(stored.block_hashes)
            return BlockStored(hashes, parent, group=stored.group, tier=_TIER_NAMES[stored.tier])
        case "block_removed" if pb.block_removed.tier in _TIER_NAMES:
            removed = pb.block_removed
            return BlockRemoved(tuple(removed.block_hashes), _TIER_NAMES[removed.tier])
        case "all_blocks_cleared":
            return AllBlocksCleared()
    return None
