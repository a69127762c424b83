"""Which of two arrangements has the higher goodput, when that is not settled, and what would settle it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.compare.verdict import Contender, Trial, decide, more_by_chance


def contender(
    name: str, capacities: Sequence[float], rates: Sequence[float], offered: int = 40, broken_share: float = 0.5
) -> Contender:
    """Was measured at these rates; kept the SLO up to a capacity in each repetition, and broke it above."""
    trials = [
        Trial(repeat, rate, offered if rate <= capacity else round(offered * broken_share), offered, rate <= capacity)
        for repeat, capacity in enumerate(capacities)
        for rate in rates
    ]
    goodputs = [max([rate for rate in rates if rate <= capacity], default=0.0) for capacity in capacities]
    return Contender(name, goodputs, trials)


RATES = (1.0, 2.0, 3.0, 4.0, 5.0)


def test_who_kept_the_slo_where_the_other_broke_it_has_the_higher_goodput() -> None:
    weak, strong = contender("colocated:2", (2, 2, 2), RATES), contender("1p1d", (4, 4, 4), RATES)
    for found in (decide(weak, strong), decide(strong, weak)):
        assert (found.leader, found.follower, found.is_settled, found.remedy) == ("1p1d", "colocated:2", True, "")
        assert found.finding.startswith("1p1d leads in every repetition")


def test_a_winner_that_never_broke_may_serve_more() -> None:
    found = decide(contender("a", (9,), RATES), contender("b", (2,), RATES))
    assert found.is_settled
    assert "a may serve more" in found.finding


def test_a_loser_without_a_goodput_is_settled_too() -> None:
    assert decide(contender("a", (2,), RATES), contender("b", (0,), RATES)).is_settled


@pytest.mark.parametrize(
    ("one", "other", "finding", "remedy"),
    [
        (contender("a", (), RATES), contender("b", (2,), RATES), "not both", "end early"),
        (contender("a", (0,), RATES), contender("b", (0,), RATES), "neither kept", "lower rates"),
        (
            contender("a", (9,), RATES),
            contender("b", (9,), RATES),
            "a and b kept the SLO at every rate",
            "higher rates",
        ),
        (contender("a", (9,), RATES), contender("b", (9,), (0.5, 1.5)), "b kept the SLO at every", "higher rates"),
        (contender("a", (2.0,), RATES), contender("b", (2.5,), RATES), "nearer to each other", "more rates"),
        (contender("a", (2, 4, 4), RATES), contender("b", (3, 2, 2), RATES), "a leads in 2 of 3", "more repetitions"),
        (contender("a", (4,), RATES, 4), contender("b", (3,), RATES, 4), "runs of 4 requests", "more requests"),
        (
            contender("a", (4,), RATES, 40),
            contender("b", (3,), RATES, 40, broken_share=0.89),
            "by chance",
            "more requests",
        ),
    ],
)
def test_what_is_not_settled_says_why_and_what_would_settle_it(
    one: Contender, other: Contender, finding: str, remedy: str
) -> None:
    for found in (decide(one, other), decide(other, one)):
        assert not found.is_settled
        assert remedy in found.remedy
    assert finding in decide(one, other).finding


@given(
    st.lists(st.floats(0, 6), min_size=1, max_size=3),
    st.lists(st.floats(0, 6), min_size=1, max_size=3),
    st.integers(1, 50),
)
def test_a_settled_winner_is_ahead_in_every_repetition(mine: list[float], theirs: list[float], offered: int) -> None:
    found = decide(contender("a", mine, RATES, offered), contender("b", theirs, RATES, offered))
    assert bool(found.remedy) is not found.is_settled
    if found.is_settled:
        pairs = list(zip(mine, theirs, strict=False))
        assert all(one > other for one, other in pairs) or all(one < other for one, other in pairs)


def test_chance_is_fishers_exact_test() -> None:
    """The lady tasting tea: she names 4 of 4 cups with probability 1/70, and 3 or more with 17/70."""
    assert more_by_chance(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert more_by_chance(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert more_by_chance(0, 4, 4, 4) == pytest.approx(1)


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 30), st.integers(1, 30))
def test_chance_is_a_probability_and_falls_with_the_difference(kept: int, more: int, other: int, rest: int) -> None:
    offered, other_offered = kept + more, other + rest
    chance = more_by_chance(kept, offered, other, other_offered)
    assert 0 < chance <= 1
    better = more_by_chance(kept + 1, offered, other, other_offered)
    assert better < chance or math.isclose(better, chance)
