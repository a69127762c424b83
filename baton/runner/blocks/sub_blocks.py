"""The parts of blocks: where the bytes of some of a block's tokens lie in it.

A block is divided into sub-blocks of equal numbers of neighbouring tokens. The sub-blocks of all blocks are numbered:
`block * parts + index`. Their bytes have an order of their own, which is that of a whole block of so few tokens: two
nodes that divide blocks of different sizes into sub-blocks of the same size have the same bytes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.engine.runner import ELEMENT_BYTES, SCALE_BYTES, KVLayout, LayerState

Int64Array = npt.NDArray[np.int64]


class Division(NamedTuple):
    """Blocks of one group of layers, each divided into sub-blocks."""

    parts: int = 1
    """Sub-blocks of a block."""
    group: int = 0
    """Index of the group, whose layers the blocks hold."""
    layers: range | None = None
    """The layers that are meant, by their indices in the whole model; None: all that the memory holds."""


WHOLE = Division()


@dataclass(frozen=True, slots=True)
class SubBlockRows:
    """Where a sub-block's bytes lie in its block, in their own order: one row for each head of each tensor.

    Row i of the block's sub-block n has `lengths[i]` bytes, from `starts[i] + n * lengths[i]` on.
    """

    starts: Int64Array
    lengths: Int64Array
    layers: Sequence[int]
    """The layers that the rows are of, in order, by their indices in the whole model; those without bytes are not
    among them."""
    ends: Int64Array
    """For each of these layers, the number of rows up to its end."""

    @classmethod
    def of_bytes(cls, num_bytes: int) -> SubBlockRows:
        """The single row of a block whose shape is not known, as if it had one layer."""
        return cls(np.zeros(1, np.int64), np.array([num_bytes]), (0,), np.ones(1, np.int64))

    @property
    def num_bytes(self) -> int:
        """Size of a sub-block."""
        return int(self.lengths.sum())

    @property
    def layer_bytes(self) -> Int64Array:
        """Size of each layer in a sub-block."""
        return np.add.reduceat(self.lengths, self._firsts) if len(self.layers) else np.empty(0, np.int64)

    @property
    def _firsts(self) -> Int64Array:
        """For each layer, the index of its first row."""
        return np.concatenate((np.zeros(1, np.int64), self.ends))[:-1]

    def of_whole_layers(self) -> SubBlockRows:
        """The rows of a whole block, in which those of a layer follow each other, as one for each layer."""
        ends = np.arange(1, len(self.layers) + 1)
        return SubBlockRows(self.starts[self._firsts], self.layer_bytes, self.layers, ends)

    def gather(self, block: memoryview | bytes, index: int) -> Iterator[memoryview | bytes]:
        """Yield the bytes of each layer of the block's sub-block `index`, in their own order."""
        starts, lengths = self.starts.tolist(), self.lengths.tolist()
        for first, end in zip(self._firsts.tolist(), self.ends.tolist(), strict=True):
            rows = [
                block[starts[row] + index * lengths[row] : starts[row] + (index + 1) * lengths[row]]
                for row in range(first, end)
            ]
            yield rows[0] if len(rows) == 1 else b"".join(rows)


@lru_cache(maxsize=64)
def sub_block_rows(layout: KVLayout, division: Division, held: range | None = None) -> SubBlockRows:
    """The rows of a sub-block of the whole model's layout, in a memory that holds the layers `held` (None: all).

    Layers that are meant and not held have no rows. Nor have bytes that a group with few layers leaves unused at the
    end of its blocks. Raises ValueError if the tokens of a block can't be divided so.
    """
    if layout.block_size % division.parts:
        raise ValueError(f"a block of {layout.block_size} tokens has no {division.parts} equal parts")
    at, starts, lengths, layers, ends = 0, list[int](), list[int](), list[int](), list[int]()
    for layer in layout.groups[division.group].layers:
        if held is not None and layer not in held:
            continue
        is_meant = division.layers is None or layer in division.layers
        for num_bytes in _row_bytes(layout, layer, division.parts):
            if is_meant:
                starts.append(at)
                lengths.append(num_bytes // division.parts)
            at += num_bytes
        if len(starts) > (ends[-1] if ends else 0):
            layers.append(layer)
            ends.append(len(starts))
    return SubBlockRows(
        np.array(starts, np.int64), np.array(lengths, np.int64), tuple(layers), np.array(ends, np.int64)
    )


def _row_bytes(layout: KVLayout, layer: int, parts: int) -> list[int]:
    """The bytes of a whole block in each row of a layer that has bytes. Raises ValueError if it has no parts."""
    element, geometry, rows = ELEMENT_BYTES[layout.dtype], layout.layers[layer], list[int]()
    if isinstance(geometry, LayerState):
        if parts > 1:
            raise ValueError("a block with a state can't be divided: the state is that of all its tokens")
        return [geometry.num_bytes]
    for width in geometry.widths:
        rows += [width * element] * geometry.num_kv_heads
    if layout.has_scales:
        rows += [SCALE_BYTES] * (len(geometry.widths) * geometry.num_kv_heads)
    return [size * layout.block_size for size in rows if size]
