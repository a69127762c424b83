"""Blocks of KV: block tables, the block pool, keys of block contents, prefix cache, host tier, and their events."""
