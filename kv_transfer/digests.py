"""Digests of what a sender offers, by which a receiver knows that what it read is what had been computed.

Nobody is woken for them. Each side computes them in the thread that has just had the blocks in hand: the sender in the
engine's, when the tokens and offers of the step that filled them are on their way, the receiver in the mover's, when it
has said that they were read and while its loop asks whether the lease held. The loop picks them up when it comes by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from baton.config import KVDigests
from baton.engine.kv_cache.block_hash import group_key
from baton.engine.request import Request
from baton.engine.runner import KVLayout
from baton.messages.kv_cache import NULL_BLOCK
from baton.runner.blocks.block_digests import BlockDigests
from kv_transfer.sampling import SAMPLE_EVERY

Found = TypeVar("Found")


def digest_every(setting: KVDigests, memory_kind: str) -> int:
    """One block in how many has a digest; 0: none. `auto` means all in memory of the host, and samples on a device,
    from where blocks must be copied for it."""
    if setting == "auto":
        setting = "on" if memory_kind == "DRAM" else "sampled"
    return {"on": 1, "sampled": SAMPLE_EVERY, "off": 0}[setting]


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


class PickedUp(Generic[Found]):
    """What another thread found, for a loop that picks it up when it comes by: mostly nobody waits for it, and a loop
    that is woken for nothing delays whoever has something to say."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the other thread after `pick_up`, when something was found that somebody awaits."""
        self._wake = wake
        self._found: deque[Found] = deque()
        self._awaited = False

    def add(self, found: Found) -> None:
        """From any thread."""
        self._found.append(found)
        if self._awaited:
            self._wake()

    def pick_up(self, take: Callable[[Found], None], is_awaited: Callable[[], bool]) -> None:
        """Hand on what is known, and be woken for the rest if somebody waits for nothing else by then."""
        self._hand_on(take)
        self._awaited = is_awaited()
        # What was found in between woke nobody.
        self._hand_on(take)

    def _hand_on(self, take: Callable[[Found], None]) -> None:
        for found in self._taken():
            take(found)

    def _taken(self) -> Iterator[Found]:
        while self._found:
            yield self._found.popleft()
