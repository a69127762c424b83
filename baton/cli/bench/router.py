"""`baton bench router`."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.bench.model import ModelOption, named_model
from baton.cli.output import Format, OutputOption, print_json, print_note, print_table, print_text, print_yaml

if TYPE_CHECKING:
    from baton.bench.micro.router import RouterReport
    from baton.bench.results.spread import Spread


class Front(enum.StrEnum):
    """The router's port that clients use."""

    GRPC = "grpc"
    HTTP = "http"


def router(
    streams: Annotated[
        list[int] | None, typer.Option(help="Open streams; may be repeated. Default: 1000.", min=1, max=100_000)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Simulated nodes.", min=2)] = 64,
    front: Annotated[Front, typer.Option(help="Protocol of the clients.")] = Front.GRPC,
    connections: Annotated[int, typer.Option(help="Connections that gRPC streams share.", min=1)] = 8,
    tokens_per_s: Annotated[
        float, typer.Option(help="Tokens per second of the loads half and mixed.", min=1)
    ] = 25_000.0,
    requests_per_s: Annotated[float, typer.Option(help="Requests per second of the load mixed.", min=1)] = 500.0,
    rounds: Annotated[int, typer.Option(help="Rounds of each load; medians over them are shown.", min=1)] = 5,
    round_s: Annotated[float, typer.Option(help="Seconds of each round.", min=0.1)] = 2.0,
    model: ModelOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Measure what a router sustains on one core, with simulated nodes, real processes and real text.

    The router has a core to itself; nodes and clients are one process on another core. P50 and P99 are the time from a
    node's report of a token until its client has it, with the work of node and client; the latency that the router
    adds is shown separately. CPU is the share of each process's core: if LOAD is near 1, nodes and clients are the
    bottleneck. Run it on an otherwise idle machine with at least two cores.
    """
    from baton.bench.micro.router import RouterBenchConfig, run

    model_dir, reports = named_model(model).directory, []
    for count in streams or [1000]:
        if output is Format.TEXT:
            print_note(f"measuring with {count} streams")
        report = run(
            RouterBenchConfig(
                model_dir=model_dir,
                streams=count,
                nodes=nodes,
                front=front.value,
                connections=connections,
                tokens_per_s=tokens_per_s,
                requests_per_s=requests_per_s,
                rounds=rounds,
                round_s=round_s,
            )
        )
        reports.append(report)
        if output is Format.TEXT:
            _print(report)
    if output is Format.JSON:
        print_json([report.summary() for report in reports])
    elif output is Format.YAML:
        print_yaml([report.summary() for report in reports])


def _print(report: RouterReport) -> None:
    print_text(
        f"{report.streams} streams over {report.front}, {report.nodes} nodes, {report.processor}: "
        f"{report.kb_per_stream:.1f} kB per stream over {report.router_mb:.0f} MB; "
        f"placement {_spread(report.placement_us)} us, {_spread(report.placement_all_news_us)} with news of every node"
    )
    added = report.added_latency_ms
    print_text(
        f"added latency at half load: p50 {added.p50:.2f} ms, p99 {added.p99:.2f} ms, beside "
        f"{_spread(report.direct_ms)} ms without a router"
    )
    loads = {"relay": report.relay, "half": report.half, "mixed": report.mixed, "requests": report.requests}
    print_table(
        [
            "LOAD",
            "TOKENS/S",
            "REQUESTS/S",
            "REFUSED/S",
            "PER MESSAGE",
            "P50 MS",
            "P99 MS",
            "CPU ROUTER",
            "CPU LOAD",
        ],
        [
            [
                name,
                _spread(load.tokens_per_s),
                _spread(load.requests_per_s),
                f"{load.refused_per_s:.0f}",
                f"{load.tokens_per_message:.2f}",
                _spread(load.latency_ms_p50),
                _spread(load.latency_ms_p99),
                f"{load.router_cpu:.2f}",
                f"{load.load_cpu:.2f}",
            ]
            for name, load in loads.items()
        ],
    )


def _spread(spread: Spread) -> str:
    digits = 0 if spread.median >= 100 else 2
    return f"{spread.median:.{digits}f} [{spread.p10:.{digits}f}, {spread.p90:.{digits}f}]"
