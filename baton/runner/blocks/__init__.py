"""Blocks of KV as bytes: those on the host, those on a device, and their digests."""
