"""The result file and the printed lines of a validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from baton.bench.results.outcome import Outcomes
from baton.bench.results.result_file import Result, new_result
from baton.bench.results.summary import measurement, summarize
from baton.bench.simulator.plan import timeline_rows
from baton.bench.simulator.router import FirstTokenParts
from baton.bench.validate.predict import MAX_BACKGROUND_SHARE, LoadPair, Means
from baton.bench.validate.run import Validated
from baton.errors import BatonError

WITHIN = 0.15
"""How far simulated means may be from live ones, as a share."""
COLUMNS = (
    *("MODEL", "RATE/S", "REQUESTS", "TTFT MS", "SIMULATED", "RATIO", "OWN STEPS"),
    *("TPOT MS", "SIMULATED", "RATIO", "OWN STEPS", "OTHERS"),
)


def compared(pair: LoadPair) -> dict[str, Any]:
    """Live and simulated means of one load.

    `own_steps`: simulated with step times fitted to this load. `others`: the largest share of the machine that other
    processes used in any segment.
    """
    live, simulated, own = _means(pair)
    means_by_segment = [_means(replace(pair, **parts)) for parts in _parts(pair)]
    values: dict[str, Any] = {
        "rate": pair.rate,
        "requests": sum(len(segment.outcomes) for segment in pair.segments),
        "stretches": len(pair.segments),
        "others": max(means.background_share for means in pair.segments),
        "overheads": asdict(pair.overheads),
    }
    for name in ("ttft_ms", "tpot_ms"):
        measured, predicted, known = (getattr(run, name) for run in (live, simulated, own))
        values[name] = {
            "live": measured,
            "simulated": predicted,
            "ratio": _ratio(predicted, measured),
            "own_steps": known,
            "own_steps_ratio": _ratio(known, measured),
            "ratio_by_stretch": [
                _ratio(getattr(theirs, name), getattr(mine, name)) for mine, theirs, _ in means_by_segment
            ],
        }
    return values


def _means(pair: LoadPair) -> tuple[Means, Means, Means]:
    """Means of live requests, of simulated ones, and of those simulated with the load's own steps."""
    live, simulated, own = (
        Means.of(*(run.outcomes for run in runs)) for runs in (pair.segments, pair.simulated, pair.with_own_steps)
    )
    return live, simulated, own


def _parts(pair: LoadPair) -> Iterator[dict[str, Any]]:
    for live, simulated, own in zip(pair.segments, pair.simulated, pair.with_own_steps, strict=True):
        yield {"segments": [live], "simulated": [simulated], "with_own_steps": [own]}


def _ratio(simulated: float, live: float) -> float:
    return simulated / live if live else 0.0


def validation_result(
    validated: Sequence[Validated], seed: int, created: str, failed: Mapping[str, BatonError] | None = None
) -> Result:
    """The result file's content. `failed`: errors of models that were not measured.

    Live and simulated are two arrangements, so a report compares them.
    """
    arrangements = [arrangement for validation in validated for arrangement in _arrangements(validation)]
    workload = validated[0].config.workload.to_json() if validated else {}
    result = new_result("validate", workload, arrangements, seed, created)
    failures = [
        f"{validation.config.name} ended early: {validation.failure}" for validation in validated if validation.failure
    ]
    failures += [f"nothing was measured of {name}: {error}" for name, error in (failed or {}).items()]
    return result | {
        "is_complete": not failures,
        "notes": failures,
        "within": WITHIN,
        "models": [
            {
                "model": validation.config.name,
                "arrangement": str(validation.config.arrangement),
                "shapes": dict(validation.shapes),
                "single": asdict(validation.single),
                "step_times": asdict(validation.steps.times),
                "contention": asdict(validation.steps.contention),
                "drafts": None if validation.drafts is None else asdict(validation.drafts),
                "loads": [compared(pair) for pair in validation.pairs],
            }
            for validation in validated
        ],
    }


def rows(result: Result) -> list[list[str]]:
    """Table rows, one for each load of each model."""
    return [
        [
            model["model"],
            f"{load['rate']:.2f}",
            str(load["requests"]),
            *_cells(load["ttft_ms"]),
            *_cells(load["tpot_ms"]),
            f"{load['others']:.0%}",
        ]
        for model in result["models"]
        for load in model["loads"]
    ]


