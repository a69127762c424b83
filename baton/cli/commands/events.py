"""`baton events`: lists the events of a cluster, as its routers saw them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask_routers import ask_all_routers, router_addresses
from baton.cli.output import (
    VERSION,
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    fine_duration,
    print_json,
    print_note,
    print_table,
    print_text,
    print_yaml,
)
from baton.cli.target import ANSWER_TIMEOUT_S, OperatorAddressOption, RunDirOption
from baton.cli.views.followed_routers import follow_events
from baton.cli.views.merged_events import EventMerger

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent

_COLUMNS = ["AGE", "TYPE", "REASON", "SUBJECT", "DETAIL"]
_WIDE = ["SEQ", "INCARNATION", "REQUEST", "ROUTER"]
_WIDTHS = (8, 7, 18, 12, 0)
"""Widths of the columns with -w, when later rows are not known."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(events)


def events(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Keep printing new events, until Ctrl-C.")] = False,
    after: Annotated[
        int, typer.Option(help="Only events of each router with a larger sequence number.", metavar="SEQ", min=0)
    ] = 0,
    no_headers: NoHeadersOption = False,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the events of the cluster that its routers saw: nodes that joined or left, cordons, failovers and others.

    An event that several routers saw is listed once. Each router keeps the last few thousand events since its start,
    and numbers them itself. With -w, JSON is one document a line.
    """
    if watch:
        _watch(address, run_dir, after, output, headers=not no_headers)
        return
    found, problems = events_of_all_routers(address, run_dir, after, ANSWER_TIMEOUT_S)
    if output is ListFormat.JSON:
        print_json({"version": VERSION, "events": [asdict(event) for event in found]})
    elif output is ListFormat.YAML:
        print_yaml({"version": VERSION, "events": [asdict(event) for event in found]})
    elif output is ListFormat.NAME:
        for event in found:
            print_text(event.reason)
    else:
        wide, now = output is ListFormat.WIDE, time.time()
        rows = [event_row(event, fine_duration(now - event.time), wide=wide) for event in found]
        print_table(_COLUMNS + (_WIDE if wide else []), rows, headers=not no_headers)
    for problem in problems:
        print_note(f"baton: {problem}")


def events_of_all_routers(
    address: str | None, run_dir: Path | None, after: int, timeout_s: float
) -> tuple[list[ClusterEvent], list[str]]:
    """The events of all routers, the oldest first, and the errors of the routers that did not answer.

    Raises Unreachable if no router answers.
    """
    answers, problems = ask_all_routers(
        address, run_dir, lambda router: list(router.events(after, timeout_s=timeout_s))
    )
    return EventMerger().merge(event for events in answers for event in events), problems


def _watch(address: str | None, run_dir: Path | None, after: int, output: ListFormat, *, headers: bool) -> None:
    is_table = output in (ListFormat.TABLE, ListFormat.WIDE)
    wide = output is ListFormat.WIDE
    if is_table and headers:
        _print_row(["TIME", *_COLUMNS[1:], *(_WIDE if wide else [])])
    for event in follow_events(lambda: router_addresses(address, run_dir), after):
        if output is ListFormat.JSON:
            print_text(json.dumps({"version": VERSION, **asdict(event)}, ensure_ascii=False))
        elif output is ListFormat.YAML:
            print_text("---")
            print_yaml({"version": VERSION, **asdict(event)})
        elif output is ListFormat.NAME:
            print_text(event.reason)
        else:
            _print_row(event_row(event, time.strftime("%H:%M:%S", time.localtime(event.time)), wide=wide))
        sys.stdout.flush()


def event_row(event: ClusterEvent, when: str, *, wide: bool) -> list[str]:
    """An event as a row of a table; `wide` adds the columns of `-o wide`."""
    cells = [when, event.severity, event.reason, event.subject or "-", event.detail or "-"]
    wide_cells = [str(event.seq), event.incarnation or "-", event.request_id or "-", event.router]
    return cells + (wide_cells if wide else [])


def _print_row(cells: list[str]) -> None:
    widths = (*_WIDTHS, *(0 for _ in cells[len(_WIDTHS) :]))
    print_text("   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
