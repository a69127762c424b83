"""`baton bench`: the command group, and the commands `handoff` and `scheduler`."""

from __future__ import annotations

import functools
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from baton.cli.bench.compare import compare
from baton.cli.bench.engine import engine
from baton.cli.bench.load_options import DtypeOption
from baton.cli.bench.model import ModelOption, chosen_model
from baton.cli.bench.nodes import nodes
from baton.cli.bench.overload import overload
from baton.cli.bench.report import report
from baton.cli.bench.router import router
from baton.cli.bench.serve import serve
from baton.cli.bench.validate import validate
from baton.cli.output import Format, OutputOption, print_json, print_table, print_yaml
from baton.cli.target import with_access
from baton.cli.waiting import closing_line


def register(app: typer.Typer, name: str, text: str) -> None:
    """Adds the command group to the application."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def bench() -> None:
        """Measure this machine with real processes."""
        # SIGTERM ends the processes that the benchmark started, as Ctrl-C does.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    for command in (handoff, engine, scheduler, router, overload, report, compare, validate):
        group.command(command.__name__)(_with_closing_line(command))
    for client in (serve, nodes):
        group.command(client.__name__)(_with_closing_line(with_access(client)))
    app.add_typer(group, name=name)


def _with_closing_line(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says on Ctrl-C what became of its measurement, unless it handles Ctrl-C itself."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        with closing_line("the measurement is not complete, and no file was written"):
            try:
                command(**values)
            except KeyboardInterrupt:
                # gRPC's server and event loop, which were not shut down, say so at the interpreter's end, in a warning
                # or by an exception in __del__: that is no news then.
                warnings.simplefilter("ignore", RuntimeWarning)
                sys.unraisablehook = lambda _: None
                raise

    return run


def handoff(
    model: ModelOption = None,
    shape: Annotated[
        str, typer.Option(help="Random weights of a known shape instead: 0.5b, 0.5b-kv.", metavar="NAME")
    ] = "",
    dtype: DtypeOption = "auto",
    requests: Annotated[int, typer.Option(help="Number of requests; medians over them are shown.", min=1)] = 20,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.", min=1)] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=4)] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a chunk of a prompt.", min=64)] = 512,
    threads: Annotated[int, typer.Option(help="Threads of each node, and of the single engine.", min=1)] = 1,
    other_block_size: Annotated[
        int, typer.Option(help="Measure reads from and into KV blocks of so many tokens, too.", min=1)
    ] = 32,
    output: OutputOption = Format.TEXT,
) -> None:
    """Measure a hand-off between two nodes, and compare it with a single engine and with bare NIXL reads."""
    from baton.bench.results.host import set_compute_threads

    set_compute_threads(threads)
    with chosen_model(model, shape) as chosen:
        from baton.bench.micro import handoff as bench

        report = bench.run(
            bench.HandoffBenchConfig(
                model=chosen,
                dtype=dtype,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                requests=requests,
                max_num_batched_tokens=max_num_batched_tokens,
                threads=threads,
                other_block_size=other_block_size,
            )
        )
    values = asdict(report)
    if output is Format.JSON:
        print_json(values)
    elif output is Format.YAML:
        print_yaml(values)
    else:
        for each in values.pop("mixed_reads"):
            sizes = f"{each.pop('sender_block_size')} to {each.pop('reader_block_size')}"
            values |= {f"{key}, {sizes}": value for key, value in each.items()}
        rows = [[key, f"{value:.3f}" if isinstance(value, float) else str(value)] for key, value in values.items()]
        print_table(["WHAT", "MEDIAN"], rows)


def scheduler(
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.", min=64)] = 1024,
    rounds: Annotated[int, typer.Option(help="Rounds of 32 steps; medians over them are shown.", min=1)] = 7,
    output: OutputOption = Format.TEXT,
) -> None:
    """Measure the time to schedule and commit a step, in microseconds, without a model."""
    from baton.bench.micro.scheduler import SchedulerBenchConfig, run

    values = asdict(run(SchedulerBenchConfig(prompt_tokens=prompt_tokens, rounds=rounds)))
    if output is Format.JSON:
        print_json(values)
    elif output is Format.YAML:
        print_yaml(values)
    else:
        steady = values.pop("steady_us")
        rows = [[f"steady step, {running} running", f"{took:.1f}"] for running, took in steady.items()]
        rows += [
            [name.removesuffix("_us").replace("_us_", ", ").replace("_", " "), f"{took:.1f}"]
            for name, took in values.items()
        ]
        print_table(["WHAT", "MICROSECONDS"], rows)
