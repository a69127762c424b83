"""Copies single blocks of a cache on a device to the host, and bytes of the host to a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from baton.engine.runner import KVMemory


def copied_to_host(memory: KVMemory) -> Callable[[Sequence[int]], KVMemory]:
    """A function that copies blocks to host memory, in the given order. Nothing may write to them meanwhile.

    The function may be called from any thread. Its copies use a CUDA stream of their own, so they don't wait for the
    step that is being computed.
    """
    rows = rows_of(memory)
    stream = torch.cuda.Stream(rows.device) if rows.is_cuda else None  # type: ignore[no-untyped-call]

    def copied(block_ids: Sequence[int]) -> KVMemory:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            blocks = rows[torch.tensor(block_ids, dtype=torch.int64, device=rows.device)].cpu()
        address, size, layout = blocks.data_ptr(), memory.block_bytes, memory.layout
        return KVMemory(address, len(block_ids), size, "DRAM", 0, blocks, layout=layout, layers=memory.layers)

    return copied


def write_from_host(memory: KVMemory) -> Callable[[int, bytes], None]:
    """A function that writes bytes to a whole block, and returns when they are there.

    The function may be called from any thread. Nothing may read or write the block meanwhile.
    """
    rows = rows_of(memory)
    stream = torch.cuda.Stream(rows.device) if rows.is_cuda else None  # type: ignore[no-untyped-call]

    def write(block: int, content: bytes) -> None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            rows[block].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if stream is not None:
            stream.synchronize()

    return write


def rows_of(memory: KVMemory) -> torch.Tensor:
    """The bytes of all blocks: [num_all_blocks, block_bytes]."""
    owner: torch.Tensor = memory.owner
    return owner.view(-1).view(torch.uint8)[: memory.num_bytes].view(memory.num_all_blocks, memory.block_bytes)
