"""Asking nodes what they are and do: all at once, and none that is silent hides the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineExceeded
from baton.messages.cluster import NodeStatus
from baton.messages.node_report import NodeReport
from baton.security.access import default_access


@dataclass(frozen=True, slots=True)
class Answers:
    """What nodes said."""

    reports: Mapping[str, NodeReport]
    """By incarnation."""
    problems: Mapping[str, str]
    """Why there is no report, by incarnation; one line each, with the node's name."""


def can_be_asked(node: NodeStatus) -> bool:
    """Whether it is a node with an address, and not known to be gone."""
    return node.role != "router" and bool(node.address and node.incarnation) and node.status != "Lost"


def ask_nodes(nodes: Sequence[NodeStatus], timeout_s: float) -> Answers:
    """`ask_all` for who has no loop."""
    import asyncio

    return asyncio.run(ask_all(nodes, timeout_s))


async def ask_all(nodes: Sequence[NodeStatus], timeout_s: float) -> Answers:
    """Ask each of them once; returns when all have answered or their time is over."""
    import asyncio

    found = await asyncio.gather(*(_ask(node, timeout_s) for node in nodes))
    said = {node.incarnation: answer for node, answer in zip(nodes, found, strict=True)}
    reports = {key: answer for key, answer in said.items() if isinstance(answer, NodeReport)}
    problems = {key: answer for key, answer in said.items() if isinstance(answer, str)}
    return Answers(reports, problems)


async def _ask(node: NodeStatus, timeout_s: float) -> NodeReport | str:
    from baton.wire.clients.node_client import NodeClient
    from baton.wire.credentials import Dialer

    client = NodeClient(node.address, Dialer.to_nodes(default_access.get()))
    try:
        report = await client.describe(timeout_s)
    except DeadlineExceeded:
        return f"{node.name} at {node.address} did not answer within {timeout_s:g} s"
    except BatonError as error:
        return f"{node.name}: {error}"
    finally:
        await client.close()
    if report.node.incarnation != node.incarnation:
        return f"{node.name}: {report.node.incarnation} answers at {node.address}, not {node.incarnation}"
    return report
