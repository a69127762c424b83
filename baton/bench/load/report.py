"""The result file and the printed lines of a run of `baton bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.bench.load.run import LoadPlan, LoadRun
from baton.bench.results.result_file import Result, new_result
from baton.bench.results.summary import Slo, Summary, measurement, summarize

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (excl. 1st token)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
    "largest_gap": "Largest gap between tokens",
}


def serve_result(
    plan: LoadPlan, run: LoadRun, slo: Slo | None, percentiles: Sequence[float], label: str, created: str
) -> Result:
    """The result file's content: the schema of all benchmarks, and vLLM's keys beside it."""
    summary = summarize(run.outcomes, run.duration_s, slo, percentiles, offered=run.offered)
    workload = plan.workload
    rate = "inf" if workload.request_rate == float("inf") else workload.request_rate
    more = {"generator": run.load.to_json(), "outcomes": run.outcomes.columns()}
    measured = measurement(rate, run.outcomes, summary, more)
    arrangement = {"name": label or plan.target.address, "rates": [measured]}
    described = workload.to_json() | {"prompts_offered": run.offered}
    result = new_result("serve", described, [arrangement], workload.seed, created)
    return result | {
        "date": created,
        "backend": plan.target.backend,
        "label": label,
        "model_id": plan.target.model,
        "num_prompts": run.offered,
        "request_rate": rate,
        "burstiness": "inf" if workload.burstiness == float("inf") else workload.burstiness,
        "max_concurrency": plan.max_concurrency,
        "is_complete": not (run.was_interrupted or run.is_unreachable),
        "generator": run.load.to_json(),
        **summary,
    }


def rows(summary: Summary, percentiles: Sequence[float]) -> list[tuple[str, str]]:
    """Names and values, as vLLM prints them."""
    most, rate = summary["max_concurrency"], summary["request_rate"]
    lines = [
        ("Model", summary["model_id"]),
        ("Maximum request concurrency", "no limit" if most is None else f"{most}"),
        ("Request rate configured (req/s)", f"{rate}"),
        ("Successful requests", f"{summary['completed']}"),
        ("Failed requests", f"{summary['failed']}"),
        ("Benchmark duration (s)", f"{summary['duration']:.2f}"),
        ("Total input tokens", f"{summary['total_input_tokens']}"),
        ("Total cached input tokens", f"{summary['total_cached_tokens']}"),
        ("Total generated tokens", f"{summary['total_output_tokens']}"),
        ("Request throughput (req/s)", f"{summary['request_throughput']:.2f}"),
    ]
    if summary["request_goodput"] is not None:
        lines += [
            ("Request goodput (req/s)", f"{summary['request_goodput']:.2f}"),
            ("SLO attainment of offered requests", f"{summary['attainment']:.1%}"),
        ]
    lines += [
        ("Output token throughput (tok/s)", f"{summary['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{summary['total_token_throughput']:.2f}"),
    ]
    for name, title in METRICS.items():
        lines.append((title, ""))
        words = ["mean", "median", *(f"p{percent:g}" for percent in percentiles)]
        shown = name.replace("_", " ") if name == "largest_gap" else name.upper()
        lines += [(f"{word.capitalize()} {shown} (ms)", f"{summary[f'{word}_{name}_ms']:.2f}") for word in words]
    return lines


def remarks(run: LoadRun, summary: Summary, slo: Slo | None) -> list[str]:
    """Warnings that a reader needs beside the numbers."""
    lines = []
    if run.was_interrupted:
        lines.append(f"interrupted: {len(run.outcomes)} of {run.offered} requests that were sent had ended")
    if run.is_unreachable:
        lines.append("the endpoint went away: the run was ended; these are the results until then")
    if run.load.bottleneck and len(run.outcomes):
        lines.append(
            f"the generator was the bottleneck: {run.load.bottleneck}; use more --processes, or another machine"
        )
    for error, count in summary.get("errors", {}).items():
        lines.append(f"{count} failed: {error}")
    if slo and summary["completed"] and not summary["attainment"]:
        lines.append(f"no request met the SLO: {_nearest(summary, slo)}")
    return lines[:12]


def _nearest(summary: Summary, slo: Slo) -> str:
    limits: dict[str, Any] = slo.to_json()
    return ", ".join(
        f"median {name.removesuffix('_ms').upper()} was {summary[f'median_{name}']:.1f} ms of {limit:g} ms"
        for name, limit in limits.items()
    )
