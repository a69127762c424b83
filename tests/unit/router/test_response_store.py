"""The store of responses: bounds in number, bytes and time, and the share of each tenant."""

from __future__ import annotations

from random import Random

import pytest

from baton.observe.metrics import declared_figures
from router.http.bodies.content_parts import ImagePart
from router.http.responses.items import CallItem, MessageItem
from router.http.responses.store import ResponseStore, StoreBounds, StoredResponse
from tests.doubles.fake_clock import FakeClock


def response(name: str, num_bytes: int = 1000) -> StoredResponse:
    return StoredResponse(name, b"{}", (), 0, num_bytes)


def names(store: ResponseStore, tenant: str, *candidates: str) -> list[str]:
    return [name for name in candidates if store.find(tenant, name) is not None]


def store_of(count: int = 4, memory: int = 1 << 20, lifetime_s: float = 60.0) -> tuple[ResponseStore, FakeClock]:
    clock = FakeClock(5.0)
    return ResponseStore(StoreBounds(count, memory, lifetime_s), clock), clock


def test_a_response_belongs_to_its_tenant() -> None:
    store, _ = store_of()
    store.put("a", response("r"))
    assert names(store, "a", "r") == ["r"]
    assert names(store, "b", "r") == []
    assert not store.remove("b", "r")
    assert store.remove("a", "r")
    assert not store.remove("a", "r")
    assert (store.stats().num_responses, store.stats().num_bytes, store.stats().evicted) == (0, 0, 0)


def test_the_oldest_goes_when_there_are_too_many() -> None:
    store, _ = store_of(count=2)
    for name in "rst":
        store.put("a", response(name))
    assert names(store, "a", *"rst") == ["s", "t"]
    assert store.stats().evicted == 1


def test_the_oldest_go_when_they_are_too_large() -> None:
    store, _ = store_of(memory=3000)
    store.put("a", response("r", 1000))
    store.put("a", response("s", 1500))
    store.put("a", response("t", 2000))
    assert names(store, "a", *"rst") == ["t"]
    assert store.stats().num_bytes == 2000


def test_a_response_that_is_too_large_for_the_store_is_not_kept() -> None:
    store, _ = store_of(memory=3000)
    store.put("a", response("r", 3001))
    assert (store.stats().num_responses, store.stats().num_bytes) == (0, 0)


def test_a_response_expires() -> None:
    store, clock = store_of(lifetime_s=60.0)
    store.put("a", response("r"))
    clock.advance(30)
    store.put("b", response("s"))
    clock.advance(29.9)
    assert names(store, "a", "r") == ["r"]
    clock.advance(0.2)
    assert store.stats().num_responses == 1
    assert names(store, "a", "r") == []
    assert names(store, "b", "s") == ["s"]
    assert not store.remove("a", "r")


@pytest.mark.parametrize("bounds", [{"count": 8}, {"memory": 8000}])
def test_a_tenant_below_its_share_loses_nothing_to_others(bounds: dict[str, int]) -> None:
    store, _ = store_of(**{"count": 1000, "memory": 1 << 20, **bounds})
    for place in range(3):
        store.put("small", response(f"s{place}"))
    for place in range(100):
        store.put("large", response(f"l{place}"))
        store.put("other", response(f"o{place}"))
    assert len(names(store, "small", "s0", "s1", "s2")) >= 2, "its share is 8 / 3"
    assert store.stats().num_responses <= 8


@pytest.mark.parametrize("seed", range(20))
def test_counts_and_bounds_hold_whatever_happens(seed: int) -> None:
    rng = Random(seed)
    store, clock = store_of(count=6, memory=20_000, lifetime_s=10.0)
    kept: set[tuple[str, str]] = set()
    for step in range(300):
        tenant = rng.choice("abc")
        if rng.random() < 0.2:
            clock.advance(rng.uniform(0, 5))
        if kept and rng.random() < 0.3:
            store.remove(*rng.choice(sorted(kept)))
        store.put(tenant, response(f"r{step}", rng.randrange(1, 9000)))
        kept = {(one, name) for one, name in kept | {(tenant, f"r{step}")} if store.find(one, name) is not None}
        stats = store.stats()
        assert stats.num_responses == len(kept) <= 6
        sizes = [found.num_bytes for found in (store.find(*key) for key in kept) if found is not None]
        assert stats.num_bytes == sum(sizes) <= 20_000


def test_the_memory_of_a_response_is_that_of_its_texts_and_its_object() -> None:
    item = MessageItem("m", ("é" * 100, "\ud800"), "user")
    stored = StoredResponse.of("r", b"x" * 50, [item], [item])
    assert stored.num_bytes > 50 + 2 * 203
    assert item.text == "é" * 100 + "\n\ud800"
    # Python keeps four bytes for each character of a text with an emoji, and some fifty for each text of its own.
    assert MessageItem("m", ("a" * 1000 + "😀",), "user").num_bytes > 4000
    assert MessageItem("m", ("abc",) * 1000, "user").num_bytes > 50_000
    assert MessageItem("m", (ImagePart(b"a" * 10_000, "image/png"),), "user").num_bytes > 10_000
    bare = MessageItem("m", ("a",), "user").num_bytes
    assert CallItem("f", ("a",), "c" * 200, "n" * 60).num_bytes > bare + 260


@pytest.mark.parametrize(("count", "memory"), [(0, 1000), (10, 0)])
def test_a_store_without_room_is_off(count: int, memory: int) -> None:
    store, _ = store_of(count, memory)
    assert not store.is_on
    store.put("a", response("r"))
    assert store.stats().num_responses == 0


def test_the_figures_of_a_store_are_metrics() -> None:
    store, _ = store_of(count=1)
    store.put("a", response("r"))
    store.put("a", response("s", 7))
    figures = {figure.name: figure.value for figure in declared_figures(store.stats())}  # type: ignore[union-attr]
    assert figures == {"stored_responses": 1, "stored_response_bytes": 7, "stored_responses_evicted_total": 1}
