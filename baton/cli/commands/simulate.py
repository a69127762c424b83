"""`baton simulate`: simulates a cluster in virtual time."""

from __future__ import annotations

import contextlib
import enum
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.bench.files import ReportOption, check_files, write_files
from baton.cli.bench.load_options import MoreGoodputArgument
from baton.cli.bench.serve import Dataset, count_requests, slo_of, usage_errors
from baton.cli.output import Format, OutputOption, print_json, print_note, print_table, print_text, print_yaml
from baton.cli.steering import ProgressLine
from baton.errors import BatonError, InvalidRequest
from baton.messages.node import ONE_RANK, NodeShape, Role
from baton.messages.speculation import MAX_DRAFTS, SpeculationConfig

if TYPE_CHECKING:
    from baton.bench.simulator.drafts import SimulatedSpeculation
    from baton.bench.simulator.plan import SimulationPlan
    from baton.bench.simulator.shapes import RankFigures
    from baton.bench.simulator.simulation import Failure

_MOST_NODES = 10_000
_RANKS = {"min": 1, "max": 64}
_SECONDS = r"([0-9]+(?:\.[0-9]+)?)"
_FAILURE = re.compile(rf"([a-z]+-[0-9]+)@{_SECONDS}(?:\+{_SECONDS})?\Z")


class Preset(enum.StrEnum):
    """Published experiments that can be repeated."""

    DISTSERVE = "distserve"
    MOONCAKE = "mooncake"
    FLEET = "fleet"


