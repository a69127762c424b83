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
from baton.messages.operator import NodeStatus

_POLL_INTERVAL_S = 0.2
_KNOWN_EVERYWHERE_S = 5.0
"""By then every router has read which role is wanted; one that was asked earlier may still know of an earlier wish."""


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

    The node keeps its model loaded. Its running work gets --drain-s of the node, by default 30 s, to end; after that
    requests continue at other nodes. The exit code is 6 if the change takes longer than --timeout; the role changes
    nevertheless. It is 1 if the node gets another role meanwhile, since the last command counts.
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


class OtherWishes:
    """Notices that somebody else gave the node another role, so that a command does not wait for its own for ever."""

    def __init__(self, node: str, role: str) -> None:
        self._node = node
        self._role = role
        self._since: float | None = None
        """Since when, in seconds of the command, routers have known of another wish without a break."""

    def check(self, status: NodeStatus, now: float) -> None:
        """Raises BatonError if another role has been wanted for so long that no router can know a later wish."""
        if status.desired_role in ("", self._role):
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= _KNOWN_EVERYWHERE_S:
            raise BatonError(
                f"another change of {self._node}'s role is under way: a later `baton set-role` makes it a "
                f"{status.desired_role} node"
            )


def _progress(status: NodeStatus) -> str:
    if status.status in ("Lost", "Suspect"):
        return "restarting"
    return f"{status.status}, {status.running + status.waiting} requests, {status.leased_blocks} leased blocks"


def _wait_for_role(node: str, role: str, address: str | None, run_dir: Path | None, deadline: Deadline) -> NodeStatus:
    """Wait until a router says that the node is ready in its new role.

    Raises DeadlineExceeded, and BatonError if the node is to have another role by now.
    """
    line, progress, wishes = ProgressLine(), "not found", OtherWishes(node, role)
    try:
        while True:
            try:
                found = [each for each in view_cluster(address, run_dir, ANSWER_TIMEOUT_S).nodes if each.name == node]
            except BatonError as error:
                found, progress = [], str(error)
            for status in found:
                if status.role == role and status.status in ("Ready", "Cordoned", "Incompatible"):
                    return status
                wishes.check(status, deadline.elapsed_s)
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
