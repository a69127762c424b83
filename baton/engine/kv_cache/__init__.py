"""Blocks of KV: who holds which, what a block's content is called, prefix cache and host tier, and news of both."""
