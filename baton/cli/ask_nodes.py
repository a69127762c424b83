"""Asks nodes for their reports, all at once, so that a node without an answer does not hide the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineExceeded
from baton.messages.node_report import NodeReport
from baton.messages.operator import NodeStatus
from baton.security.access import default_access


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """The reports of nodes, and the errors of those that gave none."""

    reports: Mapping[str, NodeReport]
    """By the incarnation of the node."""
    problems: Mapping[str, str]
    """Why there is no report, by the incarnation of the node: one line with its name."""


def can_be_asked(node: NodeStatus) -> bool:
    """Whether this is a node (no router) with an address that is not known to be lost."""
    return node.role != "router" and bool(node.address and node.incarnation) and node.status != "Lost"


def ask_nodes(nodes: Sequence[NodeStatus], timeout_s: float) -> NodeAnswers:
    """Like `ask_nodes_async`, in an event loop of its own."""
    import asyncio

    return asyncio.run(ask_nodes_async(nodes, timeout_s))


async def ask_nodes_async(nodes: Sequence[NodeStatus], timeout_s: float) -> NodeAnswers:
    """Ask each node once. Returns when all have answered or `timeout_s` is over."""
    import asyncio

    found = await asyncio.gather(*(_ask(node, timeout_s) for node in nodes))
    answers = {node.incarnation: answer for node, answer in zip(nodes, found, strict=True)}
    reports = {key: answer for key, answer in answers.items() if isinstance(answer, NodeReport)}
    problems = {key: answer for key, answer in answers.items() if isinstance(answer, str)}
    return NodeAnswers(reports, problems)


async def _ask(node: NodeStatus, timeout_s: float) -> NodeReport | str:
    """The report of one node, or why there is none."""
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
