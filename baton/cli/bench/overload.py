"""`baton bench overload`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.bench.config import OverloadConfig
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags
from baton.cli.bench.options import Destination, check_files, created_now, printed_as_data
from baton.cli.bench.tenants import print_tenants
from baton.cli.output import Format, OutputOption, print_note, print_table, print_text
from baton.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from baton.bench.overload import OverloadReport


@with_flags
def overload(
    context: typer.Context,
    given: Annotated[
        Given,
        FlagsOf(
            OverloadConfig,
            "backend factor overload_s after_s step_ms ttft_slo_ms seed",
            defaults={"backend": "grpc"},
        ),
    ] = NOT_GIVEN,
    tenants: Annotated[
        bool,
        typer.Option("--tenants", help="Measure instead what a light tenant gets beside a flood of another one's."),
    ] = False,
    with_fcfs: Annotated[
        bool, typer.Option("--with-fcfs", help="With --tenants: measure it with --fairness off, too.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write overload.json and overload.svg, or with --tenants overload.html, to this folder."),
    ] = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Offer a cluster ten times its capacity, and measure what it serves, how it refuses, and how soon it recovers.

    The cluster is started here, with simulated nodes of a small capacity, which is measured first. Two tenants send
    the load in an open loop. The greedy one sends nine tenths of it, and has a quota of half of the requests that may
    run at once. A probe with a tenth of the capacity runs before, during and after the overload. Exits with 1 if a
    check fails.

    With --tenants nobody has a quota. A light tenant sends a fifth of the capacity, for half of --duration alone, and
    then beside a flood of --factor times as many requests of another tenant.
    """
    from baton.bench.overload import run

    check_files(None if out is None else out / "overload.json")
    config = OverloadConfig(**given)
    if with_fcfs and not tenants:
        raise UsageError("--with-fcfs: needs --tenants")
    if tenants:
        for name, option in (("after_s", "--after"), ("ttft_slo_ms", "--ttft")):
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                raise UsageError(f"{option}: has no meaning with --tenants")
        _run_tenants(config, out, output, with_fcfs=with_fcfs)
        return
    if output is Format.TEXT:
        took_s = config.capacity_s + config.before_s + config.overload_s + config.after_s
        print_note(f"this takes a little longer than {took_s:.0f} s")
    report = run(config)
    if not printed_as_data(report.to_json(), output):
        _print(report)
    if out is not None:
        _write(report, out)
    if not all(ok for _, _, ok in report.checks()):
        raise typer.Exit(int(ExitCode.FAILED))


def _run_tenants(config: OverloadConfig, out: Path | None, output: Format, *, with_fcfs: bool) -> None:
    from baton.bench.fairness import alone_s, run

    if output is Format.TEXT:
        took_s = config.capacity_s + (alone_s(config) + config.overload_s) * (1 + with_fcfs)
        print_note(f"this takes a little longer than {took_s:.0f} s")
    result = run(config, created_now(), with_fcfs=with_fcfs)
    files = (None, None) if out is None else (out / "overload.json", out / "overload.html")
    Destination(output, *files).show(result, lambda: _print_tenants(result))
    if not all(check["passed"] for check in result["checks"]):
        raise typer.Exit(int(ExitCode.FAILED))


def _print_tenants(result: Mapping[str, Any]) -> None:
    full = result["full_batch"]
    print_text(f"a full batch: {full['request_throughput']:.1f} requests/s, {full['median_tpot_ms']:.1f} ms a token")
    for arrangement in result["arrangements"]:
        rate = arrangement["rates"][0]
        print_tenants(rate["tenants"], arrangement["name"])
        if why := rate["generator"]["bottleneck"]:
            print_text(f"the load generator was late: {why}")
    print_text()
    rows = [[check["promise"], check["seen"], "PASS" if check["passed"] else "FAIL"] for check in result["checks"]]
    print_table(["PROMISE", "SEEN", ""], rows)


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

    from baton.bench.report.panels import draw_panels
    from baton.bench.results.result_file import write_text

    write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n", folder / "overload.json")
    write_text(draw_panels(*report.panels()), folder / "overload.svg")
    print_note(f"written to {folder / 'overload.json'} and {folder / 'overload.svg'}")
