"""Options of the commands that ask for tokens."""

from __future__ import annotations

from typing import Annotated

import typer

TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy, up to 2. Default: 1.", metavar="X", show_default=False)
]
TopPOption = Annotated[float | None, typer.Option(help="Nucleus sampling, (0, 1].", metavar="X")]
TopKOption = Annotated[int | None, typer.Option(help="Only the K likeliest tokens; -1: all.", metavar="K")]
MinPOption = Annotated[float | None, typer.Option(help="Least share of the likeliest token, [0, 1].", metavar="X")]
