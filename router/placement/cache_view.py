"""What nodes have in their prefix caches, as far as they told; and what they are about to have. No I/O, no clock.

A node that is attached is asked with WatchKVCache and answers with all that it has, and then with numbered events. A
reader that does not stand where an update begins has missed something: it forgets what it knew and asks once more.
Prompts that were sent to a node count as cached there from then on, until the attempt is over: by the time that another
request with the same beginning gets its turn, they are. A prefix counts as far as one tier has it: where its end was
evicted to the host's memory a node may find more.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence, Set

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVCacheUpdate, Tier
from baton.messages.node import NodeDescription
from router.placement.block_index import BlockIndex

_MOST_BLOCKS = 4096
"""Of a prompt that are looked up: a block's key takes two microseconds, in which nobody else hears anything. What is
behind them is taken to be computed, everywhere alike."""
_LOOKED_UP_MORE = 8
"""The first block of a prompt is looked up alone, since most prompts are new. While a node has all the blocks that were
looked up, so many times as many are looked up next."""
EXPECTED_BLOCKS = 64
"""A node that a prompt was sent to is expected to have so many of its first blocks, so that other prompts that begin
like it are sent there too."""

CacheKeys = tuple[str, str, str, int]
"""What keys depend on: model, dtype, layout and block size."""


def cache_keys_of(node: NodeDescription) -> CacheKeys | None:
    """None for a node that doesn't tell how it names its blocks."""
    return (node.model_fingerprint, node.dtype, node.kv_layout, node.block_size) if node.kv_layout else None


class PromptKeys:
    """The keys of one request's blocks, computed when they are asked for, and once."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str) -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._keys: dict[CacheKeys, list[bytes]] = {}
        self._milestones: dict[CacheKeys, list[bytes]] = {}

    def first(self, fields: CacheKeys, num_blocks: int) -> Sequence[bytes]:
        """Of so many full blocks, or of all that there are up to a bound."""
        *words, block_size = fields
        hasher = BlockHasher(CacheKeyFields(*words), block_size)
        keys = self._keys.setdefault(fields, [])
        num_blocks = min(num_blocks, len(self._token_ids) // block_size, _MOST_BLOCKS)
        if len(keys) < num_blocks:
            parent = keys[-1] if keys else hasher.root(cache_salt=self._cache_salt)
            hasher.extend(keys, parent, self._token_ids[len(keys) * block_size : num_blocks * block_size])
        return keys[:num_blocks]

    def milestones(self, fields: CacheKeys) -> Sequence[bytes]:
        """Names of its beginnings of one, two, four, eight ... full blocks: enough to know about how long it has one in
        common with another prompt. Not the keys of those blocks, each of which would take that of every block before.
        """
        found = self._milestones.get(fields)
        if found is None:
            *words, block_size = fields
            num_blocks = min(EXPECTED_BLOCKS, len(self._token_ids) // block_size)
            name = hashlib.sha256(BlockHasher(CacheKeyFields(*words), block_size).root(cache_salt=self._cache_salt))
            found, done = [], 0
            for end in (block_size << power for power in range(num_blocks.bit_length())):
                name.update(struct.pack(f"<{end - done}I", *self._token_ids[done:end]))
                found.append(name.digest())
                done = end
            self._milestones[fields] = found
        return found


class CacheView:
    """Every attached node's caches, by incarnation."""

    def __init__(self) -> None:
        self._tiers: dict[Tier, BlockIndex] = {"device": BlockIndex(), "host": BlockIndex()}
        self._expected = BlockIndex()
        self._position: dict[str, int | None] = {}
        """The event that comes next; None while everything is awaited."""

    @property
    def num_keys(self) -> int:
        """Blocks of which nodes told, over all nodes and tiers."""
        return sum(map(len, self._tiers.values()))

    @property
    def num_expected(self) -> int:
        """Blocks by which prompts on their way are known."""
        return len(self._expected)

    def watch(self, incarnation: str) -> None:
        """The node was asked for everything."""
        self._forget_told(incarnation)
        self._position[incarnation] = None

    def forget(self, incarnation: str) -> None:
        """The node is gone. Idempotent, and quick whatever it had."""
        self._position.pop(incarnation, None)
        self._forget_told(incarnation)
        self._expected.forget(incarnation)

    def updated(self, incarnation: str, update: KVCacheUpdate) -> bool:
        """Take what a node told. True: something was missed; ask it for everything, which `watch` is told of."""
        if incarnation not in self._position:
            return False
        if update.restart:
            self._forget_told(incarnation)
        elif self._position[incarnation] is None:
            return False  # is older than what was asked for
        elif self._position[incarnation] != update.first_sequence:
            return True
        self._position[incarnation] = update.next_sequence
        for event in update.events:
            self._apply(incarnation, event)
        return False

    def expect(self, incarnation: str, milestones: Sequence[bytes]) -> None:
        """A prompt with these `PromptKeys.milestones` goes there."""
        self._expected.add(incarnation, milestones)

    def expect_no_more(self, incarnation: str, milestones: Sequence[bytes]) -> None:
        """It is over; what was computed has been told by now."""
        self._expected.remove(incarnation, milestones)

    def cached_tokens(self, prompt: PromptKeys, nodes: Sequence[NodeDescription]) -> Mapping[str, int]:
        """How many of a prompt's first tokens each node has; those that have none are left out.

        Keys are computed only as far as somebody has them all.
        """
        return self.cached_of(prompt, frozenset(keys for node in nodes if (keys := cache_keys_of(node)) is not None))

    def cached_of(self, prompt: PromptKeys, names: Set[CacheKeys]) -> Mapping[str, int]:
        """`cached_tokens` of all nodes that name their blocks so."""
        told = [index for index in self._tiers.values() if not index.is_empty]
        expects = not self._expected.is_empty
        if not (told or expects):
            return {}
        found: dict[str, int] = {}
        for fields in names:
            num_blocks = _leading(prompt, fields, told)
            on_their_way = self._expected.leading(prompt.milestones(fields)) if expects else {}
            for incarnation, passed in on_their_way.items():
                num_blocks[incarnation] = max(1 << passed - 1, num_blocks.get(incarnation, 0))
            for incarnation, count in num_blocks.items():
                found[incarnation] = count * fields[-1]
        return found

    def _forget_told(self, incarnation: str) -> None:
        for index in self._tiers.values():
            index.forget(incarnation)

    def _apply(self, incarnation: str, event: KVCacheEvent) -> None:
        match event:
            case BlockStored(hashes, tier=tier):
                self._tiers[tier].add(incarnation, hashes)
            case BlockRemoved(hashes, tier):
                self._tiers[tier].remove(incarnation, hashes)
            case AllBlocksCleared():
                self._forget_told(incarnation)


def _leading(prompt: PromptKeys, fields: CacheKeys, indices: Sequence[BlockIndex]) -> dict[str, int]:
    if not indices:
        return {}
    num_blocks = 1
    while True:
        keys = prompt.first(fields, num_blocks)
        found: dict[str, int] = {}
        for index in indices:
            for incarnation, count in index.leading(keys).items():
                found[incarnation] = max(count, found.get(incarnation, 0))
        if len(keys) < num_blocks or max(found.values(), default=0) < num_blocks:
            return found
        num_blocks *= _LOOKED_UP_MORE
