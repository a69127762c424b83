"""A runner's half of the host tier: blocks beside the cache, and a step's copies between both."""

from __future__ import annotations

from typing import Any

from baton.engine.batch import SchedulerOutput


def host_blocks_in(num_bytes: int, block_bytes: int) -> int:
    """How many host blocks that much memory holds; 0 when they are too few to be of use (one is the null block)."""
    num_blocks = num_bytes // block_bytes
    return num_blocks if num_blocks > 1 else 0


class HostBlocks:
    """Two arrays or tensors of rows of equal size and type, each row a block: the runner's cache and the host's."""

    def __init__(self, cache: Any, blocks: Any) -> None:
        self._cache = cache
        self._blocks = blocks

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def execute(self, output: SchedulerOutput) -> int:
        """Do a step's copies: all those out, then all in. Returns how many blocks were copied."""
        for copy in output.blocks_to_swap_out:
            self._blocks[copy.destination] = self._cache[copy.source]
        for copy in output.blocks_to_swap_in:
            self._cache[copy.destination] = self._blocks[copy.source]
        return len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in)
