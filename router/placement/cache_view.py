"""The prefix caches of all nodes and the rows of their encoders, as far as nodes have reported them.

Beside them it has the blocks that nodes will have soon. A node that is attached is asked with WatchKVCache, and answers
with all its keys and then with numbered events. If an event was missed, the node is asked again, and what was known of
it is forgotten. A prompt that is sent to a node counts as cached there until the attempt ends: by the time that another
request with the same beginning gets its turn, it is. A prefix counts as far as one tier has it: if its end was evicted
to the host's memory, a node may find more. No I/O, no clock.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVCacheUpdate, Tier
from baton.messages.node import NodeDescription
from baton.messages.spans import EncoderContent, Span, rows_key, span_items
from router.admission.request import ValidRequest
from router.placement.block_index import BlockIndex

_MOST_BLOCKS = 4096
"""The most blocks of a prompt that are looked up: the key of each takes two microseconds of the event loop. The
tokens after them are assumed to be cached nowhere."""
_LOOKED_UP_MORE = 8
"""The first block of a prompt is looked up alone, since most prompts are new. While a node has all blocks that were
looked up, the next lookup is for this many times as many blocks."""
EXPECTED_BLOCKS = 64
"""How many of a prompt's first blocks a node is expected to have, so that similar prompts go there too."""


class KeyScheme(NamedTuple):
    """The parameters on which keys of blocks depend."""

    fields: CacheKeyFields
    most_short_tokens: int
    """See `NodeDescription`."""
    block_size: int

    @property
    def hasher(self) -> BlockHasher:
        return BlockHasher(self.fields, self.block_size)


def key_scheme_of(node: NodeDescription) -> KeyScheme | None:
    """The key scheme of a node; None if it does not report its layout."""
    if not node.kv_layout:
        return None
    fields = CacheKeyFields(node.model_fingerprint, node.dtype, node.kv_layout)
    return KeyScheme(fields, node.most_short_tokens, node.block_size)


class CachedTokens(NamedTuple):
    """How many of a prompt's first tokens each node has, by incarnation; nodes that have none are left out."""

    soon: Mapping[str, int]
    """The tokens that are there or on their way there."""
    on_device: Mapping[str, int]
    """The tokens of which the nodes have reported that they have KV where others can pull it from: in no host tier."""


NOTHING_CACHED = CachedTokens({}, {})


