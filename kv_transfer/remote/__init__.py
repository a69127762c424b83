"""Movers in other processes, which hold some layers of a node's KV cache: the stream, its messages, and both ends."""
