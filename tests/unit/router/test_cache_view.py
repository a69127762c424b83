"""The router's view of prefix caches: numbered updates, gaps, restarts, and prompts that are being computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.engine.kv_cache.events import KVEventLog, KVSnapshot
from baton.engine.request import Request
from baton.messages.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVCacheUpdate, Tier
from baton.messages.node import NodeDescription
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import EncoderContent, Span, rows_key
from baton.node.reports.reports import kv_cache_updates
from router.placement.cache_view import CacheView, PromptKeys, key_scheme_of
from tests.support.router_parts import block_keys, decode

SIZE = 4
NODE = decode(kv_layout="layout", block_size=SIZE)
RUN = NODE.incarnation
PROMPT = tuple(range(50, 50 + 10 * SIZE + 3))


def keys_of(prompt: Sequence[int] = PROMPT, node: NodeDescription = NODE, salt: str = "") -> list[bytes]:
    return block_keys(prompt, SIZE, node, salt)


def test_keys_of_a_prompt_with_the_angles_of_long_sequences_are_those_of_the_engine() -> None:
    node = replace(NODE, most_short_tokens=3 * SIZE)
    scheme = key_scheme_of(node)
    assert scheme is not None
    for length, is_long in ((3 * SIZE, False), (3 * SIZE + 1, True)):
        asked = Request("r", RequestSpec(PROMPT[:length], SamplingParams()))
        asked.is_long = is_long
        scheme.hasher.extend_request(asked, length)
        assert PromptKeys(asked.prompt_token_ids, "").first(scheme, 9) == asked.block_hashes
    assert not set(keys_of(PROMPT)) & set(asked.block_hashes)


def milestones_of(prompt: Sequence[int] = PROMPT, node: NodeDescription = NODE, salt: str = "") -> Sequence[bytes]:
    fields = key_scheme_of(node)
    assert fields is not None
    return PromptKeys(prompt, salt).milestones(fields)


class ReadPrompt(tuple[int, ...]):
    """A prompt that records how far it was read."""

    read_to = 0

    def __getitem__(self, index: Any) -> Any:
        self.read_to = max(self.read_to, index.stop)
        return super().__getitem__(index)


def stored(keys: Sequence[bytes], tier: Tier = "device") -> BlockStored:
    return BlockStored(keys, tier=tier)


def snapshot(number: int, *events: KVCacheEvent) -> KVCacheUpdate:
    return KVCacheUpdate(number, number, events, restart=True)


def cached(view: CacheView, prompt: Sequence[int] = PROMPT, node: NodeDescription = NODE, salt: str = "") -> int:
    return view.cached_tokens(PromptKeys(prompt, salt), [node]).get(node.incarnation, 0)


def watching(*events: KVCacheEvent) -> CacheView:
    """Return a view that has applied the events up to 5."""
    view = CacheView()
    view.watch(RUN)
    assert not view.updated(RUN, snapshot(5, *events))
    return view


def test_the_cached_prefix_of_a_prompt_is_found_until_it_is_removed() -> None:
    keys = keys_of()
    view = watching(stored(keys[:3]))
    assert cached(view) == 3 * SIZE
    assert not view.updated(RUN, KVCacheUpdate(5, 6, [stored(keys[3:7])]))
    assert cached(view) == 7 * SIZE
    assert not view.updated(RUN, KVCacheUpdate(6, 8, [BlockRemoved(keys[2:3]), stored(keys[7:])]))
    assert cached(view) == 2 * SIZE
    assert not view.updated(RUN, KVCacheUpdate(8, 9, [AllBlocksCleared()]))
    assert (cached(view), view.num_keys) == (0, 0)


def test_blocks_of_both_tiers_count_and_are_removed_separately() -> None:
    keys = keys_of()
    view = watching(stored(keys[:3]), stored(keys[:6], "host"))
    assert cached(view) == 6 * SIZE
    scheme = key_scheme_of(NODE)
    assert scheme is not None
    on_device = view.cached_by_scheme(PromptKeys(PROMPT, ""), {scheme}).on_device
    assert on_device == {RUN: 3 * SIZE}, "others can't pull what is in the host tier"
    view.updated(RUN, KVCacheUpdate(5, 6, [BlockRemoved(keys[:3])]))
    assert cached(view) == 6 * SIZE
    view.updated(RUN, KVCacheUpdate(6, 7, [BlockRemoved(keys[:6], "host")]))
    assert cached(view) == 0


@pytest.mark.parametrize("first", [4, 6])
def test_a_gap_in_the_updates_requests_a_snapshot(first: int) -> None:
    keys = keys_of()
    view = watching(stored(keys[:3]))
    assert view.updated(RUN, KVCacheUpdate(first, first + 1, [stored(keys[3:])]))
    view.watch(RUN)
    assert cached(view) == 0
    # What was under way before the node was asked is too old, and no reason to ask again.
    assert not view.updated(RUN, KVCacheUpdate(first + 1, first + 2, [stored(keys)]))
    assert cached(view) == 0
    assert not view.updated(RUN, snapshot(9, stored(keys[:2])))
    assert not view.updated(RUN, KVCacheUpdate(9, 9, [stored(keys[2:5])])), "the rest of a long snapshot"
    assert not view.updated(RUN, KVCacheUpdate(9, 10, [stored(keys[5:6])]))
    assert cached(view) == 6 * SIZE


def test_restarted_numbering_clears_the_view_of_the_node() -> None:
    keys = keys_of()
    view = watching(stored(keys))
    assert not view.updated(RUN, snapshot(0, stored(keys[:1])))
    assert cached(view) == SIZE


def test_a_lost_node_has_no_blocks_and_its_updates_are_ignored() -> None:
    keys = keys_of()
    view = watching(stored(keys))
    view.expect(RUN, milestones_of())
    view.forget(RUN)
    view.forget(RUN)
    assert not view.updated(RUN, snapshot(0, stored(keys)))
    assert (cached(view), view.num_keys) == (0, 0)


def test_prompts_with_other_salts_or_layouts_share_no_blocks() -> None:
    view = watching(stored(keys_of(salt="tenant")))
    assert (cached(view, salt="tenant"), cached(view)) == (10 * SIZE, 0)
    other = decode(kv_layout="other", block_size=SIZE)
    assert cached(view, node=other, salt="tenant") == 0
    mute = decode(block_size=SIZE)
    assert (key_scheme_of(mute), cached(view, node=mute, salt="tenant")) == (None, 0)


def test_a_prompt_being_computed_counts_until_its_attempt_ends() -> None:
    keys = keys_of()
    view = watching()
    view.expect(RUN, milestones_of(PROMPT[: 5 * SIZE]))
    assert (cached(view), view.num_keys) == (4 * SIZE, 0), "known to a power of two"
    view.updated(RUN, KVCacheUpdate(5, 6, [stored(keys[:2])]))
    view.expect_no_more(RUN, milestones_of(PROMPT[: 5 * SIZE]))
    assert cached(view) == 2 * SIZE


def test_prompts_being_computed_share_only_their_common_prefix() -> None:
    """Prompts differ by their salt, by model and layout of the node, and by any token of the prefix."""
    view = watching()
    view.expect(RUN, milestones_of())
    assert cached(view) == 8 * SIZE, "known to a power of two"
    assert cached(view, salt="tenant") == 0
    assert cached(view, node=decode(kv_layout="other", block_size=SIZE)) == 0
    for changed, same in ((0, 0), (SIZE - 1, 0), (SIZE, 1), (2 * SIZE, 2), (4 * SIZE - 1, 2), (7 * SIZE, 4)):
        other = [token + (place == changed) for place, token in enumerate(PROMPT)]
        assert cached(view, other) == same * SIZE, f"token {changed} is another"


def test_a_long_prompt_being_computed_counts_up_to_a_bound() -> None:
    long = tuple(range(3000))
    view = watching()
    view.expect(RUN, milestones_of(long))
    assert cached(view, long) == 64 * SIZE
    assert cached(view, long[: 100 * SIZE]) == 64 * SIZE
    assert cached(view, long[:SIZE]) == SIZE
    assert milestones_of(long[: SIZE - 1]) == []


def test_a_prompt_is_hashed_only_as_far_as_some_node_has_it() -> None:
    long = tuple(range(3000))
    nobody, somebody, empty = ReadPrompt(long), ReadPrompt(long), ReadPrompt(long)
    watching(stored([bytes(32)])).cached_tokens(PromptKeys(nobody, ""), [NODE])
    assert nobody.read_to == SIZE
    keys = PromptKeys(somebody, "")
    assert watching(stored(keys_of(long)[:600])).cached_tokens(keys, [NODE]) == {RUN: 600 * SIZE}
    fields = key_scheme_of(NODE)
    assert fields is not None
    assert keys.first(fields, 750) == keys_of(long)
    CacheView().cached_tokens(PromptKeys(empty, ""), [NODE])
    assert empty.read_to == 0, "nobody has anything: nothing is hashed"


@pytest.mark.parametrize("seed", range(5))
def test_a_view_that_applies_all_updates_of_a_node_knows_its_blocks(seed: int) -> None:
    """Uses a node's own event log and messages, with a reader that loses some."""
    rng, log, view = Random(seed), KVEventLog(capacity=40), CacheView()
    keys = keys_of(tuple(range(400)))
    has: dict[Tier, set[bytes]] = {"device": set(), "host": set()}
    log.is_recording = True
    position: int | None = None
    view.watch(RUN)
    for _ in range(300):
        tier: Tier = rng.choice(("device", "host"))
        some = rng.sample(keys, rng.randrange(1, 6))
        if rng.random() < 0.6:
            log.record(stored(some, tier))
            has[tier].update(some)
        else:
            log.record(BlockRemoved(some, tier))
            has[tier].difference_update(some)
        if rng.random() < 0.5:
            continue
        batch = log.since(position) if position is not None else None
        if batch is not None and batch.complete:
            news = kv_cache_updates(batch)
            position = batch.next_sequence
        else:
            found = KVSnapshot({tier: frozenset(had) for tier, had in has.items()}, log.next_sequence)
            news, position = kv_cache_updates(found, max_hashes=7), found.next_sequence
        for update in news:
            lost = batch is not None and rng.random() < 0.05
            if not lost and view.updated(RUN, update):
                view.watch(RUN)
                position = None
        if position is not None and not lost:
            assert view.num_keys == sum(map(len, has.values()))


