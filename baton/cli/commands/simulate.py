"""`baton simulate`: simulates a cluster in virtual time."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.bench.arrangement import Arrangement
from baton.bench.flag import Flag
from baton.bench.simulator.config import Failure, NodeSizes, Policy, Preset, SimulatedSpeculation, SimulationConfig
from baton.bench.simulator.shapes import RankFigures
from baton.bench.simulator.step_times import read_step_times
from baton.bench.workloads.spec import Dataset, WorkloadSpec
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags
from baton.cli.bench.options import Destination, MoreGoodputArgument, ReportOption, check_files, created_now
from baton.cli.bench.serve import count_requests, slo_of, usage_errors
from baton.cli.bench.tenants import (
    DurationOption,
    FairnessOption,
    MaxQueueOption,
    TenantOption,
    print_tenants,
    with_tenants,
)
from baton.cli.output import Format, OutputOption, print_table, print_text
from baton.cli.waiting import ProgressLine
from baton.errors import BatonError, InvalidRequest
from baton.messages.node import Role
from baton.messages.node_model import ONE_RANK, NodeShape

if TYPE_CHECKING:
    from baton.bench.simulator.plan import SimulationPlan

_MOST_NODES = 10_000
_RANKS = {"min": 1, "max": 64}
_DRAFTS = FlagsOf(SimulatedSpeculation, "share num_speculative_tokens coverage row_ms", are_optional=True)
_SECONDS = r"([0-9]+(?:\.[0-9]+)?)"
_FAILURE = re.compile(rf"([a-z]+-[0-9]+)@{_SECONDS}(?:\+{_SECONDS})?\Z")


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(simulate)


@with_flags
def simulate(
    more_goodput: MoreGoodputArgument = None,
    preset: Annotated[Preset | None, typer.Option(help="Begin with a published experiment.")] = None,
    arrangement: Annotated[
        list[str] | None,
        typer.Option(help="Arrangement of nodes: colocated:N, xPyD or conditional:xPyD. May be repeated."),
    ] = None,
    splits: Annotated[
        int | None, typer.Option(help="Simulate every arrangement of N nodes.", min=2, max=_MOST_NODES)
    ] = None,
    policy: Annotated[list[Policy] | None, typer.Option(help="Placement policy. May be repeated.")] = None,
    routers: Annotated[
        Given,
        FlagsOf(SimulationConfig, "choices cells kv_room steps_ahead target_ttft_ms target_tpot_ms", are_optional=True),
    ] = NOT_GIVEN,
    moves: Annotated[
        Given, FlagsOf(SimulationConfig, "planner planner_law flip_s evacuation", are_optional=True)
    ] = NOT_GIVEN,
    images: Annotated[Given, FlagsOf(SimulationConfig, "num_encode image_share", are_optional=True)] = NOT_GIVEN,
    arrivals: Annotated[
        Given,
        FlagsOf(
            WorkloadSpec,
            "dataset dataset_path num_prompts request_rate burstiness",
            are_optional=True,
            flags={
                "dataset": Flag("Kind of workload. Default: random.", "--dataset-name", kind=Dataset),
                "dataset_path": Flag("File with a trace.", kind=Path, convert=str),
                "num_prompts": Flag("Number of requests.", min=1),
                "request_rate": Flag("Requests per second."),
                "burstiness": Flag("1: Poisson arrivals; less: in bursts; more: evenly."),
            },
        ),
    ] = NOT_GIVEN,
    tenant: TenantOption = None,
    duration: DurationOption = None,
    fairness: FairnessOption = None,
    max_queue: MaxQueueOption = None,
    closed_loop: Annotated[Given, FlagsOf(SimulationConfig, "max_concurrency", are_optional=True)] = NOT_GIVEN,
    lengths: Annotated[
        Given,
        FlagsOf(
            WorkloadSpec,
            "random_input_len random_output_len random_range_ratio time_scale skip_broken_lines",
            are_optional=True,
            flags={
                "random_input_len": Flag("Tokens of each prompt.", min=1),
                "random_output_len": Flag("Tokens to generate for each request.", min=1),
                "random_range_ratio": Flag("Lengths vary by at most this share.", min=0, max=0.999),
            },
        ),
    ] = NOT_GIVEN,
    step_times: Annotated[
        Path | None,
        typer.Option(
            help="Step times as JSON: from `baton bench engine`, a table or a formula. Default: those of OPT-13B."
        ),
    ] = None,
    sizes: Annotated[
        Given,
        FlagsOf(
            NodeSizes,
            "block_size cache_tokens kv_bytes_per_token max_num_seqs max_num_batched_tokens encode_ms",
            are_optional=True,
        ),
    ] = NOT_GIVEN,
    prefill_max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="--max-num-batched-tokens of prefill nodes.", min=1)
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="Ranks of each node that compute each layer together, each a GPU. Default: 1.", **_RANKS),
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="Stages of each node, of --tp ranks each. Default: 1.", **_RANKS)
    ] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="--tp of prefill nodes.", **_RANKS)] = None,
    prefill_pp: Annotated[int | None, typer.Option(help="--pp of prefill nodes.", **_RANKS)] = None,
    decode_tp: Annotated[int | None, typer.Option(help="--tp of decode nodes.", **_RANKS)] = None,
    decode_pp: Annotated[int | None, typer.Option(help="--pp of decode nodes.", **_RANKS)] = None,
    ranks: Annotated[
        Given,
        FlagsOf(RankFigures, "exchange_ms exchange_token_ms stage_ms weight_bytes rank_bytes", are_optional=True),
    ] = NOT_GIVEN,
    steps: Annotated[Given, FlagsOf(NodeSizes, "prompts_first", are_optional=True)] = NOT_GIVEN,
    drafts: Annotated[Given, _DRAFTS] = NOT_GIVEN,
    fixed_drafts: Annotated[
        bool,
        typer.Option(
            help="All drafts have --draft-tokens tokens; without this, their length adapts to how often they are right."
        ),
    ] = False,
    network: Annotated[Given, FlagsOf(SimulationConfig, "nic_bytes_per_s message_s", are_optional=True)] = NOT_GIVEN,
    fail: Annotated[
        list[str] | None,
        typer.Option(help="Failure of a node, as NODE@SECONDS or NODE@SECONDS+REPAIR_SECONDS. May be repeated."),
    ] = None,
    failures: Annotated[Given, FlagsOf(SimulationConfig, "mtbf_s repair_s", are_optional=True)] = NOT_GIVEN,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limits that a good request meets: ttft:MS tpot:MS e2el:MS.", metavar="SLO ..."),
    ] = None,
    find_goodput: Annotated[
        bool, typer.Option(help="Search the highest rate at which enough requests are good.")
    ] = False,
    attainment: Annotated[
        float, typer.Option(help="Share of good requests that is enough for --find-goodput.", min=0.01, max=1)
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)] = 0,
    timeline: Annotated[bool, typer.Option(help="Keep every step of every node in the result file.")] = False,
    save_detailed: Annotated[bool, typer.Option(help="Keep every request in the result file.")] = False,
    result_filename: Annotated[Path | None, typer.Option(help="File to which the result is written.")] = None,
    report: ReportOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Simulate a cluster: the real scheduler, block pool, placement and failover under a virtual clock.

    The time of a step comes from published coefficients or from measurements of `baton bench engine`. Transfers share
    the bandwidth of each node's network card. Equal seeds give equal results. The result file has the format of
    `baton bench`.
    """
    from baton.bench.simulator.plan import run_plan

    check_files(result_filename, report)
    slo = slo_of(goodput, more_goodput)
    with usage_errors():
        plan = _plan(preset, arrivals.get("dataset_path"), seed)
        if step_times is not None:
            sizes["times"] = read_step_times(step_times)
        if (speculation := _speculation(drafts, fixed_drafts)) is not None:
            sizes["speculation"] = speculation
        if fail:
            failures["failures"] = list(map(_failure, fail))
        config = replace(plan.config, **routers, **moves, **images, **closed_loop, **network, **failures)
        paced = "request_rate" in arrivals
        replaced = {"--request-rate": paced, "--num-prompts": "num_prompts" in arrivals, "--find-goodput": find_goodput}
        config = with_tenants(config, tenant, duration, fairness, max_queue, replaced)
        plan = replace(
            plan,
            workload=replace(plan.workload, **arrivals, **lengths),
            config=replace(config, sizes=replace(config.sizes, **sizes, **steps), keeps_timeline=timeline),
            policies=[choice.value for choice in policy] if policy else plan.policies,
            keeps_outcomes=save_detailed,
            attainment=attainment,
            finds_goodput=find_goodput or (plan.finds_goodput and not paced and not tenant),
        )
        if plan.workload.is_trace and not paced:
            plan = replace(plan, workload=replace(plan.workload, request_rate=math.inf))
        if "rank_bytes" in ranks and "cache_tokens" in sizes:
            raise InvalidRequest("--rank-memory-gb", "can't be used together with --cache-tokens")
        figures = replace(plan.ranks if step_times is None else RankFigures(0, 0, 0, 0), **ranks)
        prefill = NodeShape(prefill_tp or tp or 1, prefill_pp or pp or 1)
        decode = NodeShape(decode_tp or tp or 1, decode_pp or pp or 1)
        plan = _divided(plan, figures, prefill, decode, prefill_max_num_batched_tokens)
        plan = _with_arrangements(replace(plan, slo=slo or plan.slo), arrangement, splits)
        _check(plan)
        tenants = plan.tenants_workload()
        total = count_requests(plan.workload) if tenants is None else len(tenants)
    created = created_now()
    with _progress(total, output is Format.TEXT) as progress:
        result = run_plan(plan, created, progress)
    Destination(output, result_filename, report).show(result, lambda: _print(result), _failures(result))
    if not any(rate["summary"]["completed"] for arrangement in result["arrangements"] for rate in arrangement["rates"]):
        raise BatonError("no request was served; the errors are listed above")


