"""The prefix cache against a naive model of it: prefixes in a list instead of hashes, blocks and linked lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.block_table import AllocationAnswer
from baton.engine.kv_cache.manager import KVCacheManager
from baton.engine.request import Request
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

BLOCK, NUM_BLOCKS = 2, 11
Prefix = tuple[int, ...]


class NaiveCache:
    """The prefixes that can be found, least recently found or held first: in this order they are evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_worthless = num_blocks
        self.idle: list[Prefix] = []
        self.held: Counter[Prefix] = Counter()
        self.tables: dict[str, list[Prefix | None]] = {}
        self.offered: dict[str, int] = {}
        """Full blocks of each that had their chance to be found."""

    @property
    def num_free(self) -> int:
        return self.num_worthless + len(self.idle)

    def known(self, prefix: Prefix) -> bool:
        return prefix in self.idle or self.held[prefix] > 0

    def found(self, tokens: Sequence[int]) -> list[Prefix]:
        prefixes = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)]
        missing = next((i for i, prefix in enumerate(prefixes) if not self.known(prefix)), len(prefixes))
        return prefixes[:missing]

    def admit(self, name: str, tokens: Sequence[int]) -> bool:
        """Hold what is found, take the rest, compute it; False, and nothing changes, without room."""
        found = self.found(tokens)
        missing = -(-len(tokens) // BLOCK) - len(found)
        if missing + sum(prefix in self.idle for prefix in found) > self.num_free:
            return False
        for prefix in found:
            if prefix in self.idle:
                self.idle.remove(prefix)
            self.held[prefix] += 1
        self.tables[name] = [*found, *self.take(missing)]
        self.offered[name] = len(found)
        self.compute(name, tokens)
        return True

    def grow(self, name: str, tokens: Sequence[int]) -> bool:
        """Room for more tokens of a live request, which are then computed."""
        missing = -(-len(tokens) // BLOCK) - len(self.tables[name])
        if missing > self.num_free:
            return False
        self.tables[name] += self.take(missing)
        self.compute(name, tokens)
        return True

    def take(self, count: int) -> list[None]:
        evicted = max(0, count - self.num_worthless)
        self.num_worthless -= count - evicted
        del self.idle[:evicted]
        return [None] * count

    def compute(self, name: str, tokens: Sequence[int]) -> None:
        table = self.tables[name]
        for index in range(self.offered[name], len(tokens) // BLOCK):
            prefix = tuple(tokens[: (index + 1) * BLOCK])
            # Of two blocks with the same KV only the first one is found.
            if not self.known(prefix):
                table[index] = prefix
                self.held[prefix] = 1
        self.offered[name] = len(tokens) // BLOCK

    def free(self, name: str) -> None:
        for prefix in reversed(self.tables.pop(name)):
            if prefix is None:
                self.num_worthless += 1
                continue
            self.held[prefix] -= 1
            if not self.held[prefix]:
                self.idle.append(prefix)


class CacheMachine(RuleBasedStateMachine):
    """Calls manager and model in the same way; they must give the same results."""

    live: Bundle[Request] = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        hasher = BlockHasher(CacheKeyFields("model", "float32", "layout"), BLOCK)
        self.manager = KVCacheManager(BlockPool(NUM_BLOCKS), hasher, BLOCK, enable_caching=True)
        self.naive = NaiveCache(NUM_BLOCKS - 1)
        self.count = 0

    @rule(target=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, tokens: list[int]) -> MultipleResults[Request] | Request:
        self.count += 1
        request = Request(f"r{self.count}", RequestSpec(tokens, SamplingParams()))
        computed = self.manager.get_computed_blocks(request)
        assert computed.num_tokens == BLOCK * len(self.naive.found(tokens))
        answer = self.manager.allocate_slots(request, len(tokens) - computed.num_tokens, computed=computed).answer
        assert (answer is AllocationAnswer.OK) == self.naive.admit(request.request_id, tokens)
        if answer is not AllocationAnswer.OK:
            return multiple()
        request.num_computed_tokens = len(tokens)
        self.manager.cache_blocks(request, len(tokens))
        return request

    @rule(target=live, request=consumes(live), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, request: Request, more: list[int]) -> Request:
        tokens = request.token_ids(0, request.num_tokens) + more
        answer = self.manager.allocate_slots(request, len(more)).answer
        assert (answer is AllocationAnswer.OK) == self.naive.grow(request.request_id, tokens)
        if answer is AllocationAnswer.OK:
            request.output_token_ids += more
            request.num_computed_tokens = len(tokens)
            self.manager.cache_blocks(request, len(tokens))
        return request

    @rule(request=consumes(live))
    def free(self, request: Request) -> None:
        self.manager.free(request.request_id)
        self.naive.free(request.request_id)

    @invariant()
    def books_agree(self) -> None:
        self.manager.check_invariant()
        accounts = self.manager.pool.accounts()
        assert (accounts.free, accounts.cached_idle) == (self.naive.num_worthless, len(self.naive.idle))


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=40)