class Policy(enum.StrEnum):
    """Placement policies: those of the router, then others for comparison."""

    COST = "cost"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LOAD_BALANCED = "load-balanced"
    LOCAL_CACHE = "local-cache"
    GLOBAL_CACHE = "global-cache"


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(simulate)


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
    choices: Annotated[
        int | None,
        typer.Option(
            help="Nodes of each role that the router considers, drawn at random for each request. Default: all.",
            min=1,
        ),
    ] = None,
    cells: Annotated[
        int | None,
        typer.Option(help="Divide nodes and load among N routers that know nothing of each other.", min=1),
    ] = None,
    dataset_name: Annotated[Dataset | None, typer.Option(help="Kind of workload. Default: random.")] = None,
    dataset_path: Annotated[Path | None, typer.Option(help="File with a trace.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Number of requests.", min=1)] = None,
    request_rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="1: Poisson arrivals; less: in bursts; more: evenly.")
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Largest number of open requests.", min=1)] = None,
    random_input_len: Annotated[int | None, typer.Option(help="Tokens of each prompt.", min=1)] = None,
    random_output_len: Annotated[int | None, typer.Option(help="Tokens to generate for each request.", min=1)] = None,
    random_range_ratio: Annotated[
        float | None, typer.Option(help="Lengths vary by at most this share.", min=0, max=0.999)
    ] = None,
    time_scale: Annotated[float | None, typer.Option(help="Replay a trace this many times as fast.")] = None,
    skip_broken_lines: Annotated[bool, typer.Option(help="Skip broken lines of a trace.")] = False,
    step_times: Annotated[
        Path | None,
        typer.Option(
            help="Step times as JSON: from `baton bench engine`, a table or a formula. Default: those of OPT-13B."
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.", min=1)] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache of a node of one rank holds.", min=16)
    ] = None,
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(help="Bytes of KV per token, of all layers.", min=0)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Largest number of sequences that a node runs at once.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Largest number of tokens in a step.", min=1)
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
    exchange_ms: Annotated[
        float | None,
        typer.Option(
            help="Time of a step in which --tp ranks exchange what they computed. Default: that of OPT-13B on A100, or "
            "0 with --step-times.",
            min=0,
        ),
    ] = None,
    exchange_token_ms: Annotated[
        float | None, typer.Option(help="The same for each token of a step, in milliseconds.", min=0)
    ] = None,
    stage_ms: Annotated[
        float | None, typer.Option(help="Time until a stage has what the stage before it computed.", min=0)
    ] = None,
    weights_gb: Annotated[
        float | None,
        typer.Option(
            help="Size of the weights, which the ranks of a node divide: each further rank has so much more room for "
            "KV. Default: that of OPT-13B, or 0 with --step-times.",
            min=0,
        ),
    ] = None,
    rank_memory_gb: Annotated[
        float | None,
        typer.Option(help="Memory of a rank for weights and KV, instead of --cache-tokens.", min=0.001),
    ] = None,
    prompts_first: Annotated[
        bool,
        typer.Option(help="Compute prompts in steps of their own, during which streams stall, instead of mixed steps."),
    ] = False,
    draft_share: Annotated[
        float | None,
        typer.Option(
            help="Nodes draft tokens (speculative decoding), and a drafted token is right with this probability if "
            "those before it are. Default: nothing is drafted.",
            min=0,
            max=1,
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Largest number of drafted tokens of a request in a step. "
            f"Default: {SpeculationConfig().num_speculative_tokens}.",
            min=1,
            max=MAX_DRAFTS,
        ),
    ] = None,
    draft_coverage: Annotated[
        float | None,
        typer.Option(
            help="Share of a request's steps before which there is something to draft. Default: 1.", min=0, max=1
        ),
    ] = None,
    draft_row_ms: Annotated[
        float | None,
        typer.Option(help="Time that a drafted token adds to a step. Default: that of one more sequence.", min=0),
    ] = None,
    fixed_drafts: Annotated[
        bool,
        typer.Option(
            help="All drafts have --draft-tokens tokens; without this, their length adapts to how often they are right."
        ),
    ] = False,
    nic_gb_per_s: Annotated[
        float | None, typer.Option(help="Bandwidth of each node's network card, in each direction.", min=0.001)
    ] = None,
    message_ms: Annotated[
        float | None, typer.Option(help="Latency of a message between router and node, one way.", min=0)
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(help="Failure of a node, as NODE@SECONDS or NODE@SECONDS+REPAIR_SECONDS. May be repeated."),
    ] = None,
    mtbf_s: Annotated[float | None, typer.Option(help="Mean time between failures of each node.", min=0.001)] = None,
    repair_s: Annotated[float | None, typer.Option(help="Seconds until a failed node serves again.", min=0)] = None,
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
    from baton.bench.results.result_file import without_outcomes
    from baton.bench.simulator.plan import run_plan
    from baton.bench.simulator.shapes import RankFigures

    check_files(result_filename, report)
    slo = slo_of(goodput, more_goodput)
    with usage_errors():
        plan = _plan(preset, dataset_path, seed)
        plan = replace(
            plan,
            workload=_changed(
                plan.workload,
                dataset=dataset_name.value if dataset_name else None,
                dataset_path=str(dataset_path) if dataset_path else None,
                num_prompts=num_prompts,
                request_rate=request_rate,
                burstiness=burstiness,
                random_input_len=random_input_len,
                random_output_len=random_output_len,
                random_range_ratio=random_range_ratio,
                time_scale=time_scale,
                skip_broken_lines=skip_broken_lines or None,
            ),
            config=_changed(
                plan.config,
                sizes=_changed(
                    plan.config.sizes,
                    times=_step_times(step_times),
                    block_size=block_size,
                    cache_tokens=cache_tokens,
                    kv_bytes_per_token=kv_bytes_per_token,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    prompts_first=prompts_first or None,
                    speculation=_speculation(draft_share, draft_tokens, draft_coverage, draft_row_ms, fixed_drafts),
                ),
                choices=choices,
                cells=cells,
                nic_bytes_per_s=None if nic_gb_per_s is None else nic_gb_per_s * 1e9,
                message_s=None if message_ms is None else message_ms / 1e3,
                failures=[_failure(text) for text in fail] if fail else None,
                mtbf_s=mtbf_s,
                repair_s=repair_s,
                max_concurrency=max_concurrency,
                keeps_timeline=timeline or None,
            ),
            keeps_outcomes=save_detailed,
            attainment=attainment,
            finds_goodput=find_goodput or (plan.finds_goodput and request_rate is None),
        )
        if plan.workload.is_trace and request_rate is None:
            plan = replace(plan, workload=replace(plan.workload, request_rate=math.inf))
        plan = _changed(plan, policies=[one.value for one in policy] if policy else None)
        figures = _changed(
            plan.ranks if step_times is None else RankFigures(0, 0, 0, 0),
            exchange_ms=exchange_ms,
            exchange_token_ms=exchange_token_ms,
            stage_ms=stage_ms,
            weight_bytes=None if weights_gb is None else weights_gb * 1e9,
            rank_bytes=None if rank_memory_gb is None else rank_memory_gb * 1e9,
        )
        if rank_memory_gb is not None and cache_tokens is not None:
            raise InvalidRequest("--rank-memory-gb", "can't be used together with --cache-tokens")
        prefill = NodeShape(prefill_tp or tp or 1, prefill_pp or pp or 1)
        decode = NodeShape(decode_tp or tp or 1, decode_pp or pp or 1)
        plan = _divided(plan, figures, prefill, decode)
        plan = _with_arrangements(replace(plan, slo=slo or plan.slo), arrangement, splits)
        _check(plan)
        total = count_requests(plan.workload)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with _progress(total, output is Format.TEXT) as progress:
        result = run_plan(plan, created, progress)
    if output is Format.JSON:
        print_json(without_outcomes(result))
    elif output is Format.YAML:
        print_yaml(without_outcomes(result))
    else:
        _print(result)
    for line in _failures(result):
        print_note(line)
    write_files(result, result_filename, report)
    if not any(rate["summary"]["completed"] for one in result["arrangements"] for rate in one["rates"]):
        raise BatonError("no request was served; the errors are listed above")