def verdict(result: Result) -> list[str]:
    """The conclusions as sentences."""
    lines = list(result["notes"])
    ratios = [
        (abs(load[name]["ratio"] - 1), f"{model['model']} at {load['rate']:.2f}/s, {name.removesuffix('_ms').upper()}")
        for model in result["models"]
        for load in model["loads"]
        for name in ("ttft_ms", "tpot_ms")
    ]
    if not ratios:
        return lines
    good = sum(off <= WITHIN for off, _ in ratios)
    worst, where = max(ratios)
    lines.append(f"{good} of {len(ratios)} means within {WITHIN:.0%}; the farthest is {worst:.0%} off: {where}")
    for model in result["models"]:
        times, slower = model["step_times"], model["contention"]
        lines.append(
            f"{model['model']}: prefill {times['prefill_ms']:.2f} ms + {times['prefill_token_ms']:.4f} ms/token, "
            f"decode {times['decode_ms']:.2f} ms + {times['decode_context_ms']:.2e} ms/context token + "
            f"{times['decode_sequence_ms']:.3f} ms/sequence; beside another node that computes prefill takes "
            f"{1 + slower['prefill']:.2f} and decode {1 + slower['decode']:.2f} times as long"
        )
        drafts = model["drafts"]
        if drafts is not None:
            lines.append(
                f"{model['model']}: {drafts['coverage']:.0%} of the sequences of a step have drafts, of "
                f"{drafts['num_speculative_tokens']} tokens; of those behind right ones {drafts['share']:.0%} are right"
            )
    noisy = [
        f"{model['model']} at {load['rate']:.2f}/s"
        for model in result["models"]
        for load in model["loads"]
        if _is_noisy(load)
    ]
    if noisy:
        lines.append(f"other processes used more than {MAX_BACKGROUND_SHARE:.0%} of the machine: {', '.join(noisy)}")
    return lines


def _cells(means: dict[str, float]) -> list[str]:
    return [f"{means[name]:.2f}" for name in ("live", "simulated", "ratio", "own_steps_ratio")]


def _is_noisy(load: Mapping[str, Any]) -> bool:
    return bool(load["others"] > MAX_BACKGROUND_SHARE)


def _arrangements(validation: Validated) -> list[dict[str, Any]]:
    named = {
        "prefill": validation.config.arrangement.prefill,
        "decode": validation.config.arrangement.decode,
        "gpus": 0,
    }
    return [
        {"name": f"{validation.config.name} live", **named, "rates": [_live(pair) for pair in validation.pairs]},
        {
            "name": f"{validation.config.name} simulated",
            **named,
            "rates": [_simulated(pair) for pair in validation.pairs],
        },
    ]


def _live(pair: LoadPair) -> dict[str, Any]:
    """All segments merged; plots over time are those of the first segment."""
    runs = [segment.live.run for segment in pair.segments]
    outcomes = _merged(run.outcomes for run in runs)
    offered = sum(segment.workload.num_prompts or 0 for segment in pair.segments)
    summary = summarize(outcomes, sum(run.duration_s for run in runs), offered=offered)
    first = pair.segments[0].live
    more = {
        "generator": max((run.load for run in runs), key=lambda load: load.lag_p99_ms).to_json(),
        "busy": first.busy_shares(),
        "timeline": first.timeline_rows(),
    }
    return measurement(pair.rate, outcomes, summary, more)


def _simulated(pair: LoadPair) -> dict[str, Any]:
    outcomes = _merged(run.outcomes for run in pair.simulated)
    summary = summarize(outcomes, sum(run.duration_s for run in pair.simulated))
    parts = FirstTokenParts()
    for run in pair.simulated:
        parts.add(run.parts)
    more = {"ttft_parts": parts.means_ms(), "timeline": timeline_rows(pair.simulated[0])}
    return measurement(pair.rate, outcomes, summary, more)


def _merged(runs: Iterable[Outcomes]) -> Outcomes:
    merged = Outcomes()
    for run in runs:
        merged.extend(run)
    return merged
