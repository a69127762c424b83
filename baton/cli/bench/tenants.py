"""Loads of several tenants on the command line, and the tables with what each of them got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton.cli.output import print_table, print_text
from baton.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.bench.simulator.config import SimulationConfig

Fairness = Literal["tokens", "off"]
_DEFAULT_LENGTH_S = 120.0

TenantOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A tenant, as name=NAME,rate=PER_SECOND and any of from=SECONDS, until=SECONDS, weight=NUMBER, "
        "class=urgent|normal|batch, input-len=TOKENS, output-len=TOKENS. May be repeated.",
        metavar="KEY=VALUE,...",
    ),
]
DurationOption = Annotated[
    float | None, typer.Option(help="Seconds of arrivals of all tenants. Default: 120.", min=0.001)
]
FairnessOption = Annotated[
    Fairness | None, typer.Option(help="The router's order of waiting requests of several tenants. Default: tokens.")
]
MaxQueueOption = Annotated[
    int | None, typer.Option(help="Most requests that wait at the router, with tenants. Default: 1024.", min=0)
]


def with_tenants(
    config: SimulationConfig,
    tenants: Sequence[str] | None,
    duration_s: float | None,
    fairness: Fairness | None,
    max_queue: int | None,
    others: Mapping[str, bool],
) -> SimulationConfig:
    """The configuration with the tenants of the command line, and the limits of a router as it is by default.

    `others`: which of the options were given that say what tenants say for themselves. Raises InvalidRequest.
    """
    from baton.bench.workloads.tenants import parse_tenants
    from router.admission.limits import DispatchLimits

    given = {"--duration": duration_s, "--fairness": fairness, "--max-queue": max_queue}
    if not tenants:
        for option, value in given.items():
            if value is not None:
                raise InvalidRequest(option, "needs --tenant")
        return config
    for option, is_given in others.items():
        if is_given:
            raise InvalidRequest(option, "can't be used together with --tenant, which says when requests arrive")
    limits = DispatchLimits()
    return replace(
        config,
        tenants=parse_tenants(tenants, duration_s or _DEFAULT_LENGTH_S),
        limits=replace(
            limits,
            fairness=fairness or limits.fairness,
            max_queue=limits.max_queue if max_queue is None else max_queue,
        ),
    )


def print_tenants(figures: Mapping[str, Any], name: str = "") -> None:
    """Prints a table for each period of the field `tenants` of a result. `name`: of what was measured."""
    for period in figures["periods"]:
        span = f"{period['begin_s']:g} to {period['end_s']:g} s, counted from {period['counted_from_s']:g} s on:"
        print_text(f"\n{name}{': ' if name else ''}{span}")
        columns = ["TENANT", "WEIGHT", "CLASS", "OFFERED", "SERVED", "REFUSED", "FAILED", "TTFT P50 MS", "P99"]
        columns += ["TPOT P50 MS", "P99", "TOK/S", "SHARE", "/WEIGHT"]
        # Tenants that do not send in this period are left out, unless requests from before are still served.
        print_table(columns, [_row(row) for row in period["tenants"] if row["offered"] or row["service_share"]])


def _row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['weight']:g}",
        row["class"],
        *(str(row[name]) for name in ("offered", "completed", "refused", "failed")),
        *(_number(row[name], ".0f") for name in ("median_ttft_ms", "p99_ttft_ms")),
        *(_number(row[name], ".1f") for name in ("median_tpot_ms", "p99_tpot_ms")),
        f"{row['total_token_throughput']:.0f}",
        f"{row['service_share']:.1%}",
        f"{row['service_share_per_weight']:.3f}",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