class PromptKeys:
    """The keys of one prompt's blocks, each computed once, when it is needed."""

    def __init__(
        self, token_ids: Sequence[int], cache_salt: str, spans: Sequence[Span] = (), adapter: str = ""
    ) -> None:
        """`adapter`: digest of the adapter with which the prompt is computed; empty: none."""
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._spans = spans
        self._adapter = adapter
        self._keys: dict[KeyScheme, list[bytes]] = {}
        self._milestones: dict[KeyScheme, list[bytes]] = {}

    def first(self, scheme: KeyScheme, num_blocks: int) -> Sequence[bytes]:
        """The keys of the first `num_blocks` full blocks, or of as many as there are, up to a bound."""
        block_size = scheme.block_size
        keys = self._keys.setdefault(scheme, [])
        num_blocks = min(num_blocks, len(self._token_ids) // block_size, _MOST_BLOCKS)
        if len(keys) < num_blocks:
            parent = keys[-1] if keys else self._root(scheme)
            start = len(keys) * block_size
            scheme.hasher.extend(keys, parent, self._token_ids[start : num_blocks * block_size], self._spans, start)
        return keys[:num_blocks]

    def milestones(self, scheme: KeyScheme) -> Sequence[bytes]:
        """Hashes of the first one, two, four, eight … full blocks: enough to know about how long a beginning the prompt
        has in common with another one. Cheaper than keys, since the key of a block takes those of all blocks before it.
        """
        milestones = self._milestones.get(scheme)
        if milestones is None:
            block_size = scheme.block_size
            num_blocks = min(EXPECTED_BLOCKS, len(self._token_ids) // block_size)
            name = hashlib.sha256(self._root(scheme))
            milestones, done = [], 0
            for end in (block_size << power for power in range(num_blocks.bit_length())):
                name.update(struct.pack(f"<{end - done}I", *self._token_ids[done:end]))
                if self._spans:
                    name.update(" ".join(span_items(self._spans, done, end)).encode())
                milestones.append(name.digest())
                done = end
            self._milestones[scheme] = milestones
        return milestones

    def _root(self, scheme: KeyScheme) -> bytes:
        is_long = 0 < scheme.most_short_tokens < len(self._token_ids)
        return scheme.hasher.root(cache_salt=self._cache_salt, lora_id=self._adapter, is_long=is_long)


class CacheView:
    """The caches of all attached nodes, by incarnation."""

    def __init__(self) -> None:
        self._tiers: dict[Tier, BlockIndex] = {"device": BlockIndex(), "host": BlockIndex()}
        self._rows = BlockIndex()
        """The inputs (images, say) of which nodes have rows, by `rows_key`."""
        self._expected = BlockIndex()
        self._position: dict[str, int | None] = {}
        """The number of the next event; None while the node's first answer is awaited."""

    @property
    def num_keys(self) -> int:
        """Number of reported keys, over all nodes and tiers."""
        return sum(map(len, self._tiers.values()))

    @property
    def num_expected(self) -> int:
        """Number of milestones of prompts that were sent to nodes."""
        return len(self._expected)

    def watch(self, incarnation: str) -> None:
        """The node was asked for its cache (WatchKVCache)."""
        self._forget_reported(incarnation)
        self._position[incarnation] = None

    def forget(self, incarnation: str) -> None:
        """The node is gone. Idempotent, and quick however many keys it had."""
        self._position.pop(incarnation, None)
        self._forget_reported(incarnation)
        self._expected.forget(incarnation)

    def updated(self, incarnation: str, update: KVCacheUpdate) -> bool:
        """Take an update of a node. True: an event was missed, so the node must be asked again, followed by `watch`."""
        if incarnation not in self._position:
            return False
        if update.restart:
            self._forget_reported(incarnation)
        elif self._position[incarnation] is None:
            return False  # older than the answer that is awaited
        elif self._position[incarnation] != update.first_sequence:
            return True
        self._position[incarnation] = update.next_sequence
        for event in update.events:
            self._apply(incarnation, event)
        return False

    def holders(self, content: EncoderContent) -> Collection[str]:
        """The incarnations of the nodes that have rows of a content."""
        return self._rows.leading([rows_key(content.digest)]).keys()

    def expect(self, incarnation: str, milestones: Sequence[bytes]) -> None:
        """A prompt with these `PromptKeys.milestones` is sent to the node."""
        self._expected.add(incarnation, milestones)

    def expect_no_more(self, incarnation: str, milestones: Sequence[bytes]) -> None:
        """The attempt with this prompt has ended, and the node has reported the blocks that it computed."""
        self._expected.remove(incarnation, milestones)

    def cached_tokens(self, prompt: PromptKeys, nodes: Sequence[NodeDescription]) -> Mapping[str, int]:
        """How many of a prompt's first tokens each node has, or will have soon; nodes that have none are left out.

        Keys are computed only as far as a node has all of them.
        """
        return self.cached_by_scheme(
            prompt, frozenset(scheme for node in nodes if (scheme := key_scheme_of(node)) is not None)
        ).soon

    def cached_by_scheme(self, prompt: PromptKeys, schemes: Set[KeyScheme]) -> CachedTokens:
        """What all nodes with these key schemes have cached of a prompt."""
        reported = {tier: index for tier, index in self._tiers.items() if not index.is_empty}
        has_expected = not self._expected.is_empty
        if not (reported or has_expected):
            return NOTHING_CACHED
        on_device: dict[str, int] = {}
        cached: dict[str, int] = {}
        for scheme in schemes:
            num_blocks: dict[str, int] = {}
            for tier, index in reported.items():
                for incarnation, count in _leading(prompt, scheme, index).items():
                    num_blocks[incarnation] = max(count, num_blocks.get(incarnation, 0))
                    if tier == "device":
                        on_device[incarnation] = count * scheme.block_size
            on_their_way = self._expected.leading(prompt.milestones(scheme)) if has_expected else {}
            for incarnation, passed in on_their_way.items():
                num_blocks[incarnation] = max(1 << passed - 1, num_blocks.get(incarnation, 0))
            for incarnation, count in num_blocks.items():
                cached[incarnation] = count * scheme.block_size
        return CachedTokens(cached, on_device)

    def _forget_reported(self, incarnation: str) -> None:
        for index in (*self._tiers.values(), self._rows):
            index.forget(incarnation)

    def _index(self, tier: Tier) -> BlockIndex:
        return self._rows if tier == "encoder" else self._tiers[tier]

    def _apply(self, incarnation: str, event: KVCacheEvent) -> None:
        match event:
            case BlockStored(hashes, tier=tier):
                self._index(tier).add(incarnation, hashes)
            case BlockRemoved(hashes, tier):
                self._index(tier).remove(incarnation, hashes)
            case AllBlocksCleared():
                for index in self._tiers.values():
                    index.forget(incarnation)


def _leading(prompt: PromptKeys, scheme: KeyScheme, index: BlockIndex) -> Mapping[str, int]:
    num_blocks = 1
    while True:
        keys = prompt.first(scheme, num_blocks)
        lengths = index.leading(keys)
        if len(keys) < num_blocks or max(lengths.values(), default=0) < num_blocks:
            return lengths
        num_blocks *= _LOOKED_UP_MORE


def prompt_keys_of(request: ValidRequest) -> PromptKeys:
    """The keys of a request's blocks."""
    return PromptKeys(request.prompt_token_ids, request.cache_salt, request.spans, request.adapter)
