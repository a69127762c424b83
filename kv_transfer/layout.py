"""What two nodes must agree on before one may read the other's blocks, and how they introduce themselves: by name, by
layout, and a sender by the memories of its parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from baton.engine.runner import KVLayout, ModelInfo
from baton.errors import TransferCause, TransferFailed
from baton.messages.kv_cache import block_sizes_fit
from kv_transfer.backends.base import PeerMemory

PROTOCOL_VERSION = 7
"""Version of the link's protocol; nodes of different versions refuse each other."""


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Model, numerics, shape of a block, and how blocks are moved. Only nodes whose fingerprints are equal, apart from
    the number of tokens in a block, exchange blocks.

    The shape alone is not enough: KV of other weights or other kernels has the same shape, and not the same bits. Two
    nodes that both say `kv_shape` exchange blocks across numerics all the same, if it is equal; what they read of each
    other is cached under keys of its own (`Submit.kv_bits`).
    """

    model_fingerprint: str
    numerics: str
    dtype: str
    block_size: int
    geometry: str
    """Heads and widths of every layer, as `KVLayout.geometry` writes them."""
    block_bytes: int
    backend: str
    kv_shape: str = ""
    """See `NodeDescription.kv_shape`."""

    @classmethod
    def of(cls, model: ModelInfo, layout: KVLayout, backend: str, *, across: bool = False) -> LayoutFingerprint:
        """The fingerprint of a runner whose blocks `backend` moves. `across`: whether nodes of other numerics may read
        them, and this one theirs."""
        return cls(
            model_fingerprint=model.fingerprint,
            numerics=model.numerics,
            dtype=layout.dtype,
            block_size=layout.block_size,
            geometry=layout.geometry,
            block_bytes=layout.block_bytes,
            backend=backend,
            kv_shape=layout.exchange_shape if across else "",
        )

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value in values if name != "kv_shape" or value)


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """How one incarnation of a node introduces itself on its links."""

    cluster: str
    node_id: str
    incarnation: str
    layout: LayoutFingerprint
    address: str = ""
    """Where the node listens, as HOST:PORT."""
    protocol: int = PROTOCOL_VERSION
    """Version of the link's protocol."""


def layout_mismatch(
    ours: LayoutFingerprint, theirs: LayoutFingerprint, here: str = "here", there: str = "there"
) -> str | None:
    """Why two nodes can't exchange blocks, in one line that shows both sides, named `here` and `there`; None: they can.

    Block sizes may differ if they fit (`baton/messages/kv_cache.py`).
    """
    different = [f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)]
    why = ""
    if ours.block_bytes * theirs.block_size == theirs.block_bytes * ours.block_size:
        if block_sizes_fit(ours.block_size, theirs.block_size):
            different = [name for name in different if name not in ("block_size", "block_bytes")]
        else:
            why = " (neither block size divides the other)"
    if ours.numerics == theirs.numerics:
        different = [name for name in different if name != "kv_shape"]
    elif ours.kv_shape and ours.kv_shape == theirs.kv_shape:
        different.remove("numerics")
    if not different:
        return None
    return f"KV layouts differ in {', '.join(different)}{why}: {here} [{ours}], {there} [{theirs}]"


MAX_PARTS = 64
"""The most parts of a node."""


def part_name(incarnation: str, index: int) -> str:
    """The name of the transfer agent of one part of a node; the first part's is the incarnation itself."""
    return incarnation if index == 0 else f"{incarnation}/{index}"


def node_of(agent: str) -> str:
    """The incarnation whose part has the transfer agent of this name."""
    return agent.partition("/")[0]


@dataclass(frozen=True, slots=True)
class PeerNode:
    """One incarnation of a sender. Most have one part, whose memory holds all layers."""

    incarnation: str
    parts: Sequence[PeerMemory]
    """The memory of each part, in the order of the layers; `PeerMemory.incarnation` is the name of the part's agent."""

    @classmethod
    def of(cls, memory: PeerMemory) -> PeerNode:
        """A node with one part."""
        return cls(memory.incarnation, (memory,))

    def layers_of_parts(self, num_layers: int) -> Sequence[range]:
        """The layers of each part. Raises TransferFailed unless each of the model's layers is in one part, in order."""
        layers = [range(num_layers) if part.layers is None else part.layers for part in self.parts]
        problem = parts_problem(layers, num_layers)
        if problem is not None:
            raise TransferFailed(TransferCause.LAYOUT_MISMATCH, f"{self.incarnation!r}: {problem}")
        return layers


def parts_problem(layers: Sequence[range], num_layers: int) -> str | None:
    """Why these can't be the layers of a node's parts; None: each of the model's layers is in one of them, in order."""
    if not 1 <= len(layers) <= MAX_PARTS:
        return f"a node has 1 to {MAX_PARTS} parts, not {len(layers)}"
    bounds = [0, *(bound for part in layers for bound in (part.start, part.stop)), num_layers]
    follow = all(before == after for before, after in zip(bounds[::2], bounds[1::2], strict=True))
    if follow and all(part.step == 1 and len(part) for part in layers):
        return None
    named = ", ".join(f"{part.start}..{part.stop - 1}" for part in layers)
    return f"its parts must have the layers 0..{num_layers - 1} once and in order, and have {named}"
