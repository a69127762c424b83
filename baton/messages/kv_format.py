"""Which nodes can exchange KV. Routers decide it by the nodes' descriptions, and decode nodes by the records of prefill
nodes in the registry.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

_FIRST_PROTOCOL_OF_OTHER_SIZES = 6
"""The first version of the link's protocol between nodes whose block sizes may differ."""


class _HasKVFormat(Protocol):
    """A node's description, or its record in the registry."""

    @property
    def model_fingerprint(self) -> str: ...
    @property
    def numerics(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def link_protocol(self) -> int: ...


class KVFormat(NamedTuple):
    """The format of a node's KV: two nodes whose formats fit can exchange it.

    A tuple, since routers compare formats in each choice of a pair of nodes.
    """

    model_fingerprint: str
    numerics: str
    dtype: str
    block_size: int
    """Tokens in a block."""
    link_protocol: int
    """Version of the protocol between nodes that hands KV over; 0: not known."""

    @classmethod
    def of(cls, node: _HasKVFormat) -> KVFormat:
        """The format of the node with this description or record."""
        return cls(node.model_fingerprint, node.numerics, node.dtype, node.block_size, node.link_protocol)

    def fits(self, other: KVFormat) -> bool:
        """Whether nodes of these two formats can exchange KV: all must be equal but the block sizes, which must fit.

        The sizes may differ from version 6 of the protocol on.
        """
        return self == other or (
            self.model_fingerprint == other.model_fingerprint
            and self._replace(block_size=other.block_size) == other
            and self._sizes_fit(other)
        )

    def misfits(self, other: KVFormat) -> list[str]:
        """The names of the fields because of which the two formats don't fit."""
        return [
            name
            for name, ours, theirs in zip(self._fields, self, other, strict=True)
            if ours != theirs and not (name == "block_size" and self._sizes_fit(other))
        ]

    def _sizes_fit(self, other: KVFormat) -> bool:
        return (
            block_sizes_fit(self.block_size, other.block_size)
            and min(self.link_protocol, other.link_protocol) >= _FIRST_PROTOCOL_OF_OTHER_SIZES
        )


def block_sizes_fit(one: int, other: int) -> bool:
    """Whether nodes with blocks of so many tokens can exchange KV: one size must divide the other."""
    small, large = sorted((one, other))
    return small == large or (small > 0 and large % small == 0)
