"""Comparing arrangements: what is started, which rates are tried, and what the result says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.arrangement import Arrangement, chosen
from baton.bench.compare.interleaved import MeasuredArrangement, RateRun, common_rate, seed_of
from baton.bench.compare.report import compare_result, ratios, verdict
from baton.bench.compare.run import Comparison
from baton.bench.config import CompareConfig
from baton.bench.load.run import GeneratorLoad, LoadRun
from baton.bench.nodes.run import NodesRun
from baton.bench.nodes.timeline import impossible_spans
from baton.bench.results.goodput import GoodputSearch
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.results.summary import Slo, summarize
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import InvalidRequest
from baton.models.resolve import FoundModel
from tests.support.outside import assert_result_as_frozen


def searched(search: GoodputSearch, limit: float) -> list[float]:
    """Runs a search on a machine that meets the SLO up to the rate `limit`; returns the rates that were tried."""
    tried = []
    while not search.is_over:
        tried.append(search.rate)
        search.add_result(search.rate <= limit)
    return tried


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_search_ends_within_a_tenth_of_the_limit(first: float, limit: float) -> None:
    search = GoodputSearch(first, tolerance=0.1, max_tries=40)
    searched(search, limit)
    assert search.goodput <= limit < search.upper_bound
    assert search.upper_bound <= search.goodput * 1.1


@given(st.lists(st.booleans(), min_size=20, max_size=20), st.integers(1, 20))
def test_the_search_always_ends_with_a_rate_that_was_kept(kept: list[bool], max_tries: int) -> None:
    search = GoodputSearch(3.0, max_tries=max_tries)
    tried = []
    for answer in kept:
        if search.is_over:
            break
        tried.append((search.rate, answer))
        search.add_result(answer)
    assert search.is_over
    assert len(tried) <= max_tries
    assert search.goodput == max((rate for rate, answer in tried if answer), default=0.0)
    assert search.goodput < search.upper_bound


def test_a_limit_that_nobody_keeps_is_a_goodput_of_nothing() -> None:
    search = GoodputSearch(8.0, max_tries=4)
    assert searched(search, 0.0) == [8, 4, 2, 1]
    assert search.goodput == 0


def test_arrangements_have_the_same_nodes() -> None:
    assert list(map(str, chosen([], 3))) == ["colocated:3", "1p2d", "2p1d", "conditional:1p2d"]
    assert {one.num_nodes for one in chosen([], 3)} == {3}
    assert chosen(["1P1D", "colocated", "conditional"], 2) == [
        *(Arrangement(1, 1), Arrangement(0, 2), Arrangement(1, 1, is_conditional=True))
    ]
    assert [one.is_disaggregated for one in chosen([], 2)] == [False, True, False]
    for names, nodes in (
        (["2p1d"], 2),
        (["0p2d"], 2),
        (["pd"], 2),
        ([], 1),
        (["1p1d", "1P1D"], 2),
        (["colocated:4"], 2),
    ):
        with pytest.raises(InvalidRequest):
            chosen(names, nodes)


def test_the_common_rate_is_the_lowest_goodput() -> None:
    assert common_rate([4.0, 2.0, 8.0], 9.0) == 2
    assert common_rate([0.0, 2.0], 0.5) == 0.5
    assert common_rate([0.0, 2.0], float("inf")) == 2


def test_no_two_loads_have_the_same_seed() -> None:
    assert len({seed_of(comparison, run) for comparison in range(3) for run in range(100)}) == 300
    assert seed_of(0, 7) == 7


def test_ratios_are_of_pairs_that_were_measured_in_turn() -> None:
    assert ratios([4.0, 6.0], [2.0, 2.0]) == [2, 3]
    assert ratios([4.0, 6.0], [0.0, 2.0]) == [3]


def rate_run(repeat: int, rate: float, gap_s: float, requests: int = 12) -> RateRun:
    outcomes = Outcomes()
    for index in range(requests):
        outcomes.append(Outcome(index, 0.0, 0.0, 0.1, 0.1 + gap_s, 8, 2, [gap_s]))
    summary = summarize(outcomes, 1.0, Slo(tpot_ms=50))
    run = LoadRun(outcomes, 1.0, 1, GeneratorLoad(1, 0.1, 0.1, 0.1), False, False)
    return RateRun(repeat, rate, summary, NodesRun(run, {}, {}, 0))


ARRANGEMENTS = chosen(["colocated", "1p1d"], 2)


def result_of(measured: list[MeasuredArrangement]) -> dict[str, Any]:
    config = CompareConfig(ARRANGEMENTS, FoundModel(Path("model"), "model"), "auto", WorkloadSpec(), None)
    comparison = Comparison(Slo(tpot_ms=50), summarize(Outcomes(), 1.0), measured)
    return compare_result(config, comparison, "2026-01-01T00:00:00+00:00")


@pytest.mark.outside
def test_a_comparison_has_ratios_with_their_spread() -> None:
    measured = [
        MeasuredArrangement(ARRANGEMENTS[0], {"decode-0": 0, "decode-1": 1}, goodputs=[2.0, 2.0, 4.0]),
        MeasuredArrangement(ARRANGEMENTS[1], {"decode-0": 0, "prefill-0": 1}, goodputs=[6.0, 8.0, 8.0]),
    ]
    measured[1].runs.append(rate_run(0, 16.0, 0.1))
    for repeat, goodput in enumerate(measured[1].goodputs):
        measured[0].runs.append(rate_run(repeat, goodput - 1, 0.06))
        measured[1].runs.append(rate_run(repeat, goodput, 0.01))
        measured[0].common.append(rate_run(repeat, 2.0, 0.04))
        measured[1].common.append(rate_run(repeat, 2.0, 0.01))
    result = result_of(measured)
    assert_result_as_frozen(result)
    assert result["goodput"] == {"colocated:2": 2, "1p1d": 8}
    assert result["goodput_ratio"] == 3
    assert result["goodput_ratio_spread"] == {"median": 3, "p10": 2, "p90": 4}
    assert result["p99_gap_ratio"] == pytest.approx(0.25)
    assert result["best_split"] == "1p1d"
    assert result["arrangements"][0]["cores"] == 2
    assert result["arrangements"][0]["limited_by"]["rate"] == 5
    assert result["arrangements"][1]["limited_by"] == {
        "rate": 16.0,
        "attainment": 0.0,
        "kept": {"tpot_ms": 0.0},
        "busy": {},
    }
    assert verdict(result)[0].startswith("1p1d has 3.00 [2.00, 4.00] times the goodput of colocated:2: 1p1d leads")
    assert verdict(result)[1].startswith("The P99 largest gap of 1p1d is 0.25 [0.25, 0.25] times that of colocated:2")


def test_without_a_goodput_there_is_no_ratio() -> None:
    result = result_of([MeasuredArrangement(ARRANGEMENTS[place], {}, goodputs=[float(place)]) for place in (0, 1)])
    assert result["goodput_ratio"] is None
    assert verdict(result)[0].startswith("Not settled whether 1p1d or colocated:2 has the higher goodput (1.00 against")


def test_there_is_no_headline_from_rates_at_which_the_slo_was_broken() -> None:
    measured = [MeasuredArrangement(ARRANGEMENTS[place], {}, goodputs=[float(place)]) for place in (0, 1)]
    for one, gap_s in zip(measured, (0.4, 0.01), strict=True):
        one.runs.append(rate_run(0, 1.0, gap_s))
        one.common.append(rate_run(0, 1.0, gap_s))
    result = result_of(measured)
    assert result["verdict"]["is_settled"]
    assert result["goodput_ratio"] is result["p99_gap_ratio"] is None
    decision, gaps, *_ = verdict(result)
    assert decision == (
        "1p1d has the higher goodput (1.00 against 0.00 requests/s); colocated:2 kept the SLO at no rate that was tried"
    )
    assert gaps == "Gaps are not compared: at 1.00 requests/s not both kept the SLO"


def test_limits_are_shown_as_they_were_given() -> None:
    slo = Slo.parse(["ttft:250", "tpot:33.375", "e2el:12345.678"])
    assert slo.texts() == {"TTFT": "250 ms", "TPOT": "33.375 ms", "E2EL": "12345.678 ms"}


def test_times_in_the_cluster_that_are_longer_than_the_clients_wait_are_counted() -> None:
    outcomes = Outcomes()
    outcomes.append(Outcome(0, 0.0, 1.0, 1.5, 2.0, 8, 2, [0.5], queue_s=0.2, prefill_s=0.3))
    assert impossible_spans(outcomes) == 0
    outcomes.append(Outcome(1, 0.0, 1.0, 1.5, 2.0, 8, 2, [0.5], queue_s=0.2, prefill_s=0.4))
    assert impossible_spans(outcomes) == 1
