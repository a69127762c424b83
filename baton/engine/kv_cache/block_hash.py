"""Keys of KV blocks: a chain of SHA-256 hashes, so that equal keys mean equal KV.

Every field is encoded as tag byte, length (4 bytes, little-endian), payload: two different field lists never encode to
the same bytes. What is constant for a request goes into the chain's root; each full block's key covers its parent's
key, the spans that overlap it with their places (`span_items`), and its token ids. So a key names the whole prefix.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.request import Request
from baton.engine.runner import KVLayout, ModelInfo
from baton.messages.spans import Span, span_items

FORMAT_VERSION = 1
"""To be raised when the encoding of keys changes: keys of different versions are never equal."""

KEY_BYTES = 32

_LENGTH = struct.Struct("<I")
_TOKEN_BYTES = 4


def _field(tag: bytes, payload: bytes) -> bytes:
    return tag + _LENGTH.pack(len(payload)) + payload


@dataclass(frozen=True, slots=True)
class CacheKeyFields:
    """The fields that all keys of one engine have in common."""

    model_fingerprint: str
    dtype: str
    layout: str
    """The shape of a block and the kernels that fill it: KV of different layouts is never interchangeable."""

    @classmethod
    def of(cls, model: ModelInfo, layout: KVLayout) -> CacheKeyFields:
        """The fields of a loaded model."""
        return cls(model.fingerprint, layout.dtype, f"{layout.geometry}/{layout.block_size}/{model.numerics}")


def group_key(key: bytes, group: int) -> bytes:
    """The key of one group's block in a stripe: the stripe's key for group 0, with one more byte for the others."""
    return key + bytes((group,)) if group else key


class BlockHasher:
    """Computes the keys of an engine's blocks. Token ids must be unsigned 32-bit numbers; others raise struct.error."""

    def __init__(self, fields: CacheKeyFields, block_size: int) -> None:
        self._fields = fields
        self._block_size = block_size
        self._parent_head = b"P" + _LENGTH.pack(KEY_BYTES)
        self._tokens_head = b"T" + _LENGTH.pack(block_size * _TOKEN_BYTES)

    def root(self, *, cache_salt: str = "", lora_id: str = "", is_long: bool = False, kv_bits: str = "") -> bytes:
        """The parent key of a request's first block. Requests with different `cache_salt` never share a block, nor do
        those with different adapters (`lora_id`, a digest) or rotary angles (`is_long`, see `LongSequences`), nor those
        with KV that was computed under other numerics (`kv_bits`, see `Submit.kv_bits`).
        """
        return hashlib.sha256(
            b"".join(
                (
                    _field(b"V", _LENGTH.pack(FORMAT_VERSION)),
                    _field(b"M", self._fields.model_fingerprint.encode()),
                    _field(b"D", self._fields.dtype.encode()),
                    _field(b"L", self._fields.layout.encode()),
                    _field(b"B", _LENGTH.pack(self._block_size)),
                    _field(b"A", lora_id.encode()),
                    _field(b"S", cache_salt.encode()),
                    _field(b"R", b"long") if is_long else b"",
                    _field(b"N", kv_bits.encode()) if kv_bits else b"",
                )
            )
        ).digest()

    def block_key(self, parent: bytes, token_ids: Sequence[int], items: Sequence[str] = ()) -> bytes:
        """The key of one full block. `items`: what `span_items` says of it."""
        if len(token_ids) != self._block_size:
            raise ValueError(f"a key names a full block of {self._block_size} tokens, not {len(token_ids)}")
        tokens = struct.pack(f"<{self._block_size}I", *token_ids)
        of_spans = b"".join(_field(b"I", item.encode()) for item in items)
        return hashlib.sha256(self._parent_head + parent + of_spans + self._tokens_head + tokens).digest()

    def extend(
        self, keys: list[bytes], parent: bytes, token_ids: Sequence[int], spans: Sequence[Span] = (), start: int = 0
    ) -> None:
        """Append the keys of the full blocks in `token_ids`, which continue a chain whose last key is `parent`.

        `spans`: those of the prompt. `start`: the position of the first token, which begins a block.

        Gives the same keys as `block_key`, and for text packs all tokens at once, since this is most of the cost of
        admitting a long prompt.
        """
        size = self._block_size
        num_blocks = len(token_ids) // size
        in_spans = min(num_blocks, max(0, -(-(max((span.stop for span in spans), default=0) - start) // size)))
        passed = 0
        for first in range(0, in_spans * size, size):
            # A prompt may have a thousand spans and tens of thousands of blocks.
            while passed < len(spans) and spans[passed].stop <= start + first:
                passed += 1
            items = span_items(spans[passed : passed + size], start + first, start + first + size)
            parent = self.block_key(parent, token_ids[first : first + size], items)
            keys.append(parent)
        if in_spans:
            token_ids, num_blocks = token_ids[in_spans * size :], num_blocks - in_spans
        width = self._block_size * _TOKEN_BYTES
        packed = struct.pack(f"<{num_blocks * size}I", *token_ids[: num_blocks * size])
        sha256, head, middle = hashlib.sha256, self._parent_head, self._tokens_head
        for offset in range(0, num_blocks * width, width):
            parent = sha256(head + parent + middle + packed[offset : offset + width]).digest()
            keys.append(parent)

    def _root_of(self, request: Request) -> bytes:
        return self.root(
            cache_salt=request.spec.cache_salt,
            lora_id=request.adapter,
            is_long=request.is_long,
            kv_bits=request.kv_bits,
        )

    def extend_request(self, request: Request, num_tokens: int) -> None:
        """Bring `request.block_hashes` up to all full blocks of its first `num_tokens` tokens (prompt and output)."""
        keys = request.block_hashes
        full, done = num_tokens // self._block_size, len(keys)
        if full <= done:
            return
        parent = keys[-1] if keys else self._root_of(request)
        start, stop = done * self._block_size, full * self._block_size
        self.extend(keys, parent, request.token_ids(start, stop), request.spans, start)
