"""`baton config view`: what a command would run with, and who said so."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ByteSize

from baton.cli.output import Format, print_json, print_table, print_yaml
from baton.config.load import config_file, view
from baton.config.node import NodeConfig, RouterConfig, UpConfig
from baton.security.redaction import without_password


class Process(enum.StrEnum):
    """Whose configuration."""

    UP = "up"
    NODE = "node"
    ROUTER = "router"


_MODELS: Mapping[Process, type[BaseModel]] = {
    Process.UP: UpConfig,
    Process.NODE: NodeConfig,
    Process.ROUTER: RouterConfig,
}


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def config() -> None:
        """Look at the configuration."""

    group.command("view")(view_config)
    app.add_typer(group, name=name)


def view_config(
    process: Annotated[Process, typer.Argument(help="The command that it is of.")] = Process.UP,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file. Default: ./baton.toml if it exists.", metavar="PATH")
    ] = None,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TEXT,
) -> None:
    """Print what `baton up`, `baton node` or `baton router` would run with here, before any flag.

    A flag is stronger than the environment, that than the file, and that than the default.
    """
    environ = os.environ
    found = view(_MODELS[process], environ, config_file(config, environ))
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
    """As JSON can say it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, ByteSize):
        return int(value)
    return str(value) if isinstance(value, Path) else value


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
