"""`baton bench compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from baton.bench.config import CompareConfig
from baton.bench.flag import Flag
from baton.bench.workloads.spec import PLAIN_BURSTINESS, WorkloadSpec
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags
from baton.cli.bench.options import (
    CacheMemoryOption,
    Destination,
    DtypeOption,
    ModelOption,
    MoreGoodputArgument,
    ReportOption,
    ResultFileOption,
    ShapeOption,
    check_files,
    chosen_model,
    created_now,
    print_lines,
)
from baton.cli.bench.serve import slo_of, usage_errors
from baton.cli.output import Format, OutputOption, print_note, print_table, print_text

if TYPE_CHECKING:
    from baton.bench.compare.run import Comparison
    from baton.bench.results.result_file import Result

_QUICK: Given = {
    "run_s": 30.0,  # at most: each run gets its share of the time
    "max_tries": 5,
    "budget_s": 870.0,  # leaves half a minute of the 15 minutes that --quick promises
    "is_baseline_tuned_alone": True,
    "max_sizes": 3,
    "tune_tries": 3,
}


@with_flags
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
    lengths: Annotated[
        Given,
        FlagsOf(
            WorkloadSpec,
            "random_input_len random_output_len random_range_ratio burstiness",
            flags={
                "random_input_len": Flag("Tokens of a prompt.", min=1),
                "random_output_len": Flag("Tokens to generate.", min=2),
                "burstiness": PLAIN_BURSTINESS,
            },
            defaults={"random_input_len": 512, "random_output_len": 64},
        ),
    ] = NOT_GIVEN,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits ttft:MS tpot:MS e2el:MS. Default: --ttft-factor times the TTFT and twice the TPOT of single "
            "requests.",
            metavar="SLO ...",
        ),
    ] = None,
    search: Annotated[Given, FlagsOf(CompareConfig, "ttft_factor attainment repeats run_s max_tries")] = NOT_GIVEN,
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
    from baton.bench.compare.report import compare_result
    from baton.bench.compare.run import compare as run_comparison

    check_files(result_filename, report)
    slo = slo_of(goodput, more_goodput)
    with usage_errors():
        arrangements = chosen(arrangement or (), nodes)
    if quick and not arrangement:
        arrangements = [choice for choice in arrangements if not choice.is_conditional]
    workload = WorkloadSpec(**lengths, seed=seed)
    with chosen_model(model, shape) as served:
        config = CompareConfig(
            arrangements,
            served,
            dtype,
            workload,
            slo if slo else None,
            **(search | (_QUICK if quick else {})),
            up_flags=("--kv-cache-memory", kv_cache_memory),
            max_num_batched_tokens=max_num_batched_tokens,
        )
        comparison = run_comparison(config, print_note)
    result = compare_result(config, comparison, created_now()) | {"model": served.name}
    destination = Destination(output, result_filename, report)
    destination.show(result, lambda: _print(config, comparison, result))
    destination.end_early(comparison.failure)


def _print(config: CompareConfig, comparison: Comparison, result: Result) -> None:
    from baton.bench.compare.report import rows, verdict

    spec = config.workload
    slo = ", ".join(f"{name} {limit}" for name, limit in comparison.slo.texts().items())
    print_text(
        f"{result['model']} on {result['machine']['processor']}, {result['machine']['usable_cores']} cores: prompts of "
        f"{spec.random_input_len} and outputs of {spec.random_output_len} tokens; SLO {slo}, kept by "
        f"{config.attainment:.0%}; {result['repeats']} of {config.repeats} searches, "
        f"up to {config.run_s:g} s of arrivals a rate\n"
    )
    at = f"{result['common_rate']:.2f}/S" if result["common_rate"] else "-"
    columns = ["ARRANGEMENT", "STEP TOKENS", "GOODPUT/S", "PER NODE", f"P99 TTFT AT {at}", "P99 TPOT"]
    print_table([*columns, "P99 LARGEST GAP MS"], rows(comparison))
    print_lines(verdict(result))
