"""Parses the flags of a process as its own command does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import typer
from pydantic import BaseModel

from baton.cli.options import settings_command
from baton.config import Loaded

C = TypeVar("C", bound=BaseModel)


def config_from_flags(model: type[C], words: Sequence[str]) -> Loaded[C]:
    """Return the configuration that `baton node` or `baton router` would have with these flags."""
    found: list[Loaded[C]] = []
    app = typer.Typer(add_completion=False)
    settings_command(app, "process", "", model, lambda loaded, _file: found.append(loaded))
    typer.main.get_command(app).main([*words], standalone_mode=False)
    return found[0]
