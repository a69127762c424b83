"""Digests of offered blocks, by which a receiver knows that what it read is what the sender computed.

Computing them wakes no thread. Each side computes them in the thread that has just worked on the blocks: the sender in
the engine's thread, once the tokens and offers of the step that filled them are on their way; the receiver in the
mover's thread, once it has reported the read, while the event loop asks whether the lease was held. The event loop
collects them when it handles its next event.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from baton.config import KVDigests
from baton.engine.kv_cache.block_hash import group_key
from baton.engine.request import Request
from baton.engine.runner import KVLayout
from baton.messages.kv_cache import NULL_BLOCK
from baton.runner.blocks.digest_definition import BlockDigests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.link.link_messages import SAMPLE_EVERY

Item = TypeVar("Item")


def digest_every(setting: KVDigests) -> int:
    """One block in how many has a digest; 0: none has."""
    return {"on": 1, "sampled": SAMPLE_EVERY, "off": 0}[setting]


class BlockName(NamedTuple):
    """By which the digest of a sender's block is found again, when a later request offers the same block."""

    key: bytes
    """Prefix-cache key of what the block holds; empty if it has none."""
    is_cached: bool
    """Whether the block was computed for an earlier request."""
    group: int = 0
    """The group of layers whose KV the block holds."""


def block_names(request: Request, layout: KVLayout, first: int, count: int) -> Sequence[BlockName]:
    """The names of `count` blocks of a request's prompt, from entry `first` of its block table on."""
    groups, names = len(layout.groups), []
    num_cached = request.num_cached_tokens // layout.block_size
    for entry in range(first, first + count):
        stripe, group = divmod(entry, groups)
        is_named = stripe < len(request.block_hashes)
        key = group_key(request.block_hashes[stripe], group) if is_named else b""
        names.append(BlockName(key, stripe < num_cached, group))
    return names


def names_of_cached(keys: Sequence[bytes], num_groups: int) -> Sequence[BlockName]:
    """The names of cached blocks: of each stripe with one of these keys, those of all groups of layers."""
    return [BlockName(group_key(key, group), True, group) for key in keys for group in range(num_groups)]


class AskedDigests:
    """Digests that other processes compute, too (`BlockDigests`): all are asked for before the first is waited for."""

    def __init__(self, ask: Callable[[Sequence[int], Division], Callable[[], Sequence[int]]]) -> None:
        """`ask` asks for digests, and returns a function that waits for them."""
        self.ask = ask

    def __call__(self, ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        """Ask and wait."""
        return self.ask(ids, division)()


class OfferedDigests:
    """Digests of a sender's blocks, or of their parts. Belongs to one thread.

    Each is computed once, after its block was filled.

    A block of a cached prefix keeps the digest that it had when it was computed, so that later damage to it is found.
    """

    def __init__(self, digests: BlockDigests) -> None:
        self._ask = digests.ask if isinstance(digests, AskedDigests) else partial(partial, digests)
        self.num_computed = 0
        """How many were not known when they were asked for."""
        self._known: dict[int, tuple[bytes, dict[int, Sequence[int]]]] = {}
        """For each block, the key of what it held, and the digests of that, by the number of parts."""

    def digests_of(self, block_ids: Sequence[int], names: Sequence[BlockName], parts: int = 1) -> Sequence[int]:
        """`parts` digests for each of these blocks, which have these names; zeros for the null block.

        Raises ValueError if a block of a cached prefix is not any more what was computed, as far as that is noticed:
        a block gets digests of so many parts for the first time when others of it are known.
        """
        named = {block_id: name for block_id, name in zip(block_ids, names, strict=True) if block_id != NULL_BLOCK}
        for block_id, name in named.items():
            if not self._is_known(block_id, name):
                self._known[block_id] = (name.key, {})
        missing = {block_id: name for block_id, name in named.items() if parts not in self._known[block_id][1]}
        computed = self._compute(missing, parts)
        self.num_computed += len(missing) * parts
        self._check_unchanged(missing)
        for block_id, digests in computed.items():
            self._known[block_id][1][parts] = digests
        nothing = (0,) * parts
        return [
            digest
            for block_id in block_ids
            for digest in (self._known[block_id][1][parts] if block_id in named else nothing)
        ]

    def _compute(self, blocks: Mapping[int, BlockName], parts: int) -> dict[int, Sequence[int]]:
        """The `parts` digests of each of these blocks, of what they hold now."""
        asked: list[tuple[Sequence[int], Callable[[], Sequence[int]]]] = []
        # Which bytes of a block are digested depends on its group of layers.
        for group in {name.group for name in blocks.values()}:
            some = [block_id for block_id, name in blocks.items() if name.group == group]
            ids = [block * parts + part for block in some for part in range(parts)]
            asked.append((some, self._ask(ids, Division(parts, group))))
        computed: dict[int, Sequence[int]] = {}
        for of_group, answer in asked:
            digests = answer()
            computed.update((block, digests[at * parts : (at + 1) * parts]) for at, block in enumerate(of_group))
        return computed

    def _check_unchanged(self, blocks: Mapping[int, BlockName]) -> None:
        """Raise ValueError if a block does not hold any more what its known digests are of."""
        by_parts: defaultdict[int, dict[int, BlockName]] = defaultdict(dict)
        for block_id, name in blocks.items():
            for parts in list(self._known[block_id][1])[:1]:
                by_parts[parts][block_id] = name
        for parts, some in by_parts.items():
            for block_id, digests in self._compute(some, parts).items():
                if list(digests) != list(self._known[block_id][1][parts]):
                    raise ValueError(f"block {block_id} does not hold any more what was computed")

    def _is_known(self, block_id: int, name: BlockName) -> bool:
        """Whether digests of a block's content are known."""
        return name.is_cached and bool(name.key) and self._known.get(block_id, (b"",))[0] == name.key


class LazyInbox(Generic[Item]):
    """Items from other threads, which an event loop collects when it has something to do anyway.

    The loop is woken for an item only if somebody waits for it: mostly nobody does, and each wake-up delays others.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        """`wake` is called from the other thread when it adds an item, if the last `collect` found one awaited."""
        self._wake = wake
        self._items: deque[Item] = deque()
        self._is_awaited = False

    def add(self, item: Item) -> None:
        """Add an item, from any thread."""
        self._items.append(item)
        if self._is_awaited:
            self._wake()

    def collect(self, handle: Callable[[Item], None], is_awaited: Callable[[], bool]) -> None:
        """Call `handle` with each item; `is_awaited`, called then, decides whether later ones wake the loop."""
        self._handle_all(handle)
        self._is_awaited = is_awaited()
        # Items that came before the line above has run have woken nobody.
        self._handle_all(handle)

    def _handle_all(self, handle: Callable[[Item], None]) -> None:
        while self._items:
            handle(self._items.popleft())