def _plan(preset: Preset | None, trace: str | None, seed: int) -> SimulationPlan:
    from baton.bench.simulator.plan import SimulationPlan, preset_plan

    if preset is not None:
        return preset_plan(preset, trace, seed)
    pair = Arrangement(1, 1)
    return SimulationPlan(WorkloadSpec(request_rate=1.0, seed=seed), SimulationConfig(pair, seed=seed), [pair])


def _speculation(drafts: Given, is_fixed: bool) -> SimulatedSpeculation | None:
    if "share" in drafts:
        return SimulatedSpeculation(**drafts, adapts=not is_fixed)
    others = [flag.name for name, (flag, _) in _DRAFTS.options().items() if name in drafts]
    for option in [*others, *(["--fixed-drafts"] if is_fixed else [])]:
        raise InvalidRequest(option, "needs --draft-share")
    return None


def _divided(
    plan: SimulationPlan, figures: RankFigures, prefill: NodeShape, decode: NodeShape, prefill_chunk: int | None
) -> SimulationPlan:
    """The plan with nodes of these shapes; its sizes are those of nodes of one rank.

    `prefill_chunk`: the most tokens in a step of prefill nodes; None: as in one of decode nodes.
    """
    sizes = plan.config.sizes
    of_prefill = replace(sizes, max_num_batched_tokens=prefill_chunk or sizes.max_num_batched_tokens)
    config = replace(
        plan.config, sizes=figures.sizes_of(sizes, decode), prefill_sizes=figures.sizes_of(of_prefill, prefill)
    )
    return replace(plan, config=config, ranks=figures)


