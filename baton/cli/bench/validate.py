"""`baton bench validate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.config import ValidateConfig
from baton.bench.flag import Flag
from baton.bench.workloads.spec import WorkloadSpec
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags
from baton.cli.bench.options import (
    CacheMemoryOption,
    Destination,
    DtypeOption,
    ReportOption,
    ResultFileOption,
    check_files,
    chosen_model,
    created_now,
    named_model,
    print_lines,
    speculation_callback,
)
from baton.cli.bench.serve import usage_errors
from baton.cli.output import Format, OutputOption, print_note, print_table
from baton.errors import BatonError, Cancelled, InvalidRequest
from baton.messages.node_model import NodeShape
from baton.models.resolve import FoundModel

BUNDLED = "bundled"
_SHAPES = ("0.5b",)
_RANKS = {"min": 1, "max": 64}


@with_flags
def validate(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"bundled, 0.5b (random weights) or what `baton up --model` takes; may be repeated. Default: "
            f"{BUNDLED}, 0.5b."
        ),
    ] = None,
    arrangement: Annotated[str, typer.Option(help="colocated:N or xPyD, a core for each thread of a node.")] = "1p1d",
    tp: Annotated[int, typer.Option(help="Ranks of each node, each with a thread.", **_RANKS)] = 1,
    prefill_tp: Annotated[int | None, typer.Option(help="--tp of prefill nodes.", **_RANKS)] = None,
    decode_tp: Annotated[int | None, typer.Option(help="--tp of decode nodes.", **_RANKS)] = None,
    pp: Annotated[int, typer.Option(help="Stages of each node, of --tp ranks each.", **_RANKS)] = 1,
    prefill_pp: Annotated[int | None, typer.Option(help="--pp of prefill nodes.", **_RANKS)] = None,
    decode_pp: Annotated[int | None, typer.Option(help="--pp of decode nodes.", **_RANKS)] = None,
    dtype: DtypeOption = "auto",
    load: Annotated[
        list[float] | None,
        typer.Option(
            help="Load as a share of the capacity, which is measured first; may be repeated. Default: 0.2, 0.4, 0.6."
        ),
    ] = None,
    lengths: Annotated[
        Given,
        FlagsOf(
            WorkloadSpec,
            "random_input_len random_output_len random_range_ratio",
            flags={
                "random_input_len": Flag("Tokens of a prompt.", min=2),
                "random_output_len": Flag("Tokens to generate.", min=2),
            },
            defaults={"random_input_len": 256, "random_output_len": 48, "random_range_ratio": 0.5},
        ),
    ] = NOT_GIVEN,
    runs: Annotated[Given, FlagsOf(ValidateConfig, "run_s rounds")] = NOT_GIVEN,
    budget_s: Annotated[float, typer.Option(help="Seconds that the whole command may take.", min=30)] = 570.0,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.", min=16)] = 512,
    kv_cache_memory: CacheMemoryOption = "256MiB",
    speculative_config: Annotated[
        str,
        typer.Option(
            help="How nodes draft tokens: see `baton up --speculative-config`. Empty: they do not.",
            callback=speculation_callback,
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the load.", min=0)] = 0,
    result_filename: ResultFileOption = None,
    report: ReportOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Compare the simulator with real processes that get the same requests at the same times.

    Loads are measured in short, interleaved runs. The simulator's step times are fitted to what nodes measured at the
    other loads and in single requests, and so are drafts, if nodes make any. OWN STEPS is the ratio if they are fitted
    to the load's own steps, too. OTHERS is the largest share of the machine that other processes used. Run it on an
    otherwise idle machine with a core for every node.
    """
    from baton.bench.arrangement import Arrangement
    from baton.bench.experiment import Experiment
    from baton.bench.validate.report import COLUMNS, rows, validation_result, verdict
    from baton.bench.validate.run import Validated
    from baton.bench.validate.run import validate as run_validation
    from baton.clock import SystemClock

    with usage_errors():
        nodes, loads = Arrangement.parse(arrangement), load or [0.2, 0.4, 0.6]
        for share in loads:
            if not share > 0:
                raise InvalidRequest("--load", f"{share:g} is not above 0")
        prefill = NodeShape(prefill_tp or tp, prefill_pp or pp)
        decode = NodeShape(decode_tp or tp, decode_pp or pp)
        if nodes.is_conditional and prefill != decode:
            # Steps are fitted by what they compute: prompts must be computed by nodes of one shape.
            raise InvalidRequest("--arrangement", f"{nodes} needs nodes of one shape")
    workload = WorkloadSpec(**lengths, seed=seed * 1000)
    flags: tuple[str, ...] = (
        "--max-num-batched-tokens",
        str(max_num_batched_tokens),
        "--kv-cache-memory",
        kv_cache_memory,
    )
    for role, shape in (("prefill", prefill), ("decode", decode)):
        flags += (f"--{role}-tp", str(shape.tp), f"--{role}-pp", str(shape.pp)) if shape.num_ranks > 1 else ()
    # All nodes have as many threads as the largest one has ranks: `baton up` has no number of threads for each role.
    threads = max(prefill.num_ranks, decode.num_ranks) if nodes.prefill else decode.num_ranks
    if speculative_config:
        flags += ("--speculative-config", speculative_config)
    check_files(result_filename, report)
    names, clock = model or [BUNDLED, *_SHAPES], SystemClock()
    end_s = clock.monotonic() + budget_s
    validated: list[Validated] = []
    failed: dict[str, BatonError] = {}
    for number, name in enumerate(names):
        now_s = clock.monotonic()
        try:
            with _model(name) as chosen:
                config = ValidateConfig(
                    name, chosen, dtype, workload, nodes, loads, **runs, up_flags=flags, threads_per_node=threads
                )
                deadline_s = now_s + (end_s - now_s) / (len(names) - number)
                validation = run_validation(config, Experiment(print_note, clock, deadline_s))
        except BatonError as error:
            failed[name] = error
            if isinstance(error, Cancelled):
                break
            continue
        validated.append(validation)
        if isinstance(validation.failure, Cancelled):
            break
    result = validation_result(validated, seed, created_now(), failed)

    def print_result() -> None:
        print_table(COLUMNS, rows(result))
        print_lines(verdict(result))

    destination = Destination(output, result_filename, report)
    destination.show(result, print_result)
    destination.end_early(*(validation.failure for validation in validated), *failed.values())


@contextmanager
def _model(name: str) -> Iterator[FoundModel]:
    if name in _SHAPES:
        with chosen_model(None, name) as chosen:
            yield chosen
    else:
        yield named_model(None if name == BUNDLED else Path(name))
