"""Digests of what a sender offers, by which a receiver knows that what it read is what had been computed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from baton.engine.block_hash import group_key
from baton.engine.block_pool import NULL_BLOCK
from baton.engine.request import Request
from baton.engine.runner.base import KVLayout
from baton.engine.runner.block_digests import BlockDigests


class BlockName(NamedTuple):
    """What the digest of a sender's block is remembered by."""

    key: bytes
    """Of what it holds; empty when that has none."""
    is_cached: bool
    """It was computed for an earlier request."""


def block_names(request: Request, layout: KVLayout, first: int, count: int) -> Sequence[BlockName]:
    """Of `count` blocks of a prompt, from entry `first` of its table on."""
    groups, names = len(layout.groups), []
    num_cached = request.num_cached_tokens // layout.block_size
    for entry in range(first, first + count):
        stripe, group = divmod(entry, groups)
        is_named = stripe < len(request.block_hashes)
        key = group_key(request.block_hashes[stripe], group) if is_named else b""
        names.append(BlockName(key, stripe < num_cached))
    return names


class OfferedDigests:
    """Each is computed once, when its block was filled. Called from one thread.

    A block of a cached prefix keeps the digest that it had when it was computed: one that was damaged since is found.
    """

    def __init__(self, digests: BlockDigests) -> None:
        self._digests = digests
        self._known: dict[int, tuple[bytes, int]] = {}
        """By block: the key of what it held, and the digest of that."""

    def of(self, block_ids: Sequence[int], names: Sequence[BlockName]) -> Sequence[int]:
        """One for each of these blocks; 0 for the null block."""
        named = {block_id: name for block_id, name in zip(block_ids, names, strict=True) if block_id != NULL_BLOCK}
        missing = [block_id for block_id, name in named.items() if not self._is_known(block_id, name)]
        for block_id, digest in zip(missing, self._digests(missing), strict=True):
            self._known[block_id] = (named[block_id].key, digest)
        return [self._known[block_id][1] if block_id in named else 0 for block_id in block_ids]

    def _is_known(self, block_id: int, name: BlockName) -> bool:
        return name.is_cached and bool(name.key) and self._known.get(block_id, (b"",))[0] == name.key


def hashing_thread() -> Executor:
    """A thread that computes digests when nobody else wants its core: whoever moves the bytes or talks goes first."""
    return ThreadPoolExecutor(1, "baton-digests", initializer=_step_back)


def _step_back() -> None:
    # Of this thread alone, which Linux can do and others can't.
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
