"""Calls the routers of a cluster one after the other until the answer that counts, and its nodes all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from baton.cli.target import local_cluster, operator_client
from baton.errors import BatonError, DeadlineExceeded, RequestNotFound, Unreachable
from baton.messages.operator import NodeStatus
from baton.security.access import default_access

if TYPE_CHECKING:
    from baton.messages.node_report import NodeReport
    from baton.messages.operator import RequestRow
    from baton.wire.clients.operator_client import OperatorClient


T = TypeVar("T")


def router_addresses(address: str | None, run_dir: Path | None) -> Sequence[str]:
    """The operator addresses of the routers: `address`, or those of the cluster in `run_dir`. Raises Unreachable."""
    if address is not None:
        return [address]
    cluster = local_cluster(run_dir)
    if not cluster.state.operator_addresses:
        raise cluster.no_router_ready()
    return cluster.state.operator_addresses


def _answers(address: str | None, run_dir: Path | None, ask: Callable[[OperatorClient], T]) -> Iterator[T | BatonError]:
    """The answers of the routers, each asked when its answer is wanted, or the error of one that gave none."""
    for router in router_addresses(address, run_dir):
        try:
            with closing(operator_client(router)) as client:
                answer: T | BatonError = ask(client)
        except BatonError as error:
            answer = error
        yield answer


def ask_about_request(address: str | None, run_dir: Path | None, ask: Callable[[OperatorClient], T]) -> T:
    """The answer of the first router that knows the request. Raises RequestNotFound if routers answer and none does."""
    failure: BatonError | None = None
    for answer in _answers(address, run_dir, ask):
        if not isinstance(answer, BatonError):
            return answer
        if not isinstance(failure, RequestNotFound):
            failure = answer
    assert failure is not None
    raise failure


def ask_any_router(address: str | None, run_dir: Path | None, ask: Callable[[OperatorClient], T]) -> T:
    """The answer of the first router that answers. `ask` must be idempotent, since more than one may receive it."""
    failure: BatonError | None = None
    for answer in _answers(address, run_dir, ask):
        if not isinstance(answer, BatonError):
            return answer
        if not isinstance(answer, Unreachable | DeadlineExceeded):
            raise answer
        failure = failure or answer
    assert failure is not None
    raise failure


def ask_all_routers(
    address: str | None, run_dir: Path | None, ask: Callable[[OperatorClient], T]
) -> tuple[list[T], list[str]]:
    """The answers of all routers, and the errors of those that gave none. Raises Unreachable if no router answers."""
    answers: list[T] = []
    problems: list[str] = []
    for answer in _answers(address, run_dir, ask):
        if isinstance(answer, BatonError):
            problems.append(str(answer))
        else:
            answers.append(answer)
    if not answers:
        raise Unreachable("; ".join(problems))
    return answers, problems


def requests_of_all_routers(
    address: str | None, run_dir: Path | None, limit: int, timeout_s: float
) -> tuple[list[RequestRow], list[str]]:
    """The requests of all routers, and the errors of those that did not answer. Raises Unreachable if none did."""
    answers, problems = ask_all_routers(address, run_dir, lambda router: router.requests(limit, timeout_s=timeout_s))
    return [row for rows in answers for row in rows], problems


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

    from baton.messages.node_report import NodeReport

    replies = await asyncio.gather(*(_ask(node, timeout_s) for node in nodes))
    answers = {node.incarnation: answer for node, answer in zip(nodes, replies, strict=True)}
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
