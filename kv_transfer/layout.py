"""What two nodes must agree on before one may read the other's blocks, and how they introduce themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.engine.runner import KVLayout, ModelInfo
from baton.messages.kv_cache import block_sizes_fit

PROTOCOL_VERSION = 7
"""Version of the link's protocol; nodes of different versions refuse each other."""


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Model, numerics, shape of a block, and how blocks are moved. Only nodes whose fingerprints are equal, apart from
    the number of tokens in a block, exchange blocks.

    The shape alone is not enough: KV of other weights or other kernels has the same shape, and not the same bits.
    """

    model_fingerprint: str
    numerics: str
    dtype: str
    block_size: int
    geometry: str
    """Heads and widths of every layer, as `KVLayout.geometry` writes them."""
    block_bytes: int
    backend: str

    @classmethod
    def of(cls, model: ModelInfo, layout: KVLayout, backend: str) -> LayoutFingerprint:
        """The fingerprint of a runner whose blocks `backend` moves."""
        return cls(
            model_fingerprint=model.fingerprint,
            numerics=model.numerics,
            dtype=layout.dtype,
            block_size=layout.block_size,
            geometry=layout.geometry,
            block_bytes=layout.block_bytes,
            backend=backend,
        )

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


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
    if not different:
        return None
    return f"KV layouts differ in {', '.join(different)}{why}: {here} [{ours}], {there} [{theirs}]"
