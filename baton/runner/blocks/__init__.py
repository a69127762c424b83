"""KV blocks as bytes: blocks of the host tier, blocks on a device, digests of blocks, and blocks of known bytes."""
