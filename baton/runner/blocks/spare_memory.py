"""Memory of the kind that a node's KV cache would have, for trials."""

from __future__ import annotations

import torch

from baton.engine.runner import KVMemory


def spare_memory(num_blocks: int, block_bytes: int) -> KVMemory:
    """Blocks on the first GPU, or in host memory where there is none. Their pages are mapped."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    owner = torch.ones(num_blocks * block_bytes, dtype=torch.uint8, device=device)
    kind = "VRAM" if device.type == "cuda" else "DRAM"
    return KVMemory(owner.data_ptr(), num_blocks, block_bytes, kind, device.index or 0, owner)
