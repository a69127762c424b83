"""Blocks of KV: block tables, the block pool, keys of block contents, prefix cache, host tier, and their events.

The scheduler takes `manager.KVCacheManager`; runners and nodes take the keys' fields and the events.
"""
