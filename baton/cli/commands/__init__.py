"""The commands. Each module has `register`, which adds the command of a name; `baton.cli.main` lists all names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer


def add_group(app: typer.Typer, name: str, text: str, about: str, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Add a command that consists of subcommands. `text`: its line in the list of commands; `about`: its own help."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    def show_help() -> None:
        pass

    show_help.__doc__ = about
    group.callback()(show_help)
    for subcommand, function in commands.items():
        group.command(subcommand)(function)
    app.add_typer(group, name=name)
