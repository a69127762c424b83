"""The commands that change nodes, and `baton wait`: `cordon`, `uncordon`, `drain`, `set-role`, `cache reset`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton.cli.ask import ask_any_router, router_addresses
from baton.cli.commands import add_group
from baton.cli.output import Format, OutputOption, fine_duration, print_document, print_note, print_result, print_text
from baton.cli.target import (
    ANSWER_TIMEOUT_S,
    AnswerTimeoutOption,
    OperatorAddressOption,
    RunDirOption,
    SelectorOption,
    cluster_flag,
    parse_selector,
    select,
)
from baton.cli.views.cluster_view import view_cluster
from baton.cli.waiting import Deadline, NodesArgument, ProgressLine, TimeoutOption, print_warning
from baton.did_you_mean import did_you_mean
from baton.errors import BatonError, CacheInUse, DeadlineExceeded, ExitCode, NodeNotFound, Unreachable, UsageError
from baton.messages.operator import NodeStatus

if TYPE_CHECKING:
    from baton.messages.operator import DrainProgress
    from baton.wire.clients.operator_client import OperatorClient


_POLL_INTERVAL_S = 0.2
_KNOWN_EVERYWHERE_S = 5.0
"""By then every router has read which role is wanted; one that was asked earlier may still know of an earlier wish."""
_ASK_S = 6.0
"""How long to wait for a node, which may have to finish a step first."""
_SIMPLE_CONDITIONS = ("ready", "idle", "cordoned", "drained", "gone")
_ROLES = ("prefill", "decode")


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add one of the commands."""
    if name == "cache":
        add_group(app, name, text, "Empty the prefix caches of nodes.", {"reset": reset})
    else:
        commands: Mapping[str, Callable[..., Any]] = {
            "cordon": cordon,
            "uncordon": uncordon,
            "drain": drain,
            "set-role": set_role,
            "wait": wait,
        }
        app.command(name, help=text)(commands[name])


