"""Adapters on a node: which ones it acknowledges to its routers, and which of them are in memory."""
