"""Which adapters are in memory: loaded at first use, at most so many, the least recently wanted one evicted."""

from __future__ import annotations

import math

from baton.node.adapters.adapter_cache import (
    MAX_LOADING,
    WAIT_S,
    AdapterCache,
    AdapterFailed,
    AdapterReady,
    LoadAdapter,
    UnloadAdapter,
)
from tests.doubles.fake_clock import FakeClock


def load(cache: AdapterCache, digest: str, *, in_use: set[str] | None = None) -> None:
    """Let a request want an adapter, and the adapter be loaded."""
    assert cache.want(f"{digest}-request", digest, f"/{digest}") == ()
    assert cache.turn({digest} | (in_use or set())) == [LoadAdapter(digest, f"/{digest}")]
    assert cache.load_ended(digest) == [AdapterReady((f"{digest}-request",))]


def test_requests_of_one_adapter_share_a_load_and_later_ones_need_none() -> None:
    cache = AdapterCache(2, FakeClock())
    cache.want("r1", "a", "/a")
    cache.want("r2", "a", "/a")
    assert cache.turn({"a"}) == [LoadAdapter("a", "/a")]
    assert cache.turn({"a"}) == []
    assert cache.load_ended("a") == [AdapterReady(("r1", "r2"))]
    assert cache.want("r3", "a", "/a") == [AdapterReady(("r3",))]
    assert cache.loaded == {"a"}
    assert not cache.needs_turn


def test_a_failed_load_fails_its_requests_alone_and_the_next_request_tries_again() -> None:
    cache = AdapterCache(2, FakeClock())
    cache.want("r1", "a", "/a")
    cache.want("r2", "b", "/b")
    assert cache.turn({"a", "b"}) == [LoadAdapter("a", "/a"), LoadAdapter("b", "/b")]
    assert cache.load_ended("a", "changed") == [AdapterFailed(("r1",), "changed")]
    assert cache.load_ended("b") == [AdapterReady(("r2",))]
    cache.want("r3", "a", "/elsewhere")
    assert cache.turn({"a", "b"}) == [LoadAdapter("a", "/elsewhere")]


def test_the_adapter_that_was_wanted_least_recently_and_is_not_in_use_makes_room() -> None:
    cache = AdapterCache(3, FakeClock())
    for digest in "abc":
        load(cache, digest)
    cache.want("r", "a", "/a")
    cache.want("d-request", "d", "/d")
    assert cache.turn({"b", "d"}) == [UnloadAdapter("c")], "b is in use, and a was wanted after c"
    assert cache.turn({"b", "d"}) == [], "one makes room for one"
    cache.unloaded("c")
    assert cache.turn({"b", "d"}) == [LoadAdapter("d", "/d")]
    assert cache.loaded == {"a", "b"}


def test_a_request_waits_while_all_adapters_in_memory_are_in_use() -> None:
    cache = AdapterCache(1, FakeClock())
    load(cache, "a")
    cache.want("r", "b", "/b")
    assert cache.turn({"a", "b"}) == []
    assert cache.needs_turn
    assert cache.turn({"b"}) == [UnloadAdapter("a")]


def test_few_adapters_are_loaded_at_a_time() -> None:
    cache = AdapterCache(9, FakeClock())
    for digest in "abcd":
        cache.want(digest, digest, f"/{digest}")
    assert cache.turn(set("abcd")) == [LoadAdapter("a", "/a"), LoadAdapter("b", "/b")][:MAX_LOADING]
    cache.load_ended("a")
    assert cache.turn(set("abcd")) == [LoadAdapter("c", "/c")]


def test_a_load_that_takes_too_long_fails_those_that_wait_and_serves_those_that_come_when_it_has_ended() -> None:
    clock = FakeClock()
    cache = AdapterCache(1, clock)
    cache.want("r1", "a", "/a")
    cache.turn({"a"})
    clock.advance(WAIT_S)
    (failed,) = cache.expire()
    assert isinstance(failed, AdapterFailed)
    assert failed.request_ids == ("r1",)
    assert isinstance(cache.want("r2", "a", "/a")[0], AdapterFailed)
    assert cache.deadline == math.inf
    assert cache.load_ended("a") == ()
    assert cache.expire() == []
    assert cache.want("r3", "a", "/a") == [AdapterReady(("r3",))]


