"""`baton set-role`: changes the role of a running node."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.ask_routers import ask_any_router
from baton.cli.output import Format, OutputOption, fine_duration, print_document, print_text
from baton.cli.steering import Deadline, ProgressLine, TimeoutOption, print_warning
from baton.cli.target import ANSWER_TIMEOUT_S, OperatorAddressOption, RunDirOption, cluster_flag
from baton.cli.views.cluster_view import view_cluster
from baton.errors import BatonError, DeadlineExceeded
from baton.messages.cluster import NodeStatus

_POLL_INTERVAL_S = 0.2


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(set_role)


def set_role(
    node: Annotated[str, typer.Argument(help="Name of the node, as `baton get nodes` lists it.", metavar="NODE")],
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="New role: prefill or decode.", metavar="ROLE")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the role has changed.")] = True,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Make a node a prefill node or a decode node, also after restarts.

    The node finishes its running work first and keeps its model loaded. The exit code is 6 if that takes longer than
    --timeout; the role changes nevertheless.
    """
    deadline = Deadline(timeout)
    asked = ask_any_router(address, run_dir, lambda router: router.set_role(node, role, ANSWER_TIMEOUT_S))
    incarnation = ""
    if wait:
        incarnation = _wait_for_role(node, role, address, run_dir, deadline).incarnation
    found = {
        "node": node,
        "role": role,
        "changed": not asked.unchanged,
        "is_ready": wait,
        "incarnation": incarnation,
        "seconds": round(deadline.elapsed_s, 3),
        "warning": asked.warning,
    }
    if output is not Format.TEXT:
        print_document(output, found)
    else:
        print_text(
            _summary(node, role, fine_duration(deadline.elapsed_s), is_changed=not asked.unchanged, is_ready=wait)
        )
        print_warning(asked.warning)


def _summary(node: str, role: str, spent: str, *, is_changed: bool, is_ready: bool) -> str:
    if not is_changed:
        return f"{node} is a {role} node already"
    if is_ready:
        return f"{node} is a {role} node after {spent}"
    return f"{node} becomes a {role} node when its work is done"


def _progress(status: NodeStatus) -> str:
    if status.status in ("Lost", "Suspect"):
        return "restarting"
    return f"{status.status}, {status.running + status.waiting} requests, {status.leased_blocks} leased blocks"


def _wait_for_role(node: str, role: str, address: str | None, run_dir: Path | None, deadline: Deadline) -> NodeStatus:
    """Wait until a router says that the node is ready in its new role. Raises DeadlineExceeded."""
    line, progress = ProgressLine(), "not found"
    try:
        while True:
            try:
                found = [each for each in view_cluster(address, run_dir, ANSWER_TIMEOUT_S).nodes if each.name == node]
            except BatonError as error:
                found, progress = [], str(error)
            for status in found:
                if status.role == role and status.status in ("Ready", "Cordoned", "Incompatible"):
                    return status
                progress = _progress(status)
            line.show(f"{node}: {progress}")
            if deadline.has_passed:
                raise DeadlineExceeded(
                    f"after {deadline.timeout_s:g} s {node} is not a {role} node yet ({progress}): it changes when its "
                    f"work is done, see `baton wait --for role={role} {node}{cluster_flag(address, run_dir)}`"
                )
            time.sleep(_POLL_INTERVAL_S)
    finally:
        line.clear()
