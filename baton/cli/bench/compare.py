"""`baton bench compare`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.bench.files import ReportOption, ResultFileOption, check_files, exit_interrupted, write_files
from baton.cli.bench.load_options import (
    BurstinessOption,
    CacheMemoryOption,
    DtypeOption,
    MoreGoodputArgument,
    RangeRatioOption,
    ShapeOption,
)
from baton.cli.bench.model import ModelOption, chosen_model
from baton.cli.bench.serve import slo_of, usage_errors
from baton.cli.output import Format, OutputOption, print_json, print_note, print_table, print_text, print_yaml
from baton.errors import Cancelled

if TYPE_CHECKING:
    from baton.bench.compare.interleaved import CompareConfig
    from baton.bench.compare.run import Comparison

_QUICK_BUDGET_S = 870.0
"""Leaves half a minute of the 15 minutes that --quick promises."""
_QUICK_RUN_S = 30.0
"""Upper limit: each run gets its share of the time."""
_QUICK_TRIES = 5
_QUICK_SIZES = 3
_QUICK_TUNE_TRIES = 3


def compare(
    more_goodput: MoreGoodputArgument = None,
    arrangement: Annotated[
        list[str] | None,
        typer.Option(help="colocated, conditional or like 1p1d; may be repeated. Default: all; quick: no conditional."),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of each arrangement, each with one thread on one core.")] = 2,
    model: ModelOption = None,
    shape: ShapeOption = "",
    dtype: DtypeOption = "auto",
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 512,
    random_output_len: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 64,
    random_range_ratio: RangeRatioOption = 0.0,
    burstiness: BurstinessOption = 1.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits ttft:MS tpot:MS e2el:MS. Default: --ttft-factor times the TTFT and twice the TPOT of single "
            "requests.",
            metavar="SLO ...",
        ),
    ] = None,
    ttft_factor: Annotated[float, typer.Option(help="See --goodput.", min=1)] = 5.0,
    attainment: Annotated[float, typer.Option(help="Share of requests that must keep the SLO.", min=0.01, max=1)] = 0.9,
    repeats: Annotated[int, typer.Option(help="Searches for each arrangement's goodput.", min=1)] = 3,
    run_s: Annotated[float, typer.Option(help="Seconds of arrivals at each rate.", min=1)] = 15.0,
    tries: Annotated[int, typer.Option(help="Rates that a search may try.", min=2)] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter and fewer runs: a result within 15 minutes.")] = False,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a step. Default: the number with the highest goodput, searched for each arrangement "
            "first; quick: for the colocated one alone, and 512 for others.",
            min=64,
        ),
    ] = None,
    kv_cache_memory: CacheMemoryOption = "256MiB",
    seed: Annotated[int, typer.Option(help="Seed of the load.", min=0)] = 0,
    result_filename: ResultFileOption = None,
    report: ReportOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Compare disaggregated with colocated arrangements on the same cores, under the same load.

    Colocated nodes each compute prompts and decode; in 1p1d one node computes prompts and the other decodes; with
    conditional the router chooses for each request. All arrangements are started on the same cores and loaded in turn.
    Goodput is the highest rate at which enough requests keep the SLO, found by bisection. Before that the number of
    tokens of a step is tuned for the SLO. If the runs do not show which arrangement has the higher goodput, the result
    is "not settled", with what would settle it. Run it on an otherwise idle
    machine with a core for every node.
    """
    from baton.bench.arrangement import chosen
    from baton.bench.compare.interleaved import CompareConfig
    from baton.bench.compare.run import compare as run_comparison
    from baton.bench.workloads.spec import WorkloadSpec

    check_files(result_filename, report)
    slo = slo_of(goodput, more_goodput)
    with usage_errors():
        arrangements = chosen(arrangement or (), nodes)
    if quick and not arrangement:
        arrangements = [one for one in arrangements if not one.is_conditional]
    workload = WorkloadSpec(
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        burstiness=burstiness,
        seed=seed,
    )
    with chosen_model(model, shape) as found:
        config = CompareConfig(
            arrangements,
            found,
            dtype,
            workload,
            slo if slo else None,
            ttft_factor,
            attainment,
            repeats,
            _QUICK_RUN_S if quick else run_s,
            _QUICK_TRIES if quick else tries,
            _QUICK_BUDGET_S if quick else float("inf"),
            up_flags=("--kv-cache-memory", kv_cache_memory),
            max_num_batched_tokens=max_num_batched_tokens,
            is_baseline_tuned_alone=quick,
        )
        if quick:
            config = replace(config, max_sizes=_QUICK_SIZES, tune_tries=_QUICK_TUNE_TRIES)
        comparison = run_comparison(config, print_note)
    _finish(config, comparison, found.name, result_filename, report, output)


def _finish(
    config: CompareConfig, comparison: Comparison, model: str, path: Path | None, report: Path | None, output: Format
) -> None:
    from baton.bench.compare.report import compare_result, rows, verdict
    from baton.bench.results.result_file import without_outcomes

    result = compare_result(config, comparison, datetime.now(UTC).isoformat(timespec="seconds")) | {"model": model}
    if output is Format.JSON:
        print_json(without_outcomes(result))
    elif output is Format.YAML:
        print_yaml(without_outcomes(result))
    else:
        spec = config.workload
        slo = ", ".join(f"{name} {limit}" for name, limit in comparison.slo.texts().items())
        print_text(
            f"{model} on {result['machine']['processor']}, {result['machine']['usable_cores']} cores: prompts of "
            f"{spec.random_input_len} and outputs of {spec.random_output_len} tokens; SLO {slo}, kept by "
            f"{config.attainment:.0%}; {result['repeats']} of {config.repeats} searches, "
            f"up to {config.run_s:g} s of arrivals a rate\n"
        )
        at = f"{result['common_rate']:.2f}/S" if result["common_rate"] else "-"
        columns = [
            "ARRANGEMENT",
            "STEP TOKENS",
            "GOODPUT/S",
            "PER NODE",
            f"P99 TTFT AT {at}",
            "P99 TPOT",
            "P99 LARGEST GAP MS",
        ]
        print_table(columns, rows(comparison))
        print_text()
        for line in verdict(result):
            print_text(line)
    write_files(result, path, report)
    if isinstance(comparison.failure, Cancelled):
        exit_interrupted(path, report)
    if comparison.failure is not None:
        raise comparison.failure
