"""`baton status` and `baton events`: the health, load and problems of a cluster, and its events."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask import NodeAnswers, ask_all_routers, ask_nodes, can_be_asked, router_addresses
from baton.cli.output import (
    VERSION,
    Format,
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    OutputOption,
    fine_duration,
    print_json,
    print_note,
    print_result,
    print_table,
    print_text,
    print_yaml,
)
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.followed_routers import EventMerger, follow_events
from baton.cli.views.status_page import Overview, overview, status_lines
from baton.errors import BatonError, ExitCode

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent


_COLUMNS = ["AGE", "TYPE", "REASON", "SUBJECT", "DETAIL"]
_WIDE = ["SEQ", "INCARNATION", "REQUEST", "ROUTER"]
_WIDTHS = (8, 7, 18, 12, 0)
"""Widths of the columns with -w, when later rows are not known."""
_ASK_NODES_S = 2.0
"""How long to wait for nodes at most, since the other nodes are worth showing without one that does not answer."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add one of the commands."""
    app.command(name, help=text)(status if name == "status" else events)


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


def status(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Show whether the cluster serves, its load, what is degraded and the latest failures.

    The cluster is ok, degraded or unavailable. The exit code is 1 if it is unavailable.
    """
    found = _overview(address, run_dir, timeout)
    print_result(output, found.to_json(), status_lines(found, time.time()))
    if found.view.health == "unavailable":
        raise typer.Exit(int(ExitCode.FAILED))


def _overview(address: str | None, run_dir: Path | None, timeout_s: float) -> Overview:
    """Ask routers and nodes. Raises Unreachable if there is no cluster; a node without an answer is a problem of it."""
    view = view_cluster(address, run_dir, timeout_s)
    asked = [node for node in view.nodes if can_be_asked(node)]
    answers = ask_nodes(asked, min(timeout_s, _ASK_NODES_S)) if asked else NodeAnswers({}, {})
    events: list[ClusterEvent] = []
    # If no router answers, the view says so already.
    with suppress(BatonError):
        events, _ = events_of_all_routers(address, run_dir, 0, timeout_s)
    return overview(view, answers.reports, answers.problems, events)
