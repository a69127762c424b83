"""A process's command line as its own command understands it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import typer
from pydantic import BaseModel

from baton.cli.options import settings_command
from baton.config import Loaded

C = TypeVar("C", bound=BaseModel)


def configured(model: type[C], words: Sequence[str]) -> Loaded[C]:
    """What `baton node` or `baton router` would be configured with by these flags."""
    found: list[Loaded[C]] = []
    app = typer.Typer(add_completion=False)
    settings_command(app, "process", "", model, lambda loaded, _file: found.append(loaded))
    typer.main.get_command(app).main([*words], standalone_mode=False)
    return found[0]