def test_loads_that_hang_hold_up_no_others_but_keep_their_room() -> None:
    clock = FakeClock()
    cache = AdapterCache(4, clock)
    for digest in "abcde":
        cache.want(digest, digest, f"/{digest}")
    assert len(cache.turn(set("abcde"))) == MAX_LOADING == 2
    clock.advance(WAIT_S - 1)
    cache.want("late", "d", "/d")
    clock.advance(1)
    failed = [one for effect in cache.expire() if isinstance(effect, AdapterFailed) for one in effect.request_ids]
    assert failed == ["a", "b", "c", "d", "e"]
    assert cache.turn({"d"}) == [LoadAdapter("d", "/d")]
    for digest in "fgh":
        cache.want(digest, digest, f"/{digest}")
    assert cache.turn(set("dfgh")) == [LoadAdapter("f", "/f")]
    cache.load_ended("d")
    assert cache.turn(set("dfgh")) == [], "a and b may still come into memory"


def test_the_deadline_follows_what_happens() -> None:
    clock = FakeClock()
    cache = AdapterCache(1, clock)
    assert cache.deadline == math.inf
    began = clock.monotonic()
    cache.want("r1", "a", "/a")
    assert cache.deadline == began + WAIT_S
    cache.turn(set())
    assert cache.deadline == math.inf, "its request has ended"
    clock.advance(1)
    cache.want("r2", "a", "/a")
    clock.advance(1)
    cache.turn({"a"})
    assert cache.deadline == began + 1 + WAIT_S
    cache.load_ended("a")
    assert cache.deadline == math.inf


def test_no_request_waits_for_ever_for_room() -> None:
    clock = FakeClock()
    cache = AdapterCache(1, clock)
    load(cache, "a")
    cache.want("r1", "b", "/b")
    clock.advance(1)
    cache.want("r2", "b", "/b")
    assert cache.turn({"a", "b"}) == []
    assert cache.deadline == clock.monotonic() + WAIT_S - 1
    clock.advance(WAIT_S - 1)
    (failed,) = cache.expire()
    assert isinstance(failed, AdapterFailed)
    assert failed.request_ids == ("r1",)
    assert "no room" in failed.reason
    clock.advance(1)
    (failed,) = cache.expire()
    assert isinstance(failed, AdapterFailed)
    assert failed.request_ids == ("r2",)
    assert cache.deadline == math.inf
    assert not cache.needs_turn


def test_an_adapter_that_is_wanted_again_keeps_its_turn() -> None:
    cache = AdapterCache(1, FakeClock())
    load(cache, "a")
    cache.want("b", "b", "/b")
    cache.want("c", "c", "/c")
    cache.want("b again", "b", "/b")
    assert cache.turn({"b", "c"}) == [UnloadAdapter("a")]
    cache.unloaded("a")
    assert cache.turn({"b", "c"}) == [LoadAdapter("b", "/b")]


def test_an_adapter_that_is_wanted_again_while_it_is_evicted_is_loaded_again() -> None:
    cache = AdapterCache(1, FakeClock())
    load(cache, "a")
    cache.want("r1", "b", "/b")
    assert cache.turn({"b"}) == [UnloadAdapter("a")]
    cache.want("r2", "a", "/a")
    cache.unloaded("a")
    assert cache.turn({"a", "b"}) == [LoadAdapter("b", "/b")]
    cache.load_ended("b")
    assert cache.turn({"a"}) == [UnloadAdapter("b")]
    cache.unloaded("b")
    assert cache.turn({"a"}) == [LoadAdapter("a", "/a")]
    assert cache.load_ended("a") == [AdapterReady(("r2",))]


def test_a_queued_adapter_is_not_loaded_once_nobody_waits_for_it() -> None:
    cache = AdapterCache(1, FakeClock())
    load(cache, "a")
    cache.want("r", "b", "/b")
    assert cache.turn({"a"}) == []
    assert not cache.needs_turn


def test_an_adapter_that_no_router_wants_leaves_memory_when_no_request_uses_it() -> None:
    cache = AdapterCache(4, FakeClock())
    load(cache, "a")
    load(cache, "b")
    cache.keep_only({"b"})
    assert cache.turn({"a"}) == []
    assert cache.needs_turn
    assert cache.turn(set()) == [UnloadAdapter("a")]
    cache.unloaded("a")
    assert cache.loaded == {"b"}
    assert not cache.needs_turn


def test_events_of_unknown_adapters_change_nothing() -> None:
    cache = AdapterCache(1, FakeClock())
    assert cache.load_ended("a") == ()
    assert cache.expire() == []
