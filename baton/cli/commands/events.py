"""`baton events`: what became of the cluster."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask_routers import ask_all_routers, routers
from baton.cli.output import VERSION, ListFormat, fine_duration, note, print_json, print_table, print_yaml, say
from baton.cli.steer import ASK_S
from baton.cli.target import OperatorAddressOption, RunDirOption
from baton.cli.views.followed_routers import follow
from baton.cli.views.merged_events import Merge

if TYPE_CHECKING:
    from baton.messages.steering import ClusterEvent

_COLUMNS = ["AGE", "TYPE", "REASON", "SUBJECT", "DETAIL"]
_WIDE = ["SEQ", "INCARNATION", "REQUEST", "ROUTER"]
_WIDTHS = (8, 7, 18, 12, 0)
"""Of columns whose rows are yet to come."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(events)


def events(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on with those that follow.")] = False,
    after: Annotated[
        int, typer.Option(help="Only those with a larger number, of each router.", metavar="SEQ", min=0)
    ] = 0,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Leave the header line out.")] = False,
    output: Annotated[ListFormat, typer.Option("-o", "--output", help="Output format.")] = ListFormat.TABLE,
) -> None:
    """List the events of the cluster as its routers saw them: nodes that joined and left, cordons, failovers, ...

    What several of them saw is told once. A router keeps some thousand events of its own run, and its own numbers. With
    -w and json there is one document a line.
    """
    if watch:
        _watch(address, run_dir, after, output, headers=not no_headers)
        return
    found, problems = of_all_routers(address, run_dir, after, ASK_S)
    if output is ListFormat.JSON:
        print_json({"version": VERSION, "events": [asdict(event) for event in found]})
    elif output is ListFormat.YAML:
        print_yaml({"version": VERSION, "events": [asdict(event) for event in found]})
    elif output is ListFormat.NAME:
        for event in found:
            say(event.reason)
    else:
        wide, now = output is ListFormat.WIDE, time.time()
        rows = [row(event, fine_duration(now - event.time), wide=wide) for event in found]
        print_table(_COLUMNS + (_WIDE if wide else []), rows, headers=not no_headers)
    for problem in problems:
        note(f"baton: {problem}")


def of_all_routers(
    address: str | None, run_dir: Path | None, after: int, timeout_s: float
) -> tuple[list[ClusterEvent], list[str]]:
    """What they saw, the oldest first, and what is wrong with those that gave no answer; raises Unreachable."""
    answers, problems = ask_all_routers(
        address, run_dir, lambda router: list(router.events(after, timeout_s=timeout_s))
    )
    return Merge().of(event for told in answers for event in told), problems


def _watch(address: str | None, run_dir: Path | None, after: int, output: ListFormat, *, headers: bool) -> None:
    is_table = output in (ListFormat.TABLE, ListFormat.WIDE)
    wide = output is ListFormat.WIDE
    if is_table and headers:
        _line(["TIME", *_COLUMNS[1:], *(_WIDE if wide else [])])
    for event in follow(lambda: routers(address, run_dir), after):
        if output is ListFormat.JSON:
            say(json.dumps({"version": VERSION, **asdict(event)}, ensure_ascii=False))
        elif output is ListFormat.YAML:
            say("---")
            print_yaml({"version": VERSION, **asdict(event)})
        elif output is ListFormat.NAME:
            say(event.reason)
        else:
            _line(row(event, time.strftime("%H:%M:%S", time.localtime(event.time)), wide=wide))
        sys.stdout.flush()


def row(event: ClusterEvent, when: str, *, wide: bool) -> list[str]:
    """As a line of a table."""
    cells = [when, event.severity, event.reason, event.subject or "-", event.detail or "-"]
    more = [str(event.seq), event.incarnation or "-", event.request_id or "-", event.router]
    return cells + (more if wide else [])


def _line(cells: list[str]) -> None:
    widths = (*_WIDTHS, *(0 for _ in cells[len(_WIDTHS) :]))
    say("   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
