"""Plots of reports: distributions, axes, numbers as text, and the lanes of timelines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.report.chart import EXTENT, exact, in_order, linear, logarithmic, work_colours
from baton.bench.report.distribution import Distribution, of_histogram
from baton.bench.report.html import milliseconds, number, percent
from baton.bench.report.measured import Interval
from baton.bench.report.timeline import busy_shares
from baton.bench.results.gaps import Gaps


class TestDistribution:
    @given(st.integers(0, 2**32), st.floats(0.05, 2.0), st.integers(1, 3000))
    def test_quantiles_are_those_of_the_values(self, seed: int, sigma: float, count: int) -> None:
        values = np.random.default_rng(seed).lognormal(4.0, sigma, count)
        distribution = Distribution.of(values)
        assert distribution.count == count
        for share in (0.1, 0.5, 0.9):
            # Linear interpolation stays between the values of neighbouring ranks, and a bin is 2 % wide.
            low, high = np.quantile(
                values, (max(0.0, share - 1 / count), min(1.0, share + 1 / count)), method="nearest"
            )
            quantile = distribution.quantile(share)
            assert quantile is not None
            assert low / 1.03 <= quantile <= high * 1.03

    def test_the_share_within_a_limit_is_counted(self) -> None:
        distribution = Distribution.of(np.arange(1.0, 1001.0))
        assert distribution.within(250.0) == pytest.approx(0.25, abs=0.01)
        assert distribution.within(0.5) == 0.0
        assert distribution.within(5000.0) == 1.0

    def test_failed_requests_are_not_counted(self) -> None:
        assert Distribution.of(np.array([1.0, np.nan, 2.0, np.inf])).count == 2
        assert Distribution.of(np.array([np.nan])).quantile(0.5) is None

    def test_a_results_histogram_has_the_distribution_of_its_gaps(self) -> None:
        gaps = Gaps()
        gaps.add(np.random.default_rng(1).lognormal(-4.0, 0.4, 5000))
        histogram = gaps.histogram()
        distribution = of_histogram(histogram["edges_s"], histogram["counts"])
        assert distribution.count == 5000
        assert distribution.quantile(0.5) == pytest.approx(gaps.percentile(50) * 1e3, rel=0.07)

    def test_gaps_of_zero_are_in_the_first_bin(self) -> None:
        gaps = Gaps()
        gaps.add([0.0, 0.0, 0.1])
        histogram = gaps.histogram()
        assert (histogram["counts"][0], sum(histogram["counts"])) == (2.0, 3.0)

    @pytest.mark.parametrize(
        ("edges", "counts"),
        [([1.0, 2.0], [1.0, 1.0]), ([2.0, 1.0], [1.0]), ([1.0, float("nan")], [1.0]), ([0.0, 1.0], [-1.0])],
    )
    def test_a_broken_histogram_is_refused(self, edges: list[float], counts: list[float]) -> None:
        with pytest.raises(ValueError, match="histogram"):
            of_histogram(edges, counts)

    @given(st.lists(st.floats(1e-2, 1e6), min_size=1, max_size=300))
    def test_the_cumulative_distribution_rises_from_0_to_1(self, values: list[float]) -> None:
        curve = Distribution.of(np.array(values)).cumulative(50)
        shares = [reached.share for reached in curve]
        assert shares[0] == 0.0
        assert shares[-1] == 1.0
        assert shares == sorted(shares)
        assert len(curve) <= 52

    def test_bars_over_all_values_add_up_to_1(self) -> None:
        distribution = Distribution.of(np.random.default_rng(3).lognormal(3.0, 1.0, 4000))
        span = distribution.span()
        assert span is not None
        assert sum(bar.share for bar in distribution.bars(*span, 30)) == pytest.approx(1.0)


class TestAxis:
    @given(st.floats(1e-6, 1e9))
    def test_a_linear_axis_reaches_its_value_at_round_ticks(self, high: float) -> None:
        made = linear("", high, number)
        assert made.high >= high * (1 - 1e-9)
        assert 2 <= len(made.ticks) <= 8
        assert made.at(made.high) == EXTENT
        assert made.at(0.0) == 0.0

    @given(st.floats(1e-3, 1e6), st.floats(1.0, 1e6))
    def test_a_logarithmic_axis_has_ticks_inside(self, low: float, ratio: float) -> None:
        made = logarithmic("", low, low * ratio, milliseconds)
        assert made.low <= low <= low * ratio <= made.high
        assert 1 <= len(made.ticks) <= 22
        assert all(0 <= made.at(tick.value) <= EXTENT for tick in made.ticks)

    @given(st.floats(0, 1e5), st.floats(1e-4, 1e5))
    def test_an_exact_axis_ends_at_its_bounds(self, low: float, width: float) -> None:
        made = exact("", low, low + width, "s")
        assert (made.low, made.high) == (low, low + width)
        assert all(low - width / 1e3 <= tick.value <= low + width * 1.001 for tick in made.ticks)
        assert len({tick.text for tick in made.ticks}) == len(made.ticks) <= 9


class TestFigures:
    def test_numbers_have_three_significant_digits(self) -> None:
        assert [number(value) for value in (0.0, 0.012345, 4.5612, 1234.5, None, float("nan"))] == [
            *("0", "0.0123", "4.56"),
            *("1,234", "–", "–"),
        ]

    def test_percent_never_rounds_to_0_or_100(self) -> None:
        shares = [percent(value).replace("\u00a0", " ") for value in (1.0, 0.99999, 0.985, 0.9, 0.0001, 0.0)]
        assert shares == ["100 %", "> 99.9 %", "98.5 %", "90 %", "< 0.1 %", "0 %"]


class TestLanes:
    @given(st.lists(st.tuples(st.floats(0, 50), st.floats(1e-3, 20)), min_size=1, max_size=40))
    def test_shares_of_columns_add_up_to_the_busy_time(self, spans: list[tuple[float, float]]) -> None:
        intervals = [Interval(start, start + took, "decode", None) for start, took in spans]
        x = exact("", 0.0, 70.0, "s")
        shares = busy_shares([*intervals, Interval(1.0, 2.0, "prefill", None)], "decode", x)
        assert shares.sum() * 70.0 / shares.size == pytest.approx(sum(took for _, took in spans))
        assert shares.min() >= -1e-9

    def test_a_kind_of_work_has_one_colour_everywhere(self) -> None:
        first = work_colours(in_order(["transfer", "idle spin", "prefill"]))
        second = work_colours(["queue", "prefill", "other"])
        assert list(first) == ["prefill", "transfer", "idle spin"]
        assert first["prefill"] == second["prefill"]
        assert len(set(first.values())) == 3
