"""KV blocks as bytes: blocks of the host tier, blocks on a device, and digests of blocks."""
