"""Options that several benchmarks have: of the load, and of the model that is served to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter

from baton.config.kinds import Dtype, checked_speculation


def _checked_size(size: str) -> str:
    try:
        is_size = TypeAdapter(ByteSize).validate_python(size) > 0
    except ValueError:
        is_size = False
    if not is_size:
        raise typer.BadParameter(f"{size!r} is not a number of bytes such as 256MiB")
    return size


def speculation_callback(config: str) -> str:
    """Checks what nodes take for --speculative-config."""
    try:
        return checked_speculation(config)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of the model.")]
ShapeOption = Annotated[str, typer.Option(help="Random weights of a known shape instead: 0.5b.", metavar="NAME")]
CacheMemoryOption = Annotated[str, typer.Option(help="KV cache of each node.", callback=_checked_size)]
MoreGoodputArgument = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="SLO")]
"""The limits after the first one of --goodput, which the command line takes for arguments."""
RangeRatioOption = Annotated[float, typer.Option(help="Lengths vary by this share.", min=0, max=0.999)]
BurstinessOption = Annotated[
    float, typer.Option(help="1: Poisson arrivals; below 1: burstier; above 1: more even.", min=0.01)
]
DatasetPathOption = Annotated[Path | None, typer.Option(help="File of a trace.")]
NumPromptsOption = Annotated[
    int | None, typer.Option(help="Number of requests. Default: 1000, or the whole trace.", min=1)
]
RequestRateOption = Annotated[float, typer.Option(help="Requests per second; inf: all at once.")]
MaxConcurrencyOption = Annotated[
    int | None, typer.Option(help="Largest number of open requests. Default: no limit.", min=1)
]
InputLenOption = Annotated[int, typer.Option(help="Tokens of a prompt (of a first turn).", min=1)]
GoodputOption = Annotated[
    list[str] | None, typer.Option(help="Limits of a good request: ttft:MS tpot:MS e2el:MS.", metavar="SLO ...")
]
NumWarmupsOption = Annotated[int, typer.Option(help="Requests before the run that are not counted.", min=0)]
WorkloadSeedOption = Annotated[int, typer.Option(help="Seed of the workload.", min=0)]
