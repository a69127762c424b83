"""`baton config view`: the settings that a command would run with, and where each comes from."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ByteSize

from baton.cli.commands import add_group
from baton.cli.output import Format, OutputOption, print_json, print_table, print_yaml
from baton.config.load import MODELS, config_file, view
from baton.security.redaction import without_password


class Process(enum.StrEnum):
    """The commands that have settings."""

    UP = "up"
    NODE = "node"
    ROUTER = "router"


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    add_group(app, name, text, "Show the configuration.", {"view": view_config})


def view_config(
    process: Annotated[Process, typer.Argument(help="The command whose settings are shown.")] = Process.UP,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file. Default: ./baton.toml if it exists.", metavar="PATH")
    ] = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Print the settings that `baton up`, `baton node` or `baton router` would run with here, without any flag.

    A flag has precedence over the environment, the environment over the file, and the file over the default.
    """
    environ = os.environ
    found = view(MODELS[process], environ, config_file(config, environ))
    values = {key: _plain(value) for key, (value, _) in found.items()}
    if values.get("registry"):
        values["registry"] = without_password(str(values["registry"]))
    if output is not Format.TEXT:
        origins = {key: where for key, (_, where) in found.items()}
        printed = {key: {"value": value, "origin": origins[key]} for key, value in values.items()} if origin else values
        (print_json if output is Format.JSON else print_yaml)(printed)
        return
    rows = [[key, _shown(values[key]), *([where] if origin else [])] for key, (_, where) in found.items()]
    print_table(["KEY", "VALUE", *(["ORIGIN"] if origin else [])], rows)


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, ByteSize):
        return int(value)
    return str(value) if isinstance(value, Path) else value


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
