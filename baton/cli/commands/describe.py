"""`baton describe node`. `baton describe request` is registered here, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from baton.cli.ask_nodes import ask_nodes, can_be_asked
from baton.cli.commands.requests import request
from baton.cli.output import Format, OutputOption, print_document, print_text
from baton.cli.target import ANSWER_TIMEOUT_S, EachAnswerTimeoutOption, OperatorAddressOption, RunDirOption
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.node_page import node_json, node_lines
from baton.did_you_mean import did_you_mean
from baton.errors import NodeNotFound, Unreachable
from baton.messages.operator import NodeStatus


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def describe() -> None:
        """Show all details of one node or request."""

    group.command("node")(node)
    group.command("request")(request)
    app.add_typer(group, name=name)


def node(
    name: Annotated[str, typer.Argument(help="Name of the node, as `baton get nodes` lists it.", metavar="NAME")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Show the properties of a node, its load and its hand-offs.

    If the node does not answer, only what its router knows is shown, and the exit code is 5.
    """
    status = find_node(view_cluster(address, run_dir, timeout).nodes, name)
    answers = ask_nodes([status] if can_be_asked(status) else [], timeout)
    report = answers.reports.get(status.incarnation)
    if output is not Format.TEXT:
        print_document(output, node_json(status, report))
    else:
        for line in node_lines(status, report):
            print_text(line)
    if answers.problems:
        raise Unreachable(answers.problems[status.incarnation])


def find_node(nodes: Sequence[NodeStatus], name: str) -> NodeStatus:
    """The node with this name: of several incarnations one that is not lost, or the latest. Raises NodeNotFound."""
    found = [node for node in nodes if node.name == name]
    if not found:
        raise NodeNotFound(f"no node is called {name}{did_you_mean(name, {node.name for node in nodes})}")
    return min(found, key=lambda node: (node.status == "Lost", node.age_s))