def _plan(preset: Preset | None, trace: Path | None, seed: int) -> SimulationPlan:
    from baton.bench.arrangement import Arrangement
    from baton.bench.simulator import presets
    from baton.bench.simulator.plan import SimulationPlan
    from baton.bench.simulator.simulation import SimulationConfig
    from baton.bench.workloads.spec import WorkloadSpec

    if preset is not None:
        return presets.preset(preset.value, trace, seed)
    pair = Arrangement(1, 1)
    return SimulationPlan(WorkloadSpec(request_rate=1.0, seed=seed), SimulationConfig(pair, seed=seed), [pair])


def _changed(value: Any, **changes: Any) -> Any:
    """A copy with the changes that are not None."""
    return replace(value, **{name: change for name, change in changes.items() if change is not None})


def _step_times(path: Path | None) -> Any:
    from baton.bench.simulator.step_times import read_step_times

    return None if path is None else read_step_times(path)


def _speculation(
    share: float | None, num_tokens: int | None, coverage: float | None, row_ms: float | None, is_fixed: bool
) -> SimulatedSpeculation | None:
    from baton.bench.simulator.drafts import SimulatedSpeculation

    if share is not None:
        given = SimulatedSpeculation(share, adapts=not is_fixed, row_ms=row_ms)
        changed: SimulatedSpeculation = _changed(given, num_speculative_tokens=num_tokens, coverage=coverage)
        return changed
    others = {
        "--draft-tokens": num_tokens,
        "--draft-coverage": coverage,
        "--draft-row-ms": row_ms,
        "--fixed-drafts": is_fixed or None,
    }
    for option, other in others.items():
        if other is not None:
            raise InvalidRequest(option, "needs --draft-share")
    return None


def _divided(plan: SimulationPlan, figures: RankFigures, prefill: NodeShape, decode: NodeShape) -> SimulationPlan:
    """The plan with nodes of these shapes; its sizes are those of nodes of one rank."""
    sizes = plan.config.sizes
    config = replace(plan.config, sizes=figures.sizes_of(sizes, decode), prefill_sizes=figures.sizes_of(sizes, prefill))
    return replace(plan, config=config, ranks=figures)


def _with_arrangements(plan: SimulationPlan, arrangement: Sequence[str] | None, splits: int | None) -> SimulationPlan:
    from baton.bench.arrangement import Arrangement

    if arrangement and splits:
        raise InvalidRequest("--splits", "can't be used together with --arrangement")
    found = Arrangement.splits(splits) if splits else [Arrangement.parse(text) for text in arrangement or ()]
    return replace(plan, arrangements=found or plan.arrangements)


def _failure(text: str) -> Failure:
    from baton.bench.simulator.simulation import Failure

    found = _FAILURE.match(text)
    if found is None:
        raise InvalidRequest("--fail", f"{text!r} is not NODE@SECONDS or NODE@SECONDS+SECONDS, such as decode-0@30+60")
    return Failure(found[1], float(found[2]), float(found[3]) if found[3] else math.inf)


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
        for one in plan.arrangements
        for role, count in (("prefill", one.prefill), ("decode", one.decode))
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
        f"{one['name']}: {count} failed: {error}"
        for one in result["arrangements"]
        for rate in one["rates"]
        for error, count in rate["summary"].get("errors", {}).items()
    ]
    return lines[:12]


def _drafted_row(run: Sequence[str], simulator: dict[str, Any]) -> list[str]:
    """A row about the drafts of a run: tokens per sequence and step, drafts, their tokens, the share of right ones."""
    drafts, tokens, right = (simulator[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return [*run, f"{simulator['tokens_per_step']:.2f}", str(drafts), str(tokens), f"{right / max(1, tokens):.0%}"]


def _shapes(result: dict[str, Any]) -> Iterator[str]:
    """The shapes of the nodes of each arrangement, if any has several ranks."""
    for one in result["arrangements"]:
        shapes = ", ".join(f"{role} {shape}" for role, shape in one["shapes"].items())
        if any(shape != str(ONE_RANK) for shape in one["shapes"].values()):
            yield f"{one['name']}: {one['gpus']} ranks ({shapes})"


def _print(result: dict[str, Any]) -> None:
    rows, drafted = [], []
    for one in result["arrangements"]:
        for rate in one["rates"]:
            summary, simulator = rate["summary"], rate["simulator"]
            rows.append(
                [
                    one["name"],
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
    if shapes := list(_shapes(result)):
        print_text()
        for line in shapes:
            print_text(line)
    if drafted:
        print_text()
        print_table(["ARRANGEMENT", "RATE", "TOK/STEP", "DRAFTS", "TOKENS", "RIGHT"], drafted)
    if "goodput" in result:
        print_text()
        print_table(
            ["ARRANGEMENT", "GOODPUT/S", "PER GPU"],
            [
                [one["name"], f"{one['goodput']['rate']:.3g}", f"{one['goodput']['per_gpu']:.3g}"]
                for one in result["arrangements"]
            ],
        )
        ratio = result["goodput_ratio"]
        if ratio is not None:
            print_text(
                f"\nbest split: {result['best_split']}, {ratio:.2f} times the goodput per GPU of colocated nodes"
            )
