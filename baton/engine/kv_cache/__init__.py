"""Blocks of KV: block tables, the block pool, keys of block contents, prefix cache, host tier, and their events.

The scheduler takes `manager.KVCacheManager`; runners and nodes take the keys' fields and the events. Every block comes
from `block_pool.BlockPool.get_new_blocks` and goes back there.
"""
