"""Step times of the simulator's formula from steps that nodes really took. Pure.

A step costs its node the time from the end of the one before it to its own end, also what is done between the two. If
the node had nothing to do then, what it did is not known, and is taken to be what it mostly is before a step of that
kind: whoever comes during a step waits for it, too. Nodes of one machine slow each other down: so for each step it is
known for which share of its time others computed, and how much that costs is fitted with the coefficients. Means are
what a simulation has to meet: the sum of all steps is what it was.
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
from baton.bench.simulator.shared_host import Contention
from baton.bench.simulator.step_times import FormulaTimes
from baton.errors import BatonError

Values = NDArray[np.float64]

_MOST_BETWEEN_S = 0.1
"""Who does nothing for longer between two steps waits for somebody: for KV, or since a client has left."""
_SLOWDOWNS = np.arange(0, 201) / 100
"""Among which the best one is looked for."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step was made of, and what it cost."""

    prefill_tokens: int
    decodes: int
    context_tokens: int
    ms: float
    between_ms: float | None = None
    """What its node did before it since the step before; None: it may have slept."""
    beside: float = 0.0
    """How many other nodes computed meanwhile, on average."""


class Fitted(NamedTuple):
    """What steps cost."""

    times: FormulaTimes
    """Of a node that is alone; with what is done between two steps."""
    contention: Contention
    before_prompts_ms: float
    """Of a step with prompts, what is done before it: nobody waits for it whose step is the first one."""


def costs(steps: Sequence[NodeStep], others: Sequence[Sequence[NodeStep]] = ()) -> list[StepCost]:
    """Of one node's steps, in their order; `others`: those of the machine's other nodes, on the same clock."""
    between_s = _between_s(steps)
    took_s, ended_s = _took_s(steps, between_s), np.array([step.ended_s for step in steps])
    beside_s = np.zeros(len(steps))
    for other in others:
        beside_s += _computed(other, ended_s) - _computed(other, ended_s - took_s)
    besides = np.maximum(beside_s, 0.0) / np.maximum(took_s, 1e-9)
    return [
        StepCost(
            step.figures.prefill_tokens,
            step.figures.decode_sequences,
            step.figures.decode_context_tokens,
            step.figures.step_ms,
            None if gap_s is None else gap_s * 1e3,
            beside,
        )
        for step, gap_s, beside in zip(steps, between_s, besides.tolist(), strict=True)
    ]


def costs_of(timelines: Mapping[str, Sequence[NodeStep]]) -> list[StepCost]:
    """Of all nodes of one machine, by their names."""
    return [
        cost
        for name, steps in timelines.items()
        for cost in costs(steps, [theirs for other, theirs in timelines.items() if other != name])
    ]


def _between_s(steps: Sequence[NodeStep]) -> list[float | None]:
    """Before each step, seconds that the node needed; None: it may have slept."""
    return [None, *itertools.starmap(_between, itertools.pairwise(steps))][: len(steps)]


def _between(earlier: NodeStep, later: NodeStep) -> float | None:
    gap_s = max(0.0, later.began_s - earlier.ended_s)
    return gap_s if earlier.goes_on and gap_s <= _MOST_BETWEEN_S else None


def _took_s(steps: Sequence[NodeStep], between_s: Sequence[float | None]) -> Values:
    return np.array([step.figures.step_ms / 1e3 + (gap_s or 0.0) for step, gap_s in zip(steps, between_s, strict=True)])


def _computed(steps: Sequence[NodeStep], until_s: Values) -> Values:
    """Seconds for which a node computed until then."""
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


def fitted(found: Iterable[StepCost]) -> Fitted:
    """The formula's coefficients; raises BatonError where one kind of step is missing."""
    found = list(found)
    prefill = [one for one in found if one.prefill_tokens and not one.decodes]
    decode = [one for one in found if one.decodes and not one.prefill_tokens]
    if not prefill or not decode:
        raise BatonError(f"{len(prefill)} steps with prompts and {len(decode)} with streams are too few for a formula")
    before_prompts_ms, before_streams_ms = _mostly_between_ms(prefill), _mostly_between_ms(decode)
    prompt_rows = [(1.0, one.prefill_tokens) for one in prefill]
    of_prompts, prompts_slower = _contended(prompt_rows, prefill, before_prompts_ms)
    stream_rows = [(1.0, one.context_tokens, one.decodes) for one in decode]
    of_streams, streams_slower = _contended(stream_rows, decode, before_streams_ms)
    times = FormulaTimes(
        prefill_ms=of_prompts[0],
        prefill_token_ms=of_prompts[1],
        prefill_square_ms=0.0,
        decode_ms=of_streams[0],
        decode_context_ms=of_streams[1],
        decode_sequence_ms=of_streams[2],
    )
    return Fitted(times, Contention(prompts_slower, streams_slower), before_prompts_ms)


def _mostly_between_ms(steps: Sequence[StepCost]) -> float:
    known = [one.between_ms for one in steps if one.between_ms is not None]
    return median(known) if known else 0.0


def _contended(
    rows: Sequence[Sequence[float]], steps: Sequence[StepCost], mostly_ms: float
) -> tuple[list[float], float]:
    """Coefficients of the columns, and how much slower a step is beside a node that computes all the while."""
    matrix = np.array(rows, dtype=np.float64)
    took = np.array([one.ms + (mostly_ms if one.between_ms is None else one.between_ms) for one in steps])
    beside = np.array([one.beside for one in steps])
    best: tuple[float, Values, float] | None = None
    for slower in _SLOWDOWNS.tolist() if beside.any() else (0.0,):
        # Work is done at 1 / (1 + slower) of the speed for that share of the time: so much less than alone.
        stretch = 1 / np.maximum(0.05, 1 - beside * slower / (1 + slower))
        found = _least_squares(matrix * stretch[:, None], took)
        predicted = (matrix @ found) * stretch
        error = float(((predicted - took) ** 2).sum())
        if best is None or error < best[0] * (1 - 1e-9):
            sums = float(predicted.sum())
            best = error, found * (float(took.sum()) / sums if sums else 1.0), slower
    assert best is not None
    return [float(one) for one in best[1]], best[2]


def _least_squares(matrix: Values, wanted: Values) -> Values:
    """Coefficients of the columns, none below 0: whichever would be is left out."""
    kept = list(range(matrix.shape[1]))
    while True:
        part, *_ = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)
        lowest = int(np.argmin(part))
        if part[lowest] >= 0 or len(kept) == 1:
            break
        del kept[lowest]
    found = np.zeros(matrix.shape[1])
    found[kept] = np.maximum(part, 0.0)
    return found
