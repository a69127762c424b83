"""`baton doctor`: checks this machine and this installation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import Format, OutputOption, print_document, print_text
from baton.cli.target import RunDirOption
from baton.cli.views.doctor_checks import Finding, Level, run_checks, worst_level
from baton.config import bundled_model_dir
from baton.config.kinds import Dtype
from baton.messages.node import NodeShape


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
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

    found = find_model(model or bundled_model_dir(), os.environ)
    findings = run_checks(gather_facts(found, dtype, registry, run_dir, NodeShape(tp, pp)))
    level = worst_level(findings)
    if output is Format.TEXT:
        _print(findings, level)
    else:
        print_document(output, {"status": level.name, "checks": [_plain(one) for one in findings]})
    raise typer.Exit(int(level))


def _plain(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "status": finding.level.name, "says": finding.message, "fix": finding.fix}


def _print(findings: list[Finding], level: Level) -> None:
    wide = max(len(one.check) for one in findings)
    for one in findings:
        print_text(f"{one.level.name:<8}  {one.check:<{wide}}  {one.message}")
        if one.fix:
            print_text(f"{'':<8}  {'':<{wide}}  fix: {one.fix}")
    count = sum(one.level is not Level.OK for one in findings)
    print_text(
        f"\n{level.name}: "
        + (f"{count} of {len(findings)} checks found something to fix" if count else "nothing to fix")
    )
