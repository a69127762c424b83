"""`baton wait`: waits until nodes meet a condition."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import Format, OutputOption, fine_duration, print_document, print_text
from baton.cli.selector import SelectorOption, parse_selector, select
from baton.cli.steering import Deadline, ProgressLine
from baton.cli.target import ANSWER_TIMEOUT_S, OperatorAddressOption, RunDirOption
from baton.cli.views.cluster_view import view_cluster
from baton.did_you_mean import did_you_mean
from baton.errors import BatonError, DeadlineExceeded, NodeNotFound, Unreachable, UsageError
from baton.messages.operator import NodeStatus

_SIMPLE_CONDITIONS = ("ready", "idle", "cordoned", "drained", "gone")
_ROLES = ("prefill", "decode")
_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition that nodes are to meet."""

    word: str
    """One of the simple conditions, or `role`."""
    role: str = ""

    def holds(self, node: NodeStatus) -> bool:
        """Whether the node meets the condition."""
        is_there = node.status in ("Ready", "Cordoned", "Incompatible")
        match self.word:
            case "ready":
                return node.status == "Ready"
            case "idle":
                return node.is_idle
            case "cordoned":
                return node.cordoned
            case "drained":
                return node.cordoned and node.is_idle
            case "gone":
                return node.status in ("Lost", "Stopped")
            case _:
                return is_there and node.role == self.role


def parse_condition(text: str) -> Condition:
    """The condition of --for. Raises UsageError for an unknown one."""
    word, _, value = text.partition("=")
    if word == "role" and value in _ROLES:
        return Condition(word, value)
    if text in _SIMPLE_CONDITIONS:
        return Condition(text)
    known = (*_SIMPLE_CONDITIONS, *(f"role={role}" for role in _ROLES))
    raise UsageError(f"--for {text}: there is no such condition{did_you_mean(text, known)}")


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(wait)


def wait(
    condition: Annotated[
        str,
        typer.Option(
            "--for", help="Condition: ready, idle, cordoned, drained, gone or role=ROLE.", metavar="CONDITION"
        ),
    ],
    nodes: Annotated[
        list[str] | None,
        typer.Argument(help="Names of nodes. Default: all nodes.", metavar="[NODE...]", show_default=False),
    ] = None,
    selector: SelectorOption = "",
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: Annotated[float, typer.Option(help="Longest time to wait, in seconds.", metavar="SECONDS", min=0)] = 60.0,
    output: OutputOption = Format.TEXT,
) -> None:
    """Wait until all these nodes meet a condition.

    The exit code is 6 if they do not within --timeout, and 3 if there is no node of a name.
    """
    wanted, properties, deadline = parse_condition(condition), parse_selector(selector), Deadline(timeout)
    line = ProgressLine()
    try:
        found = _wait(wanted, nodes or [], properties, address, run_dir, deadline, line)
    finally:
        line.clear()
    rows = [{"name": node.name, "role": node.role, "status": node.status} for node in found]
    result = {"condition": condition, "nodes": rows, "seconds": round(deadline.elapsed_s, 3)}
    if output is not Format.TEXT:
        print_document(output, result)
    else:
        for node in found:
            print_text(f"{node.name} {condition} after {fine_duration(deadline.elapsed_s)}")


def _wait(
    wanted: Condition,
    names: Sequence[str],
    properties: dict[str, str],
    address: str | None,
    run_dir: Path | None,
    deadline: Deadline,
    line: ProgressLine,
) -> Sequence[NodeStatus]:
    """Ask any router until the nodes meet the condition. Raises DeadlineExceeded, NodeNotFound or Unreachable."""
    failure: BatonError | None = None
    while True:
        others: Sequence[NodeStatus] = []
        try:
            known = [node for node in view_cluster(address, run_dir, ANSWER_TIMEOUT_S).nodes if node.role != "router"]
        except (Unreachable, DeadlineExceeded) as error:
            if address is None:
                raise
            failure = error
        else:
            failure = None
            selected = select(nodes_by_name(known, names, allows_missing=wanted.word == "gone"), properties)
            others = [node for node in selected if not wanted.holds(node)]
            if not others and (selected or wanted.word == "gone"):
                return selected
            line.show("waiting for " + (", ".join(f"{node.name} ({node.status})" for node in others) or "nodes"))
        if deadline.has_passed:
            raise failure or DeadlineExceeded(
                f"the condition is not met after {deadline.timeout_s:g} s: "
                + (", ".join(f"{node.name} is {node.status}" for node in others) or "there are no such nodes")
            )
        time.sleep(_POLL_INTERVAL_S)


def nodes_by_name(
    known: Sequence[NodeStatus], names: Sequence[str], *, allows_missing: bool = False
) -> list[NodeStatus]:
    """For each name the incarnation that serves, or the latest one; all nodes if there are no names.

    Raises NodeNotFound for a name without a node, unless `allows_missing`.
    """
    latest: dict[str, NodeStatus] = {}
    for node in known:
        if node.name not in latest or node.status not in ("Suspect", "Lost"):
            latest[node.name] = node
    missing = [name for name in names if name not in latest]
    if missing and not allows_missing:
        raise NodeNotFound(f"no node is called {missing[0]}{did_you_mean(missing[0], latest)}")
    return [node for name, node in latest.items() if not names or name in names]
