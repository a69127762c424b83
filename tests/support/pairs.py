"""Cases for a test of several parameters, in which any two values of two parameters meet, rather than all values.

A mistake that shows only where three parameters have particular values is rare ("Software fault interactions", Kuhn,
Wallace and Gallo 2004), and a full product of parameters takes ten times as many cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Place = tuple[int, int]
"""A parameter, and one of its values, by their places."""


def all_pairs(values: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test with the values of its parameters, by their names, so that each pair of values meets.

    A name may be several, as in pytest: "window, softcap", whose values are tuples.
    """
    names = [name.split(", ") for name in values]
    axes = list(values.values())
    cases = []
    for chosen in _covering([len(axis) for axis in axes]):
        case: list[Any] = []
        for place, axis, of_place in zip(chosen, axes, names, strict=True):
            case += axis[place] if len(of_place) > 1 else [axis[place]]
        cases.append(tuple(case))
    ids = ["-".join(getattr(value, "__name__", str(value)) for value in case) for case in cases]
    return pytest.mark.parametrize(tuple(itertools.chain(*names)), cases, ids=ids)


def _covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Choices of one value of each parameter. Each begins with a pair that is left, and takes most of the others."""
    axes = range(len(sizes))
    left = {
        ((one, i), (other, j))
        for one, other in itertools.combinations(axes, 2)
        for i in range(sizes[one])
        for j in range(sizes[other])
    }
    found = []
    while left:
        chosen = dict(min(left))
        for axis in axes:
            if axis not in chosen:
                chosen[axis] = max(
                    range(sizes[axis]), key=lambda value: (len(_pairs({**chosen, axis: value}) & left), -value)
                )
        left -= _pairs(chosen)
        found.append(tuple(chosen[axis] for axis in axes))
    return found


def _pairs(chosen: Mapping[int, int]) -> set[tuple[Place, Place]]:
    return set(itertools.combinations(sorted(chosen.items()), 2))
