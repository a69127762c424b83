"""What cache-aware placement gains: two hundred requests with eight long prefixes, on simulated nodes.

Each node computes one prompt after the other at known rates, keeps the blocks of the latest ones in its cache, and
reports like a real node. Time is virtual.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import mean
from typing import Any

import pytest

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import BlockRemoved, BlockStored, KVCacheUpdate
from baton.messages.node import (
    LoadReport,
    NodeDescription,
    Outcome,
    RequestDelta,
    StageTimings,
    StepFigures,
    StepReport,
)
from baton.messages.sampling import SamplingParams
from router.admission.request import ValidRequest
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.view import ClusterView
from tests.support.router_parts import MODEL, decode, prefill, record_of

SIZE, CHUNK, PREFIX, SUFFIX = 16, 512, 1024, 32
STEP_MS, TOKEN_MS = 3.0, 0.15
OUTPUT_MS = 60.0
PREFIX_BLOCKS = PREFIX // SIZE
HASHER = BlockHasher(CacheKeyFields("print", "float32", "layout"), SIZE)


@dataclass(frozen=True)
class Work:
    """A request that has not ended."""

    request: ValidRequest
    keys: Sequence[bytes]
    arrived: float

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request.request_id, 1)


class Node:
    """A node's cache and its queue of prompts."""

    def __init__(self, description: NodeDescription, cache_blocks: int) -> None:
        self.description = description
        self.queue: list[Work] = []
        self.num_streams = 0
        self._capacity = cache_blocks
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._next_event = 0

    @property
    def load(self) -> LoadReport:
        tokens = sum(self.uncached(work) for work in self.queue)
        return LoadReport(running=len(self.queue) + self.num_streams, uncomputed_tokens=tokens)

    def uncached(self, work: Work) -> int:
        cached = next((number for number, key in enumerate(work.keys) if key not in self._cache), len(work.keys))
        return max(1, len(work.request.prompt_token_ids) - cached * SIZE)

    def keep(self, keys: Sequence[bytes]) -> KVCacheUpdate:
        """Caches blocks and evicts the least recently used ones, the ends of prompts first."""
        stored = [key for key in keys if key not in self._cache]
        for key in reversed(keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        gone = [self._cache.popitem(last=False)[0] for _ in range(len(self._cache) - self._capacity)]
        first, self._next_event = self._next_event, self._next_event + 2
        return KVCacheUpdate(first, first + 2, [BlockStored(stored), BlockRemoved(gone)])


class Cluster:
    """Two prefill and two decode nodes, a placer, and the queue of events."""

    def __init__(self, policy: Policy, cache_blocks: int) -> None:
        self.now = 0.0
        self.first_token_ms: list[float] = []
        # These nodes don't pull: it is caches alone that decide.
        self._placer, self._view = Placer(PlacementSettings(policy, alone_tokens=0, pulls="off")), ClusterView()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._decodes: dict[str, Node] = {}
        sizes: dict[str, Any] = {"block_size": SIZE, "max_model_len": 4096, "num_blocks": 4096, "block_bytes": 50_000}
        sizes |= {"max_num_batched_tokens": CHUNK, "max_num_seqs": 256, "kv_layout": "layout"}
        parts = [replace(part, **sizes) for part in (prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))]
        self.nodes = {part.incarnation: Node(part, cache_blocks) for part in parts}
        self._view.registered([record_of(part) for part in parts])
        for part in parts:
            self._view.attached(part, -100.0)
            self._placer.on_attached(part)
            self._report(self.nodes[part.incarnation], KVCacheUpdate(0, 0, (), restart=True))

    def run(self, arrivals: Sequence[tuple[float, ValidRequest, Sequence[bytes]]]) -> float:
        """Serves all requests; returns the mean time to first token in ms."""
        for when, request, keys in arrivals:
            self._at(when, partial(self._arrive, Work(request, keys, when)))
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        assert len(self.first_token_ms) == len(arrivals)
        assert self._placer.is_idle
        return mean(self.first_token_ms)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, happen))

    def _report(
        self, node: Node, update: KVCacheUpdate, *deltas: RequestDelta, step: StepFigures | None = None
    ) -> None:
        incarnation = node.description.incarnation
        assert not self._placer.on_report(incarnation, StepReport(deltas, node.load, update, step=step), self.now)
        self._view.reported(incarnation, node.load)

    def _arrive(self, work: Work) -> None:
        choice = self._placer.choose(self._view.candidates(), work.request, frozenset(), 1, 0.0, self.now)
        self._placer.placed(choice, self.now)
        assert choice.placement.prefill is not None
        first, second = choice.placement.prefill.incarnation, choice.placement.decode.incarnation
        for incarnation in (first, second):
            self._view.dispatched(incarnation, work.key)
        self._decodes[work.request.request_id] = self.nodes[second]
        node = self.nodes[first]
        node.queue.append(work)
        if len(node.queue) == 1:
            self._begin(node)

    def _begin(self, node: Node) -> None:
        tokens = node.uncached(node.queue[0])
        took_ms = -(-tokens // CHUNK) * STEP_MS + tokens * TOKEN_MS
        self._at(self.now + took_ms / 1e3, lambda: self._computed(node, tokens, took_ms))

    def _computed(self, node: Node, tokens: int, took_ms: float) -> None:
        work = node.queue.pop(0)
        self.first_token_ms.append((self.now - work.arrived) * 1e3)
        step = StepFigures(took_ms, tokens, 0, 0)
        self._report(node, node.keep(work.keys), RequestDelta(work.key, outcome=Outcome.HANDED_OFF), step=step)
        self._view.released(node.description.incarnation, work.key)
        if node.queue:
            self._begin(node)
        decodes = self._decodes[work.request.request_id]
        decodes.num_streams += 1
        self._report(decodes, decodes.keep(work.keys))
        self._at(self.now + OUTPUT_MS / 1e3, lambda: self._decoded(decodes, work))

    def _decoded(self, node: Node, work: Work) -> None:
        node.num_streams -= 1
        ended = RequestDelta(work.key, outcome=Outcome.LENGTH)
        self._report(node, node.keep(()), ended, step=StepFigures(OUTPUT_MS / 16, 0, node.num_streams + 1, 0))
        self._view.released(node.description.incarnation, work.key)
        self._placer.note_times(work.request.request_id, StageTimings(), 0.0, self.now)
        self._placer.end(work.request.request_id)


def arrivals(per_s: float, seed: int) -> list[tuple[float, ValidRequest, Sequence[bytes]]]:
    """200 requests, each with one of 8 prefixes of 1,024 tokens and 32 tokens of its own."""
    rng = Random(seed)
    prefixes = [[rng.randrange(50_000) for _ in range(PREFIX)] for _ in range(8)]
    found: list[tuple[float, ValidRequest, Sequence[bytes]]] = []
    when = 0.0
    for number in range(200):
        prompt = (*rng.choice(prefixes), *(rng.randrange(50_000) for _ in range(SUFFIX)))
        keys: list[bytes] = []
        HASHER.extend(keys, HASHER.root(), prompt)
        found.append(
            (when, ValidRequest(prompt, SamplingParams(max_tokens=16), request_id=f"r{number}", model=MODEL), keys)
        )
        when += rng.expovariate(per_s)
    return found


def mean_ms(policy: Policy, cache_prefixes: int, per_s: float, seed: int) -> float:
    return Cluster(policy, cache_prefixes * (PREFIX_BLOCKS + 2)).run(arrivals(per_s, seed))


@pytest.mark.parametrize("seed", range(2))
def test_prefixes_that_do_not_fit_on_one_node_are_divided_among_nodes(seed: int) -> None:
    """Each node has room for five of eight prefixes. Round robin computes most prompts anew, in 170 ms instead of 8."""
    round_robin = mean_ms(Policy.ROUND_ROBIN, 5, 8.0, seed)
    assert mean_ms(Policy.COST, 5, 8.0, seed) < round_robin / 2


@pytest.mark.parametrize("seed", range(2))
def test_a_prefix_that_fits_everywhere_is_computed_once_and_not_on_each_node(seed: int) -> None:
    round_robin = mean_ms(Policy.ROUND_ROBIN, 99, 8.0, seed)
    assert mean_ms(Policy.COST, 99, 8.0, seed) < round_robin * 0.8
