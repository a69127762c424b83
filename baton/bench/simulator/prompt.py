"""Prompts without tokens: their lengths and the keys of their blocks. Equal prefixes have equal keys.

Engine and router compute a block's key as a hash over tokens. Here keys are hashes over the names of the workload's
pieces, computed all at once: prompts share keys if and only if they share tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128
from typing import SupportsIndex

from baton.bench.workloads.workload import Piece
from baton.engine.kv_cache.block_hash import KEY_BYTES
from router.admission.request import ValidRequest
from router.placement.cache_view import EXPECTED_BLOCKS, KeyScheme, PromptKeys

TOKEN = 7
"""The id of every token."""


class RepeatedToken(list[int]):
    """A read-only list that repeats one token without keeping it in memory."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return self._length > 0

    def __getitem__(self, index: SupportsIndex | slice) -> list[int]:  # type: ignore[override]
        if not isinstance(index, slice):
            raise TypeError("a single token of a simulated prompt can't be read, only slices")
        return RepeatedToken(len(range(*index.indices(self._length))))

    def __add__(self, other: list[int]) -> list[int]:  # type: ignore[override]
        return RepeatedToken(self._length + len(other))


class SimulatedPrompt(RepeatedToken):
    """A request's prompt, and the keys of all blocks that prompt and output fill."""

    __slots__ = ("block_keys", "num_prompt_blocks")

    def __init__(self, pieces: Sequence[Piece], output_length: int, block_size: int, name: str) -> None:
        """`name`: the request's name, from which the keys of its output are made."""
        length = sum([piece.length for piece in pieces])
        super().__init__(length)
        self.num_prompt_blocks = length // block_size
        keys = _piece_keys(pieces, block_size)
        num_blocks = (length + output_length) // block_size
        keys += _keys(b"output" + name.encode(), num_blocks - len(keys))
        self.block_keys = keys


class SimulatedKeys(PromptKeys):
    """A prompt's keys for the router; nothing is left to compute."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._all = keys

    @classmethod
    def of(cls, request: ValidRequest) -> SimulatedKeys:
        prompt = request.prompt_token_ids
        assert isinstance(prompt, SimulatedPrompt)
        return cls(prompt.block_keys[: prompt.num_prompt_blocks])

    def first(self, fields: KeyScheme, num_blocks: int) -> Sequence[bytes]:
        return self._all[:num_blocks]

    def milestones(self, fields: KeyScheme) -> Sequence[bytes]:
        known = min(EXPECTED_BLOCKS, len(self._all))
        return [self._all[(1 << power) - 1] for power in range(known.bit_length())]


def _piece_keys(pieces: Sequence[Piece], block_size: int) -> list[bytes]:
    """The keys of full blocks. A key depends on everything before it, since its seed contains the key before."""
    keys: list[bytes] = []
    parent = b""
    straddling = b""
    """The parts of pieces in the current, partly filled block."""
    filled = 0
    for piece in pieces:
        offset = 0
        name = piece.hash_id.to_bytes(8, "little")
        if filled:
            offset = min(block_size - filled, piece.length)
            straddling += name + offset.to_bytes(8, "little")
            filled += offset
            if filled == block_size:
                keys += _keys(parent + straddling, 1)
                parent, straddling, filled = keys[-1], b"", 0
        whole = (piece.length - offset) // block_size
        if whole:
            # A longer piece of the same name starts with the same keys.
            keys += _keys(parent + name + offset.to_bytes(8, "little"), whole)
            parent = keys[-1]
        rest = piece.length - offset - whole * block_size
        if rest:
            at = offset + whole * block_size
            straddling, filled = name + at.to_bytes(8, "little") + rest.to_bytes(8, "little"), rest
    return keys


def _keys(seed: bytes, count: int) -> list[bytes]:
    if count <= 0:
        return []
    digest = shake_128(seed).digest(count * KEY_BYTES)
    return [digest[start : start + KEY_BYTES] for start in range(0, count * KEY_BYTES, KEY_BYTES)]
