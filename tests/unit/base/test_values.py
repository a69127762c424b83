"""Values that are frozen only for mypy have the other properties of frozen dataclasses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.placement.placement import Demand


def test_values_are_equal_and_hashed_by_their_fields() -> None:
    demand = Demand("model", 3, 4)
    assert demand == Demand("model", 3, 4)
    assert len({demand, Demand("model", 3, 4), replace(demand, max_tokens=5)}) == 2


def test_values_have_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        Demand("model", 3, 4).prompt = "text"  # type: ignore[attr-defined]
