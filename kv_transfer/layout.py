"""What two nodes must agree on before one may read the other's blocks, and how they introduce themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.engine.runner import KVLayout, ModelInfo

PROTOCOL_VERSION = 5
"""Version of the link's protocol; nodes of different versions refuse each other."""


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Model, numerics, shape of a block, and how blocks are moved. Only nodes with equal fingerprints exchange blocks.

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
    """One line that names what differs and shows both sides, named `here` and `there`; None if nothing differs."""
    different = [f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)]
    if not different:
        return None
    return f"KV layouts differ in {', '.join(different)}: {here} [{ours}], {there} [{theirs}]"
