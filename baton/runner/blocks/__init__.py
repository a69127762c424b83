"""KV blocks as bytes: blocks of the host tier, blocks on a device, digests of blocks, and blocks of known bytes.

Runners take the host tier; movers take digests, parts of blocks and known bytes. Nothing here knows a model.
"""
