"""`baton bench overload`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.bench.files import check_files
from baton.cli.output import Format, OutputOption, print_json, print_note, print_table, print_text, print_yaml
from baton.errors import ExitCode

if TYPE_CHECKING:
    from baton.bench.overload import OverloadReport


class Front(enum.StrEnum):
    """The router's port that clients use."""

    GRPC = "grpc"
    HTTP = "http"


def overload(
    front: Annotated[Front, typer.Option(help="Protocol of the clients.")] = Front.GRPC,
    factor: Annotated[float, typer.Option(help="Offered load as a multiple of the capacity.", min=1)] = 10.0,
    duration: Annotated[float, typer.Option(help="Seconds of the overload.", min=20)] = 120.0,
    after: Annotated[float, typer.Option(help="Seconds to watch after the overload.", min=10)] = 60.0,
    step_ms: Annotated[
        float, typer.Option(help="Step time of a simulated node; a shorter one gives more capacity.", min=1)
    ] = 40.0,
    ttft: Annotated[
        float, typer.Option(help="Longest time to first token of a good request, milliseconds.", min=1)
    ] = 2000.0,
    seed: Annotated[int, typer.Option(help="Seed of the load.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write overload.json and overload.svg to this folder.")] = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Offer a cluster ten times its capacity, and measure what it serves, how it refuses, and how soon it recovers.

    The cluster is started here, with simulated nodes of a small capacity, which is measured first. Two tenants send
    the load in an open loop. The greedy one sends nine tenths of it, and has a quota of half of the requests that may
    run at once. A probe with a tenth of the capacity runs before, during and after the overload. Exits with 1 if a
    check fails.
    """
    from baton.bench.overload import OverloadConfig, run

    check_files(None if out is None else out / "overload.json")
    config = OverloadConfig(
        backend="baton" if front is Front.GRPC else "openai",
        factor=factor,
        overload_s=duration,
        after_s=after,
        step_ms=step_ms,
        ttft_slo_ms=ttft,
        seed=seed,
    )
    if output is Format.TEXT:
        print_note(f"this takes a little longer than {config.before_s + duration + after + config.capacity_s:.0f} s")
    report = run(config)
    if output is Format.JSON:
        print_json(report.to_json())
    elif output is Format.YAML:
        print_yaml(report.to_json())
    else:
        _print(report)
    if out is not None:
        _write(report, out)
    if not all(ok for _, _, ok in report.checks()):
        raise typer.Exit(int(ExitCode.FAILED))


def _print(report: OverloadReport) -> None:
    config, refused = report.config, report.refusals
    print_text(
        f"capacity {report.capacity:.1f} requests/s of {config.input_len} tokens in and {config.output_len} out; "
        f"offered {report.offered:.0f} requests/s for {config.overload_s:g} s; good: first token within "
        f"{config.ttft_slo_ms:g} ms, then one each {config.tpot_slo_ms:g} ms"
    )
    print_text(
        f"good requests/s of each window: {', '.join(f'{rate:.1f}' for rate in report.windows)}; peak {report.peak:.1f}"
    )
    print_text(
        f"{refused.count} refused within {refused.p50_s * 1e3:.1f} ms (p50), {refused.p99_s * 1e3:.1f} ms (p99), "
        f"{refused.max_s * 1e3:.1f} ms (max); the load generator was up to {report.generator_late_ms:.1f} ms late (p99)"
    )
    print_text(
        f"median time to the first token of the probe before the overload: {report.normal_ttft_s * 1e3:.0f} ms\n"
    )
    print_table(
        ["TENANT", "OFFERED/S", "COMPLETED/S", "GOOD/S"],
        [
            [name, f"{rates['offered']:.1f}", f"{rates['completed']:.2f}", f"{rates['good']:.2f}"]
            for name, rates in report.tenants.items()
        ],
    )
    for error, count in report.failed.items():
        print_text(f"{count} failed: {error}")
    print_text()
    rows = [[what, seen, "PASS" if ok else "FAIL"] for what, seen, ok in report.checks()]
    print_table(["PROMISE", "SEEN", ""], rows)


def _write(report: OverloadReport, folder: Path) -> None:
    import json

    from baton.bench.report.overload import render_svg
    from baton.bench.results.result_file import write_text

    write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n", folder / "overload.json")
    write_text(render_svg(report), folder / "overload.svg")
    print_note(f"written to {folder / 'overload.json'} and {folder / 'overload.svg'}")
