"""Combines what a router and a supervisor know about a cluster. Its only I/O is the call to the router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from baton.cli.cluster.state import ClusterState, ProcessState, start_time
from baton.cli.target import local_cluster, operator_client
from baton.errors import DeadlineExceeded, Unreachable
from baton.messages.operator import ClusterStatus, NodeStatus


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as an operator sees it."""

    cluster: str
    health: str
    """ok, degraded or unavailable."""
    detail: str
    nodes: Sequence[NodeStatus]
    supervisor: ClusterState | None
    """None for a cluster that was given by address."""

    def to_json(self) -> dict[str, Any]:
        """The view as a JSON object, with the nodes as `baton get nodes -o json` prints them."""
        return asdict(self)


def view_cluster(address: str | None, run_dir: Path | None, timeout_s: float) -> ClusterView:
    """Ask the routers, one after the other until one answers, and read the supervisor's state.

    Raises Unreachable if there is no cluster to ask, and DeadlineExceeded if the router at `address` does not answer.
    If no router of the cluster in `run_dir` answers, the health is `unavailable`.
    """
    if address is not None:
        try:
            return combine(_ask(address, timeout_s), "", None)
        except Unreachable as error:
            raise Unreachable(f"{error}: is this the router's operator address?") from None
    state = local_cluster(run_dir).state
    problems: list[str] = []
    for router in state.operator_addresses:
        try:
            return combine(_ask(router, timeout_s), "; ".join(problems), state)
        except (Unreachable, DeadlineExceeded) as error:
            problems.append(str(error))
    return combine(None, "; ".join(problems) or "no router is ready", state)


def _ask(address: str, timeout_s: float) -> ClusterStatus:
    client = operator_client(address)
    try:
        return client.status(timeout_s)
    except DeadlineExceeded:
        raise DeadlineExceeded(f"the router at {address} did not answer within {timeout_s:g} s") from None
    finally:
        client.close()


def combine(
    router: ClusterStatus | None,
    problem: str,
    state: ClusterState | None,
    start_time_of: Callable[[int], int] = start_time,
) -> ClusterView:
    """The router's status, corrected by the supervisor's state, which knows of deaths and restarts.

    `problem` says why no router answered, or why others than this one did not. `start_time_of`: as `start_time`; what
    the state says of processes that have ended is not shown.
    """
    nodes = {node.name: node for node in (router.nodes if router is not None else ())}
    process_problems = []
    gone = state.gone(start_time_of) if state is not None else ()
    for process in state.processes if state is not None else ():
        known = nodes.get(process.name)
        if process.name in gone:
            why = f"its process {process.pid} has ended, and the run directory does not say yet what follows"
            process_problems.append(f"{process.name}: {why}")
            process = replace(process, status="Lost", pid=0, incarnation="", last_exit=why)
        elif process.status != "Ready":
            restarts = f" after {process.restarts} restarts" if process.restarts else ""
            process_problems.append(f"{process.name} is {process.status}{restarts}")
        if process.role == "redis":
            continue
        if known is None:
            nodes[process.name] = _from_process(process, state)
        elif process.status == "CrashLoop":
            nodes[process.name] = replace(known, status="CrashLoop", detail=process.last_exit)
    health = router.health if router is not None else "unavailable"
    if health == "ok" and (process_problems or problem):
        health = "degraded"
    details = [part for part in (router.detail if router is not None else "", problem, *process_problems) if part]
    cluster = router.cluster if router is not None else state.cluster if state is not None else ""
    return ClusterView(cluster, health, "; ".join(details), sorted(nodes.values(), key=_order), state)


def _from_process(process: ProcessState, state: ClusterState | None) -> NodeStatus:
    return NodeStatus(
        name=process.name,
        role=process.role,
        # A process that is ready for its supervisor may not be known to a router yet.
        status="Starting" if process.status == "Ready" else process.status,
        incarnation=process.incarnation,
        address=process.address,
        pid=process.pid,
        model=state.model if state is not None else "",
        running=0,
        waiting=0,
        kv_usage=0.0,
        detail=process.last_exit,
    )


def _order(node: NodeStatus) -> tuple[int, str]:
    roles = ("encode", "prefill", "decode", "router")
    return (roles.index(node.role) if node.role in roles else len(roles)), node.name
