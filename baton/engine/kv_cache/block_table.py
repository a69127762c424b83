"""The block table of one live request."""

from __future__ import annotations

from baton.engine.kv_cache.block_pool import Block


class BlockTable:
    """One live request's blocks in token order."""

    __slots__ = (
        "blocks",
        "num_cached_stripes",
        "num_dropped_stripes",
        "num_filling_entries",
        "num_hit_entries",
        "num_stripes_to_come",
        "spare",
    )

    def __init__(self, blocks: list[Block], num_groups: int, num_filling_stripes: int) -> None:
        """`blocks`: cache hits. `num_filling_stripes`: stripes right behind the hits, to which a transfer writes."""
        self.blocks = blocks
        """The table's entries; the null block where there is no block."""
        self.num_hit_entries = len(blocks)
        self.num_filling_entries = num_filling_stripes * num_groups
        self.num_cached_stripes = len(blocks) // num_groups
        """Leading stripes that were entered into the prefix cache's index."""
        self.num_dropped_stripes = [0] * num_groups
        """For each group: leading stripes whose entries `drop_unseen` has freed."""
        self.spare: list[Block] | None = None
        """Blocks for entries to come, of a table that grows while its prompt is computed (`allocate_to_grow`); None:
        the table has all its entries."""
        self.num_stripes_to_come = 0
        """The number of stripes at which a growing table is complete."""