def test_a_prompt_with_other_rows_at_the_same_positions_is_not_cached() -> None:
    prompt, spans = [*[0] * 2 * SIZE, *PROMPT], [Span(0, 2 * SIZE, "a" * 64)]
    fields = key_scheme_of(NODE)
    assert fields is not None
    view = CacheView()
    view.watch(RUN)
    keys = PromptKeys(prompt, "", spans)
    view.updated(RUN, snapshot(0, stored(keys.first(fields, 5))))
    view.expect(RUN, keys.milestones(fields))
    assert view.cached_tokens(PromptKeys(prompt, "", spans), [NODE]) == {RUN: 8 * SIZE}
    for others in ([], [Span(0, 2 * SIZE, "b" * 64)], [Span(1, 2 * SIZE - 1, "a" * 64)]):
        assert view.cached_tokens(PromptKeys(prompt, "", others), [NODE]) == {}


def test_the_nodes_with_rows_of_a_content_are_known_beside_the_blocks() -> None:
    first, second = (EncoderContent.of(text) for text in (b"a", b"b"))
    view = watching(stored(keys_of()), stored([rows_key(first.digest)], "encoder"))
    assert set(view.holders(first)) == {RUN}
    assert not view.holders(second)
    num_blocks = view.num_keys
    changes: list[KVCacheEvent] = [
        stored([rows_key(second.digest)], "encoder"),
        AllBlocksCleared(),
        BlockRemoved([rows_key(first.digest)], "encoder"),
    ]
    assert not view.updated(RUN, KVCacheUpdate(5, 8, changes))
    assert (set(view.holders(second)), set(view.holders(first))) == ({RUN}, set())
    assert (num_blocks, view.num_keys) == (10, 0)
    assert not view.updated(RUN, snapshot(9, stored([rows_key(first.digest)], "encoder")))
    assert (set(view.holders(first)), set(view.holders(second))) == ({RUN}, set())
    view.forget(RUN)
    assert not view.holders(first)