def cordon(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Stop sending new requests to these nodes, also after restarts, until `uncordon`. Running requests continue."""
    warning = ask_any_router(address, run_dir, lambda router: router.cordon(nodes, timeout))
    _print_result(nodes, output, is_cordoned=True, warning=warning)


def uncordon(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Send new requests to these nodes again."""
    ask_any_router(address, run_dir, lambda router: router.uncordon(nodes, timeout))
    _print_result(nodes, output, is_cordoned=False, warning="")


def _print_result(nodes: list[str], output: Format, *, is_cordoned: bool, warning: str) -> None:
    result = {"nodes": nodes, "cordoned": is_cordoned, "warning": warning}
    print_result(output, result, [f"{name} {'cordoned' if is_cordoned else 'uncordoned'}" for name in nodes])
    if output is Format.TEXT:
        print_warning(warning)


def drain(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the process of the node when it is idle.")] = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Cordon nodes, one after the other, and wait until each has no requests and no leased blocks left.

    The nodes stay cordoned, even if they restart, until `baton uncordon`. The exit code is 6 if this takes longer than
    --timeout.
    """
    deadline = Deadline(timeout)
    done = []
    for name in nodes:
        line, started_s = ProgressLine(), deadline.elapsed_s
        try:
            last = _drain(name, address, run_dir, deadline, line, stop=stop)
        finally:
            line.clear()
        seconds = deadline.elapsed_s - started_s
        result = {"name": name, "drained": True, "stopped": last.stopped, "seconds": round(seconds, 3)}
        done.append(result | {"quarantined_blocks": last.quarantined_blocks})
        if output is Format.TEXT:
            left = f", but {remaining_work(last)} are left, because reads of them do not end"
            suffix = left if last.quarantined_blocks else ""
            print_text(f"{name} {'stopped' if last.stopped else 'drained'} after {fine_duration(seconds)}{suffix}")
    document: dict[str, Any] = {"nodes": done}
    if output is not Format.TEXT:
        print_document(output, document)


def _drain(
    name: str, address: str | None, run_dir: Path | None, deadline: Deadline, line: ProgressLine, *, stop: bool
) -> DrainProgress:
    """Follow the drain of one node, at the next router if one fails. Raises DeadlineExceeded or NodeNotFound."""
    from baton.wire.clients.operator_client import OperatorClient

    last: DrainProgress | None = None
    failure: BatonError | None = None
    addresses: Sequence[str] = []
    while True:
        if not addresses:
            if failure is not None:
                raise failure
            addresses = router_addresses(address, run_dir)
        client = OperatorClient(addresses[0])
        try:
            for last in client.drain(name, stop=stop, timeout_s=deadline.remaining_s):
                # There was progress, so every router may be asked once more.
                failure = None
                line.show(f"{name}: {remaining_work(last)}")
            if last is not None:
                return last
        except DeadlineExceeded:
            raise _timeout_error(name, last, deadline, cluster_flag(address, run_dir)) from None
        except Unreachable as error:
            failure = failure or error
        finally:
            client.close()
        addresses = addresses[1:]


def _timeout_error(name: str, last: DrainProgress | None, deadline: Deadline, where: str) -> DeadlineExceeded:
    left = remaining_work(last) if last is not None else "an unknown number of requests"
    return DeadlineExceeded(
        f"after {deadline.timeout_s:g} s {name} still has {left}: it stays cordoned; repeat "
        f"`baton drain {name}{where}` to wait longer, or admit it again with `baton uncordon {name}{where}`"
    )


def remaining_work(progress: DrainProgress) -> str:
    """The work that is left, as text."""
    words = {
        "running": "running",
        "waiting": "waiting",
        "leased_blocks": "leased blocks",
        "quarantined_blocks": "quarantined blocks",
    }
    parts = [f"{count} {words[key]}" for key, count in asdict(progress).items() if key in words and count]
    if not parts and progress.in_flight:
        parts = [f"{progress.in_flight} requests on their way"]
    return ", ".join(parts) or "nothing left" + (
        "" if progress.idle else ", but other routers may not know of the cordon yet"
    )


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
    result = {
        "node": node,
        "role": role,
        "changed": not asked.unchanged,
        "is_ready": wait,
        "incarnation": incarnation,
        "seconds": round(deadline.elapsed_s, 3),
        "warning": asked.warning,
    }
    spent = fine_duration(deadline.elapsed_s)
    summary = _summary(node, role, spent, is_changed=not asked.unchanged, is_ready=wait)
    print_result(output, result, [summary])
    if output is Format.TEXT:
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
                statuses = [
                    status for status in view_cluster(address, run_dir, ANSWER_TIMEOUT_S).nodes if status.name == node
                ]
            except BatonError as error:
                statuses, progress = [], str(error)
            for status in statuses:
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


def reset(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each node.", metavar="SECONDS", min=0)] = _ASK_S,
    output: OutputOption = Format.TEXT,
) -> int:
    """Empty the prefix caches of these nodes, on the device and in host memory.

    A node refuses while any of its blocks is in use: drain it with `baton drain` first, and uncordon it afterwards. The
    exit code is 1 if a node refused; the caches of the others are empty.
    """
    forgotten: dict[str, int] = {}
    refused: dict[str, str] = {}
    for node in nodes:
        try:
            forgotten[node] = ask_any_router(address, run_dir, partial(_reset, node, timeout))
        except CacheInUse as error:
            refused[node] = str(error)
    result = {"forgotten_blocks": forgotten, "refused": refused}
    print_result(output, result, [f"{node} has forgotten {count} blocks" for node, count in forgotten.items()])
    if output is Format.TEXT:
        for why in refused.values():
            print_note(f"baton: {why}")
    return int(ExitCode.FAILED if refused else ExitCode.OK)


def _reset(node: str, timeout: float, router: OperatorClient) -> int:
    return router.reset_cache(node, timeout)


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
        statuses = _wait(wanted, nodes or [], properties, address, run_dir, deadline, line)
    finally:
        line.clear()
    rows = [{"name": node.name, "role": node.role, "status": node.status} for node in statuses]
    result = {"condition": condition, "nodes": rows, "seconds": round(deadline.elapsed_s, 3)}
    print_result(
        output, result, [f"{node.name} {condition} after {fine_duration(deadline.elapsed_s)}" for node in statuses]
    )


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
