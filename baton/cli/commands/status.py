"""`baton status`: summarises the health, load and problems of a cluster."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from baton.cli.ask_nodes import NodeAnswers, ask_nodes, can_be_asked
from baton.cli.commands.events import events_of_all_routers
from baton.cli.output import Format, OutputOption, print_document, print_text
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.status_page import Overview, overview, status_lines
from baton.errors import BatonError, ExitCode

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent

_ASK_NODES_S = 2.0
"""How long to wait for nodes at most, since the other nodes are worth showing without one that does not answer."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(status)


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
    if output is not Format.TEXT:
        print_document(output, found.to_json())
    else:
        for line in status_lines(found, time.time()):
            print_text(line)
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
