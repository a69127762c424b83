"""What two nodes must agree on before one may read the other's blocks, and who they are to each other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.engine.runner import KVLayout, ModelInfo

PROTOCOL_VERSION = 4
"""Of the link's conversation; nodes of different versions refuse each other."""


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Model, numerics, shape of a block and the way it is moved. Only equal fingerprints exchange blocks.

    Equal layouts are not enough for the bit-exact promise: KV of other weights or other kernels has the same shape.
    """

    model_fingerprint: str
    numerics: str
    dtype: str
    block_size: int
    geometry: str
    """Heads and widths of every layer, as `KVLayout.geometry` spells them."""
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
    """One incarnation of a node as its links introduce it."""

    cluster: str
    node_id: str
    incarnation: str
    layout: LayoutFingerprint
    address: str = ""
    """Where it listens."""
    protocol: int = PROTOCOL_VERSION
    """Of the link's conversation."""


def refusal(ours: LayoutFingerprint, theirs: LayoutFingerprint, here: str = "here", there: str = "there") -> str | None:
    """None when blocks may be exchanged; else one line that names what differs and prints both sides by name."""
    different = [f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)]
    if not different:
        return None
    return f"KV layouts differ in {', '.join(different)}: {here} [{ours}], {there} [{theirs}]"