def _with_arrangements(plan: SimulationPlan, arrangement: Sequence[str] | None, splits: int | None) -> SimulationPlan:
    if arrangement and splits:
        raise InvalidRequest("--splits", "can't be used together with --arrangement")
    arrangements = Arrangement.splits(splits) if splits else [Arrangement.parse(text) for text in arrangement or ()]
    return replace(plan, arrangements=arrangements or plan.arrangements)


def _failure(text: str) -> Failure:
    match = _FAILURE.match(text)
    if match is None:
        raise InvalidRequest("--fail", f"{text!r} is not NODE@SECONDS or NODE@SECONDS+SECONDS, such as decode-0@30+60")
    return Failure(match[1], float(match[2]), float(match[3]) if match[3] else math.inf)


def _check(plan: SimulationPlan) -> None:
    from baton.bench.simulator.cells import cell_configs

    spec = plan.workload
    for arrangement in plan.arrangements:
        if arrangement.num_nodes > _MOST_NODES:
            raise InvalidRequest("--arrangement", f"{arrangement} has more than {_MOST_NODES:,} nodes")
        cell_configs(replace(plan.config, arrangement=arrangement))
    if plan.finds_goodput and not plan.slo:
        raise InvalidRequest("--find-goodput", "needs --goodput")
    if plan.finds_goodput and spec.is_trace:
        raise InvalidRequest("--find-goodput", "changes the request rate, and a trace has none")
    if any(plan.config.sizes_of(role).cache_tokens < plan.config.sizes.block_size for role in Role):
        raise InvalidRequest("--cache-tokens", "is less than one block")
    names = {
        f"{role}-{number}"
        for arrangement in plan.arrangements
        for role, count in (("prefill", arrangement.prefill), ("decode", arrangement.decode))
        for number in range(count)
    }
    for failure in plan.config.failures:
        if failure.node_id not in names:
            raise InvalidRequest("--fail", f"no node is called {failure.node_id}")


@contextlib.contextmanager
def _progress(total: int, is_wanted: bool) -> Iterator[Callable[[str, int], None]]:
    """Shows on a terminal how many requests have ended. Starts no thread, because cells are forked meanwhile."""
    if not is_wanted or not sys.stderr.isatty():
        yield lambda name, ended: None
        return
    line = ProgressLine()
    try:
        yield lambda name, ended: line.show(f"{name}: {ended} of {total} requests")
    finally:
        line.clear()


