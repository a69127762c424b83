"""`baton get leases`: what prefill nodes promised to keep, and what decode nodes are filling with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from baton.cli.ask_nodes import ask_nodes, can_be_asked
from baton.cli.cluster_view import view_cluster
from baton.cli.output import ListFormat, fine_duration, note, print_json, print_table, print_yaml, say
from baton.cli.selector import SelectorOption, parse_selector, select
from baton.cli.target import OperatorAddressOption, RunDirOption
from baton.errors import Unreachable
from baton.rpc.messages import NodeReport, OpenHandoff

_COLUMNS = ["NODE", "REQUEST", "ATTEMPT", "SIDE", "STATE", "PEER", "BLOCKS", "AGE"]
_WIDE = ["INCARNATION", "PEER-INCARNATION", "FLIGHT"]


def leases(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    selector: SelectorOption = "",
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Leave the header line out.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each answer.", metavar="SECONDS", min=0)] = 5.0,
    output: Annotated[ListFormat, typer.Option("-o", "--output", help="Output format.")] = ListFormat.TABLE,
) -> None:
    """List leases and transfers that are not over.

    A prefill node (SIDE sender) keeps blocks that may be read, a decode node (SIDE reader) fills blocks of its own.
    """
    wanted = parse_selector(selector)
    view = view_cluster(address, run_dir, timeout)
    asked = [node for node in select(view.nodes, wanted) if can_be_asked(node)]
    answers = ask_nodes(asked, timeout)
    if asked and not answers.reports:
        raise Unreachable("; ".join(answers.problems.values()))
    reports = [answers.reports[node.incarnation] for node in asked if node.incarnation in answers.reports]
    _show(reports, output, headers=not no_headers)
    unavailable = [view.detail] if view.health == "unavailable" else []
    for problem in (*unavailable, *answers.problems.values()):
        note(f"baton: {problem}")


def _show(reports: Sequence[NodeReport], output: ListFormat, *, headers: bool) -> None:
    found = [(report, handoff) for report in reports for handoff in oldest_first(report)]
    if output is ListFormat.JSON:
        print_json([lease_json(report, handoff) for report, handoff in found])
    elif output is ListFormat.YAML:
        print_yaml([lease_json(report, handoff) for report, handoff in found])
    elif output is ListFormat.NAME:
        for report, handoff in found:
            say(f"{report.description.node_id}/{handoff.attempt}")
    else:
        wide = output is ListFormat.WIDE
        rows = [lease_row(report, handoff, wide=wide) for report, handoff in found]
        print_table(_COLUMNS + (_WIDE if wide else []), rows, headers=headers)


def oldest_first(report: NodeReport) -> list[OpenHandoff]:
    """The node's leases or transfers that are not over."""
    return sorted(report.handoff.open, key=lambda handoff: -handoff.age_s)


def lease_json(report: NodeReport, handoff: OpenHandoff) -> dict[str, Any]:
    """As a JSON object."""
    return {
        "node": report.description.node_id,
        "incarnation": report.description.incarnation,
        "request_id": handoff.attempt.request_id,
        "attempt": handoff.attempt.attempt,
        "flight": f"{handoff.attempt.flight:x}",
        "side": handoff.side.value,
        "state": handoff.state,
        "peer": handoff.peer,
        "peer_incarnation": handoff.peer_incarnation,
        "num_blocks": handoff.num_blocks,
        "age_s": handoff.age_s,
    }


def lease_row(report: NodeReport, handoff: OpenHandoff, *, wide: bool) -> list[str]:
    """As a line of a table."""
    attempt = handoff.attempt
    row = [
        report.description.node_id,
        attempt.request_id,
        str(attempt.attempt),
        handoff.side.value,
        handoff.state,
        handoff.peer or "-",
        str(handoff.num_blocks),
        fine_duration(handoff.age_s),
    ]
    more = [report.description.incarnation, handoff.peer_incarnation or "-", f"{attempt.flight:x}"]
    return row + (more if wide else [])
