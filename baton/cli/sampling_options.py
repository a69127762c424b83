"""Sampling options of the commands that generate text."""

from __future__ import annotations

from typing import Annotated

import typer

TemperatureOption = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature from 0 (greedy) to 2. Default: the model's own, else 1.",
        metavar="X",
        show_default=False,
    ),
]
TopPOption = Annotated[
    float | None, typer.Option(help="Nucleus sampling: probability mass that is kept, in (0, 1].", metavar="X")
]
TopKOption = Annotated[int | None, typer.Option(help="Sample from the K most likely tokens; -1 for all.", metavar="K")]
MinPOption = Annotated[
    float | None, typer.Option(help="Smallest probability relative to the most likely token, in [0, 1].", metavar="X")
]
