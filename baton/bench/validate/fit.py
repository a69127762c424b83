"""Fits the simulator's step time formula to measured steps of real nodes.

A step costs its node the time from the end of the step before it to its own end, including the work between the two. If
the node was idle in between, that work can't be measured, and the median before steps of the same kind is used instead:
a request that arrives during a step waits for that work, too. Nodes on one machine slow each other down. Therefore the
share of its time in which other nodes computed is known for each step, and the slowdown is fitted together with the
coefficients. A simulation has to reproduce means, so the fitted step times add up to the sum of the measured ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.bench.nodes.timeline import NodeStep
from baton.bench.simulator.config import Contention
from baton.bench.simulator.step_times import FormulaTimes
from baton.errors import BatonError

Values = NDArray[np.float64]

_MAX_BETWEEN_S = 0.1
"""A node that is idle for longer between two steps is waiting: for KV, or because a client has left."""
_SLOWDOWNS = np.arange(0, 201) / 100
"""The slowdowns that are tried; the best one is chosen."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The work of one step, and its measured time."""

    prefill_tokens: int
    decodes: int
    """Tokens computed for sequences that decode: one of each, and drafted ones."""
    context_tokens: int
    ms: float
    between_ms: float | None = None
    """Time that the node worked since the end of the step before; None: it may have been idle."""
    beside: float = 0.0
    """Average number of other nodes that computed meanwhile."""


class Fitted(NamedTuple):
    """The fitted step times."""

    times: FormulaTimes
    """Step times of a node that is alone, including the work between two steps."""
    contention: Contention
    before_prompts_ms: float
    """Work before a step with prompts. A request whose step is the first one does not wait for it."""


def costs(steps: Sequence[NodeStep], others: Sequence[Sequence[NodeStep]] = ()) -> list[StepCost]:
    """The costs of one node's steps, in order; `others`: steps of the machine's other nodes, on the same clock."""
    between_s = _between_s(steps)
    took_s, ended_s = _took_s(steps, between_s), np.array([step.ended_s for step in steps])
    beside_s = np.zeros(len(steps))
    for other in others:
        beside_s += _computed(other, ended_s) - _computed(other, ended_s - took_s)
    besides = np.maximum(beside_s, 0.0) / np.maximum(took_s, 1e-9)
    return [
        StepCost(
            step.figures.prefill_tokens,
            step.figures.decode_rows,
            step.figures.decode_context_tokens,
            step.figures.step_ms,
            None if gap_s is None else gap_s * 1e3,
            beside,
        )
        for step, gap_s, beside in zip(steps, between_s, besides.tolist(), strict=True)
    ]


def costs_of(timelines: Mapping[str, Sequence[NodeStep]]) -> list[StepCost]:
    """The costs of all steps of all nodes of one machine; `timelines` is by node name."""
    return [
        cost
        for name, steps in timelines.items()
        for cost in costs(steps, [theirs for other, theirs in timelines.items() if other != name])
    ]


def _between_s(steps: Sequence[NodeStep]) -> list[float | None]:
    """Seconds of work before each step; None: the node may have been idle."""
    return [None, *itertools.starmap(_between, itertools.pairwise(steps))][: len(steps)]


def _between(earlier: NodeStep, later: NodeStep) -> float | None:
    gap_s = max(0.0, later.began_s - earlier.ended_s)
    return gap_s if earlier.goes_on and gap_s <= _MAX_BETWEEN_S else None


def _took_s(steps: Sequence[NodeStep], between_s: Sequence[float | None]) -> Values:
    return np.array([step.figures.step_ms / 1e3 + (gap_s or 0.0) for step, gap_s in zip(steps, between_s, strict=True)])


def _computed(steps: Sequence[NodeStep], until_s: Values) -> Values:
    """Seconds for which a node computed until each of these times."""
    if not steps:
        return np.zeros(len(until_s))
    edges: list[float] = []
    totals: list[float] = []
    total_s, free_s = 0.0, -np.inf
    for step, took_s in zip(steps, _took_s(steps, _between_s(steps)).tolist(), strict=True):
        began_s = max(step.ended_s - took_s, free_s)
        free_s = max(began_s, step.ended_s)
        edges += [began_s, free_s]
        totals += [total_s, total_s + free_s - began_s]
        total_s = totals[-1]
    return np.interp(until_s, edges, totals)


def fit(step_costs: Iterable[StepCost]) -> Fitted:
    """Fits the formula; raises BatonError if there are no steps with prompts, or none with decodes alone."""
    known = list(step_costs)
    prefill = [cost for cost in known if cost.prefill_tokens and not cost.decodes]
    decode = [cost for cost in known if cost.decodes and not cost.prefill_tokens]
    if not prefill or not decode:
        raise BatonError(
            f"{len(prefill)} steps that computed prompts and {len(decode)} that decoded are too few to fit step times"
        )
    before_prompts_ms, before_decodes_ms = _median_between_ms(prefill), _median_between_ms(decode)
    prompt_rows = [(1.0, cost.prefill_tokens) for cost in prefill]
    prefill_ms, prefill_slowdown = _fit_with_contention(prompt_rows, prefill, before_prompts_ms)
    decode_rows = [(1.0, cost.context_tokens, cost.decodes) for cost in decode]
    decode_ms, decode_slowdown = _fit_with_contention(decode_rows, decode, before_decodes_ms)
    times = FormulaTimes(
        prefill_ms=prefill_ms[0],
        prefill_token_ms=prefill_ms[1],
        prefill_square_ms=0.0,
        decode_ms=decode_ms[0],
        decode_context_ms=decode_ms[1],
        decode_sequence_ms=decode_ms[2],
    )
    return Fitted(times, Contention(prefill_slowdown, decode_slowdown), before_prompts_ms)


def _median_between_ms(steps: Sequence[StepCost]) -> float:
    known = [step.between_ms for step in steps if step.between_ms is not None]
    return median(known) if known else 0.0


def _fit_with_contention(
    rows: Sequence[Sequence[float]], steps: Sequence[StepCost], median_between_ms: float
) -> tuple[list[float], float]:
    """Returns the columns' coefficients, and the slowdown of a step while another node computes all the time."""
    matrix = np.array(rows, dtype=np.float64)
    took = np.array([step.ms + (median_between_ms if step.between_ms is None else step.between_ms) for step in steps])
    beside = np.array([step.beside for step in steps])
    best: tuple[float, Values, float] | None = None
    for slower in _SLOWDOWNS.tolist() if beside.any() else (0.0,):
        # While the other node computes, this one works at 1 / (1 + slower) of its speed.
        stretch = 1 / np.maximum(0.05, 1 - beside * slower / (1 + slower))
        coefficients = _least_squares(matrix * stretch[:, None], took)
        predicted = (matrix @ coefficients) * stretch
        error = float(((predicted - took) ** 2).sum())
        if best is None or error < best[0] * (1 - 1e-9):
            sums = float(predicted.sum())
            best = error, coefficients * (float(took.sum()) / sums if sums else 1.0), slower
    assert best is not None
    return [float(coefficient) for coefficient in best[1]], best[2]


def _least_squares(matrix: Values, wanted: Values) -> Values:
    """Coefficients of the columns by least squares; columns whose coefficient would be negative are left out."""
    kept = list(range(matrix.shape[1]))
    while True:
        part, *_ = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)
        lowest = int(np.argmin(part))
        if part[lowest] >= 0 or len(kept) == 1:
            break
        del kept[lowest]
    coefficients = np.zeros(matrix.shape[1])
    coefficients[kept] = np.maximum(part, 0.0)
    return coefficients
