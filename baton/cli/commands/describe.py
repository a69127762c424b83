"""`baton describe node` and `describe request`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask import ask_about_request, ask_nodes, can_be_asked
from baton.cli.commands import add_group
from baton.cli.output import (
    Format,
    OutputOption,
    fine_duration,
    print_result,
    size,
)
from baton.cli.target import (
    ANSWER_TIMEOUT_S,
    EachAnswerTimeoutOption,
    OperatorAddressOption,
    RunDirOption,
    cluster_flag,
)
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.node_page import node_json, node_lines
from baton.cli.views.rows import ENDED_STATES, brief_ms
from baton.did_you_mean import did_you_mean
from baton.errors import NodeNotFound, RequestNotFound, Unreachable
from baton.messages.operator import NodeStatus

if TYPE_CHECKING:
    from baton.messages.operator import RequestRow
    from baton.wire.clients.operator_client import OperatorClient


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    add_group(app, name, text, "Show all details of one node or request.", {"node": node, "request": request})


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
    print_result(output, node_json(status, report), node_lines(status, report))
    if answers.problems:
        raise Unreachable(answers.problems[status.incarnation])


def find_node(nodes: Sequence[NodeStatus], name: str) -> NodeStatus:
    """The node with this name: of several incarnations one that is not lost, or the latest. Raises NodeNotFound."""
    namesakes = [node for node in nodes if node.name == name]
    if not namesakes:
        raise NodeNotFound(f"no node is called {name}{did_you_mean(name, {node.name for node in nodes})}")
    return min(namesakes, key=lambda node: (node.status == "Lost", node.age_s))


def request(
    request_id: Annotated[str, typer.Argument(help="Id of the request.", metavar="REQUEST")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Show where a request is, its progress, and how it ended."""

    def find(router: OperatorClient) -> RequestRow:
        rows = router.requests(1, request_id, timeout)
        if not rows:
            raise RequestNotFound(f"the router knows no request {request_id[:80]!r}: it remembers only the latest ones")
        return rows[0]

    row = ask_about_request(address, run_dir, find)
    print_result(output, asdict(row), request_lines(row, cluster_flag(address, run_dir)))


def request_lines(row: RequestRow, where: str = "") -> Sequence[str]:
    """The details of one request as lines of text; `where` ends the commands in them, as `cluster_flag` returns it."""
    fields = [
        ("Request", row.request_id),
        ("State", f"{row.state}{f' ({row.detail})' if row.detail else ''}"),
        ("Arrived", f"{fine_duration(row.age_s)} ago, to {row.router}"),
        ("Prefill node", row.prefill_node or "none: the decode node computes the prompt, or the request waits"),
        ("Decode node", row.decode_node or "none yet"),
        ("Attempts", str(row.attempts)),
        ("Tokens", f"{row.prompt_tokens} of the prompt, {row.output_tokens} generated"),
        ("First token", "none yet" if row.ttft_ms is None else f"after {brief_ms(row.ttft_ms)}"),
    ]
    if row.total_ms is not None:
        fields.append(("End", f"after {brief_ms(row.total_ms)}"))
        fields.append(("KV moved", size(row.kv_bytes) if row.kv_bytes else "none"))
    width = max(len(name) for name, _ in fields) + 1
    hints = [f"Where its time was spent: baton trace {row.request_id}{where}"] if row.state in ENDED_STATES else []
    hints.append(f"Why it was placed there: baton explain {row.request_id}{where}")
    return [*(f"{name + ':':{width}}   {value}" for name, value in fields), "", *hints]
