"""`baton version`."""

from __future__ import annotations

import platform

import typer

import baton
from baton.cli.output import Format, OutputOption, print_json, print_text, print_yaml


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(version)


def version(output: OutputOption = Format.TEXT) -> None:
    """Print the version."""
    found = {"version": baton.__version__, "python": platform.python_version(), "platform": platform.platform()}
    if output is Format.JSON:
        print_json(found)
    elif output is Format.YAML:
        print_yaml(found)
    else:
        print_text(f"baton {baton.__version__} (Python {found['python']}, {found['platform']})")