def _failures(result: dict[str, Any]) -> list[str]:
    """Why requests failed: a line for each error, at most twelve."""
    lines = [
        f"{arrangement['name']}: {count} failed: {error}"
        for arrangement in result["arrangements"]
        for rate in arrangement["rates"]
        for error, count in rate["summary"].get("errors", {}).items()
    ]
    return lines[:12]


def _drafted_row(run: Sequence[str], simulator: dict[str, Any]) -> list[str]:
    """A row about the drafts of a run: tokens per sequence and step, drafts, their tokens, the share of right ones."""
    drafts, tokens, right = (simulator[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return [*run, f"{simulator['tokens_per_step']:.2f}", str(drafts), str(tokens), f"{right / max(1, tokens):.0%}"]


def _shapes(result: dict[str, Any]) -> Iterator[str]:
    """The shapes of the nodes of each arrangement, if any has several ranks."""
    for arrangement in result["arrangements"]:
        shapes = ", ".join(f"{role} {shape}" for role, shape in arrangement["shapes"].items())
        if any(shape != str(ONE_RANK) for shape in arrangement["shapes"].values()):
            yield f"{arrangement['name']}: {arrangement['gpus']} ranks ({shapes})"


def _moves(result: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each move that a planner has decided."""
    for arrangement in result["arrangements"]:
        for rate in arrangement["rates"]:
            for move in rate.get("moves", ()):
                yield [arrangement["name"], f"{move['at_s']:.1f}", move["node"], move["to"], move["reason"]]


def _encoders(result: dict[str, Any]) -> Iterator[str]:
    """A line for each run with encode nodes."""
    for arrangement in result["arrangements"]:
        for rate in arrangement["rates"]:
            if found := rate["simulator"].get("encoders"):
                count = found["num_images"]
                wait_ms, encode_ms = (found[part] / max(1, count) * 1e3 for part in ("waited_s", "busy_s"))
                yield (
                    f"{arrangement['name']}: encode nodes made rows of {count} images in {encode_ms:.0f} ms each, "
                    f"which had waited for {wait_ms:.0f} ms"
                )


def _print(result: dict[str, Any]) -> None:
    rows, drafted = [], []
    for arrangement in result["arrangements"]:
        for rate in arrangement["rates"]:
            summary, simulator = rate["summary"], rate["simulator"]
            rows.append(
                [
                    arrangement["name"],
                    "-" if rate["rate"] is None else f"{rate['rate']:.4g}",
                    f"{summary['mean_ttft_ms']:.1f}",
                    f"{summary['p99_ttft_ms']:.1f}",
                    f"{summary['mean_tpot_ms']:.2f}",
                    f"{summary['p99_tpot_ms']:.2f}",
                    f"{summary['p99_largest_gap_ms']:.1f}",
                    f"{summary['total_cached_tokens'] / max(1, summary['total_input_tokens']):.0%}",
                    f"{summary['attainment']:.1%}" if "attainment" in summary else "-",
                    str(summary["failed"]),
                    f"{simulator['cpu_us_per_request']:.0f}",
                ]
            )
            if "tokens_per_step" in simulator:
                drafted.append(_drafted_row(rows[-1][:2], simulator))
    columns = ["ARRANGEMENT", "RATE", "TTFT MS", "P99", "TPOT MS", "P99", "P99 GAP MS", "CACHED", "ATTAINED", "FAILED"]
    print_table([*columns, "CPU US"], rows)
    for lines in (list(_shapes(result)), list(_encoders(result))):
        if lines:
            print_text()
        for line in lines:
            print_text(line)
    for arrangement in result["arrangements"]:
        for rate in arrangement["rates"]:
            if "tenants" in rate:
                print_tenants(rate["tenants"], arrangement["name"])
    moves = list(_moves(result))
    if moves:
        print_text()
        print_table(["ARRANGEMENT", "AT S", "NODE", "TO", "WHY"], moves)
    if drafted:
        print_text()
        print_table(["ARRANGEMENT", "RATE", "TOK/STEP", "DRAFTS", "TOKENS", "RIGHT"], drafted)
    if "goodput" in result:
        print_text()
        print_table(
            ["ARRANGEMENT", "GOODPUT/S", "PER GPU"],
            [
                [
                    arrangement["name"],
                    f"{arrangement['goodput']['rate']:.3g}",
                    f"{arrangement['goodput']['per_gpu']:.3g}",
                ]
                for arrangement in result["arrangements"]
            ],
        )
        ratio = result["goodput_ratio"]
        if ratio is not None:
            print_text(
                f"\nbest split: {result['best_split']}, {ratio:.2f} times the goodput per GPU of colocated nodes"
            )
