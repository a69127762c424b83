"""The totals of all routers over ten minutes: rates, latencies and counts, of bounded size."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from router.admission.exchange import MAX_ENTRIES, ChargedTotal, LedgerExchange
from router.operations.live_history import (
    MAX_BYTES,
    MAX_ROUTERS,
    NUM_SAMPLES,
    SAMPLE_EVERY_S,
    LiveHistory,
    LiveTotals,
    RouterTotals,
    quantile,
)
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.doubles.fake_timers import FakeTimers
from tests.support.live_cluster_page import BUCKETS, history_of, totals


def test_rates_are_means_of_the_last_ten_seconds_over_all_routers() -> None:
    found = history_of(20, num_routers=2).totals()
    assert (found["tokens_per_s"], found["requests_per_s"]) == (50.0, 2.0)
    assert (found["running"], found["waiting"]) == (6, 2)


def test_one_sample_has_no_rates() -> None:
    found = history_of(1).totals()
    assert found["tokens_per_s"] is found["ttft_p50_ms"] is None
    assert found["counted_s"] == 0


def test_nothing_is_known_before_the_first_sample() -> None:
    history = LiveHistory(BUCKETS)
    assert (history.columns(), history.routers()) == ({}, [])
    assert history.totals()["running"] == 0


def test_latencies_are_quantiles_of_the_last_minute() -> None:
    found = history_of(40).totals()
    assert found["ttft_p50_ms"] == 10.0, "half of the first tokens came within 10 ms"
    assert found["ttft_p99_ms"] == pytest.approx(98.2)
    assert found["gaps_p50_ms"] == pytest.approx(6.2, abs=0.1)


def test_failures_are_counted_over_the_whole_history_apart_from_cancelled_requests() -> None:
    history = LiveHistory(BUCKETS)
    for sample in range(100):
        history.add(SAMPLE_EVERY_S * sample, [totals(0, sample, failed=7 + sample, cancelled=sample // 2, retried=5)])
    found = history.totals()
    assert (found["failed"], found["cancelled"], found["retried"]) == (99, 49, 0), "what was before is not counted"
    assert found["counted_s"] == 198


def test_the_history_ends_after_ten_minutes() -> None:
    columns = history_of(NUM_SAMPLES + 50).columns()
    assert {len(values) for values in columns.values()} == {NUM_SAMPLES}
    assert (columns["age_s"][0], columns["age_s"][-1]) == (600.0, 0.0)
    assert len(json.dumps(columns)) < 20_000


def test_a_router_that_comes_or_goes_is_no_jump_of_a_rate() -> None:
    history = LiveHistory(BUCKETS)
    history.add(0.0, [totals(0, 0)])
    history.add(2.0, [totals(0, 1), totals(1, 1000)])
    assert history.totals()["tokens_per_s"] == 25.0
    history.add(4.0, [totals(1, 1001)])
    assert history.totals()["tokens_per_s"] == 25.0
    assert [each["name"] for each in history.routers()] == ["r1"]


def test_a_clock_that_is_set_back_begins_a_new_history() -> None:
    history = history_of(10)
    history.add(5.0, [totals(0, 11)])
    assert history.columns()["age_s"] == [0.0]


def test_totals_with_other_buckets_and_too_many_routers_are_left_out() -> None:
    history = LiveHistory(BUCKETS)
    history.add(1.0, [totals(0, 1), totals(1, 1, ttft=(1, 2))])
    assert [each["name"] for each in history.routers()] == ["r0"]
    history.add(2.0, [totals(number, 1) for number in range(MAX_ROUTERS + 5)])
    assert len(history.routers()) == MAX_ROUTERS


@given(st.lists(st.integers(0, 20), min_size=3, max_size=3), st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_its_value(counts: list[int], share: float) -> None:
    found = quantile((0.01, 0.1, math.inf), counts, share)
    if not sum(counts):
        assert found is None
        return
    assert found is not None
    place = next(place for place in range(3) if share * sum(counts) <= sum(counts[: place + 1]) + 1e-9)
    lower, upper = [(0.0, 0.01), (0.01, 0.1), (0.1, 0.1)][place]
    assert lower - 1e-9 <= found <= upper + 1e-9


def test_totals_travel_as_json() -> None:
    charged = tuple(ChargedTotal("embeddings-urgent", f"{n:032}", n, -1e14 / 3, 1e6 / 3) for n in range(MAX_ENTRIES))
    given_totals = totals(3, 7, charged=charged)
    assert RouterTotals.from_json(given_totals.to_json()) == given_totals


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"name": "r", "incarnation": "r.x", "tokens": -1}',
        b'{"name": "r", "incarnation": "r.x", "tokens": "many"}',
        b'{"name": "r", "incarnation": "r.x", "ttft": [1]}',
        b'{"name": "' + b"r" * 65 + b'", "incarnation": "r.x"}',
        b" " * (MAX_BYTES + 1),
        totals(0, 1, ttft=tuple(range(65))).to_json(),
        totals(0, 1, charged=(ChargedTotal("text-normal", "t", 1, math.nan, 1.0),)).to_json(),
        totals(0, 1, charged=(ChargedTotal("text-normal", "t", 1, 1.0, 0.0),)).to_json(),
        totals(0, 1, charged=(ChargedTotal("text-normal", "t" * 65, 1, 1.0, 1.0),)).to_json(),
        totals(0, 1, charged=(ChargedTotal("x", "t", 1, 1.0, 1.0),) * (MAX_ENTRIES + 1)).to_json(),
    ],
)
def test_what_is_no_totals_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        RouterTotals.from_json(data)


async def test_routers_see_each_others_totals_and_only_their_own_while_the_registry_is_away() -> None:
    store, timers = FakeRegistryStore(), FakeTimers()
    registries = [FakeRegistry(store, "c") for _ in range(2)]
    pages = []
    for number, registry in enumerate(registries):
        own = partial(totals, number, 1)
        page = LiveTotals(registry, timers, timers.monotonic, own, LiveHistory(BUCKETS), LedgerExchange({}))
        page.registered_routers(["r0.x", "r1.x", "never.x"])
        pages.append(page)
    for page in pages:
        await page.sample()
    assert [each["name"] for each in pages[1].history.routers()] == ["r0", "r1"]
    store.totals("c")["r0.x"] = b"not totals"
    store.totals("c")["never.x"] = replace(totals(0, 1), incarnation="r0.x").to_json()
    timers.advance(SAMPLE_EVERY_S)
    await pages[1].sample()
    assert [each["name"] for each in pages[1].history.routers()] == ["r1"]
    store.stop()
    timers.advance(SAMPLE_EVERY_S)
    await pages[0].sample()
    assert [each["name"] for each in pages[0].history.routers()] == ["r0"]
    for registry in registries:
        await registry.close()
