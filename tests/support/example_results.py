"""Made-up benchmark results in the format of the result files: a seeded model of a queue before a few engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.results.result_file import SCHEMA
from baton.bench.results.summary import Slo, distributions, summarize

SLO = Slo(ttft_ms=250.0, tpot_ms=100.0)
_PREFILL_S = 0.06
_STEP_S = 0.022


@dataclass(frozen=True)
class Behaviour:
    """How an arrangement behaves in this model."""

    name: str
    prefill_engines: int
    interference: float
    """Share of a decode step's time that a prefill beside it takes."""
    transfer_s: float = 0.0
    gpus: int = 2


COLOCATED = Behaviour("2 colocated", 2, interference=4.0)
DISAGGREGATED = Behaviour("1P1D", 1, interference=0.0, transfer_s=0.006)
CONDITIONAL = Behaviour("1P1D conditional", 1, interference=0.4, transfer_s=0.004)


def comparison(
    behaviours: Sequence[Behaviour] = (COLOCATED, DISAGGREGATED, CONDITIONAL),
    rates: Sequence[float] = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0),
    requests: int = 300,
    seed: int = 7,
    slo: Slo = SLO,
    has_outcomes: bool = True,
) -> dict[str, Any]:
    """Return a whole result file of a comparison."""
    rng = np.random.default_rng(seed)
    return {
        "schema": SCHEMA,
        "kind": "compare",
        "created": "2026-11-21T22:30:00Z",
        "machine": {
            "processor": "AMD EPYC (Zen 5)",
            "usable_cores": 2,
            "memory_bytes": 24 << 30,
            "system": "Linux 6.18",
        },
        "versions": {"python": "3.11.7", "baton-serve": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
        "command": ["baton", "bench", "compare", "--shape", "0.5b", "--goodput", "ttft:250", "tpot:100"],
        "seed": seed,
        "workload": {"dataset": "random", "random_input_len": 512, "random_output_len": 64, "burstiness": 1.0},
        "arrangements": [
            {
                "name": one.name,
                "gpus": one.gpus,
                "rates": [measurement(one, rate, requests, rng, slo, has_outcomes) for rate in rates],
            }
            for one in behaviours
        ],
    }


def measurement(
    behaviour: Behaviour, rate: float, requests: int, rng: np.random.Generator, slo: Slo, has_outcomes: bool
) -> dict[str, Any]:
    """Return one entry of `rates`."""
    outcomes = Outcomes()
    planned = np.cumsum(rng.exponential(1.0 / rate, requests))
    free = np.zeros(behaviour.prefill_engines)
    timeline: dict[str, list[list[Any]]] = {}
    waited = np.zeros(requests)
    load = min(1.0, rate * _PREFILL_S / behaviour.prefill_engines)
    for index in range(requests):
        engine = int(free.argmin())
        prompt = int(rng.integers(256, 768))
        start = max(planned[index], free[engine])
        end = start + _PREFILL_S * prompt / 512
        free[engine] = end + behaviour.interference * load * 0.05
        waited[index] = start - planned[index]
        slow = 1.0 + behaviour.interference * load * rng.exponential(1.5, 63)
        gaps = _STEP_S * rng.lognormal(0.0, 0.12, 63) * slow
        gaps[0] += behaviour.transfer_s
        outcomes.append(_outcome(index, planned[index], end, gaps, prompt))
        _draw(timeline, behaviour, engine, start, end, gaps, prompt)
    duration = float(outcomes.finished_s.max(initial=0.0))
    summary = summarize(outcomes, duration, slo)
    return {
        "rate": rate,
        "summary": summary,
        **distributions(outcomes, summary),
        "ttft_parts": {
            "queue": float(waited.sum() / max(1, requests) * 1e3),
            "prefill": _PREFILL_S * 1e3,
            "router and network": 1.4,
        },
        "timeline": timeline,
        **({"outcomes": outcomes.columns()} if has_outcomes else {}),
    }


def _outcome(index: int, planned_s: float, first_s: float, gaps: np.ndarray, prompt: int) -> Outcome:
    return Outcome(
        index=index,
        planned_s=float(planned_s),
        sent_s=float(planned_s),
        first_token_s=float(first_s),
        finished_s=float(first_s + gaps.sum()),
        input_length=prompt,
        output_length=64,
        gaps=gaps.tolist(),
    )


def _draw(
    timeline: dict[str, list[list[Any]]],
    behaviour: Behaviour,
    engine: int,
    start_s: float,
    end_s: float,
    gaps: np.ndarray,
    prompt: int,
) -> None:
    """Add a prompt's step, its transfer, and the decode steps after it that find the node idle, to the timeline."""
    if behaviour.transfer_s:
        timeline.setdefault("prefill-0", []).append([start_s, end_s, "prefill", prompt])
        at = end_s + behaviour.transfer_s
        node = timeline.setdefault("decode-0", [])
        node.append([end_s, at, "transfer", prompt * 24576])
    else:
        node = timeline.setdefault(f"colocated-{engine}", [])
        node.append([start_s, end_s, "prefill", prompt])
        at = end_s
    last = next((row[1] for row in reversed(node) if row[2] == "decode"), 0.0)
    for gap in gaps.tolist():
        if at >= last:
            node.append([at, at + gap * 0.9, "decode", 8])
        at += gap


def all_failed(requests: int = 40) -> dict[str, Any]:
    """Return the result file of a run whose endpoint was down."""
    result = comparison((COLOCATED,), (4.0,), 0)
    outcomes = Outcomes()
    for index in range(requests):
        outcomes.append(Outcome(index, index / 4, index / 4, None, index / 4, 512, 0, error="connection refused"))
    result["arrangements"][0]["rates"] = [
        {"rate": 4.0, "summary": summarize(outcomes, requests / 4, SLO), "outcomes": outcomes.columns()}
    ]
    return result
