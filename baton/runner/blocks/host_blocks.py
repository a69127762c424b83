"""The runner's part of the host tier: the memory of the host blocks, and the copies between it and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from baton.engine.batch import BlockCopy


class Swaps(Protocol):
    """The copies between cache and host tier before a step computes, as in `SchedulerOutput`."""

    @property
    def blocks_to_swap_out(self) -> Sequence[BlockCopy]: ...

    @property
    def blocks_to_swap_in(self) -> Sequence[BlockCopy]: ...


def host_blocks_in(num_bytes: int, block_bytes: int) -> int:
    """How many host blocks fit into `num_bytes`; 0 if that is only the null block."""
    num_blocks = num_bytes // block_bytes
    return num_blocks if num_blocks > 1 else 0


class HostBlocks:
    """The runner's KV cache and the host blocks: two arrays or tensors with one block a row, equal in size and type."""

    def __init__(self, cache: Any, blocks: Any) -> None:
        self._cache = cache
        self._blocks = blocks

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def execute(self, output: Swaps) -> int:
        """Make a step's copies: first all copies out, then all copies in. Returns how many blocks were copied."""
        for copy in output.blocks_to_swap_out:
            self._blocks[copy.destination] = self._cache[copy.source]
        for copy in output.blocks_to_swap_in:
            self._cache[copy.destination] = self._blocks[copy.source]
        return len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in)
