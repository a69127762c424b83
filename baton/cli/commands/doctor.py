"""`baton doctor` and `baton config view`: this machine, this installation and its settings."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ByteSize

from baton.cli.commands import add_group
from baton.cli.output import Format, OutputOption, print_document, print_json, print_table, print_text, print_yaml
from baton.cli.target import RunDirOption
from baton.cli.views.doctor_checks import Finding, Level, run_checks, worst_level
from baton.config import bundled_model_dir
from baton.config.kinds import Dtype
from baton.config.load import MODELS, config_file, view
from baton.messages.node_model import NodeShape
from baton.security.redaction import without_password


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add one of the commands."""
    if name == "config":
        add_group(app, name, text, "Show the configuration.", {"view": view_config})
    else:
        app.command(name, help=f"{text} Exit code 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.")(doctor)


def doctor(
    model: Annotated[
        Path | None, typer.Option(help="What `baton up --model` takes. Default: the bundled model.", metavar="MODEL")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the model.")] = "auto",
    registry: Annotated[
        str,
        typer.Option(
            envvar="BATON_REGISTRY", help="URL of a Redis to check as well; its user must be allowed to call INFO."
        ),
    ] = "",
    tp: Annotated[int, typer.Option(help="Ranks of each node, as of `baton up --tp`.", min=1, max=64)] = 1,
    pp: Annotated[int, typer.Option(help="Stages of each node, as of `baton up --pp`.", min=1, max=64)] = 1,
    run_dir: RunDirOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Check this machine and this installation."""
    from baton.cli.views.doctor_facts import gather_facts
    from baton.models.resolve import find_model

    resolved = find_model(model or bundled_model_dir(), os.environ)
    findings = run_checks(gather_facts(resolved, dtype, registry, run_dir, NodeShape(tp, pp)))
    level = worst_level(findings)
    if output is Format.TEXT:
        _print(findings, level)
    else:
        print_document(output, {"status": level.name, "checks": [_plain(finding) for finding in findings]})
    raise typer.Exit(int(level))


def _plain(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "status": finding.level.name, "says": finding.message, "fix": finding.fix}


def _print(findings: list[Finding], level: Level) -> None:
    wide = max(len(finding.check) for finding in findings)
    for finding in findings:
        print_text(f"{finding.level.name:<8}  {finding.check:<{wide}}  {finding.message}")
        if finding.fix:
            print_text(f"{'':<8}  {'':<{wide}}  fix: {finding.fix}")
    count = sum(finding.level is not Level.OK for finding in findings)
    print_text(
        f"\n{level.name}: "
        + (f"{count} of {len(findings)} checks found something to fix" if count else "nothing to fix")
    )


class Process(enum.StrEnum):
    """The commands that have settings."""

    UP = "up"
    NODE = "node"
    ROUTER = "router"


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
    settings = view(MODELS[process], environ, config_file(config, environ))
    values = {key: _plain_setting(value) for key, (value, _) in settings.items()}
    if values.get("registry"):
        values["registry"] = without_password(str(values["registry"]))
    if output is not Format.TEXT:
        origins = {key: where for key, (_, where) in settings.items()}
        printed = {key: {"value": value, "origin": origins[key]} for key, value in values.items()} if origin else values
        (print_json if output is Format.JSON else print_yaml)(printed)
        return
    rows = [[key, _shown(values[key]), *([where] if origin else [])] for key, (_, where) in settings.items()]
    print_table(["KEY", "VALUE", *(["ORIGIN"] if origin else [])], rows)


def _plain_setting(value: Any) -> Any:
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
