"""Calls the routers of a cluster, one after the other, until the answer that counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from baton.cli.target import local_cluster
from baton.errors import BatonError, DeadlineExceeded, RequestNotFound, Unreachable

if TYPE_CHECKING:
    from baton.client import OperatorClient

T = TypeVar("T")


def router_addresses(address: str | None, run_dir: Path | None) -> Sequence[str]:
    """The operator addresses of the routers: `address`, or those of the cluster in `run_dir`. Raises Unreachable."""
    if address is not None:
        return [address]
    cluster = local_cluster(run_dir)
    if not cluster.state.operator_addresses:
        raise cluster.no_router_ready()
    return cluster.state.operator_addresses


def ask_about_request(address: str | None, run_dir: Path | None, ask: Callable[[OperatorClient], T]) -> T:
    """The answer of the first router that knows the request. Raises RequestNotFound if routers answer and none does."""
    from baton.client import OperatorClient

    failure: BatonError | None = None
    for each in router_addresses(address, run_dir):
        try:
            with closing(OperatorClient(each)) as client:
                return ask(client)
        except BatonError as error:
            if not isinstance(failure, RequestNotFound):
                failure = error
    assert failure is not None
    raise failure


def ask_any_router(address: str | None, run_dir: Path | None, ask: Callable[[OperatorClient], T]) -> T:
    """The answer of the first router that answers. `ask` must be idempotent, since more than one may receive it."""
    from baton.client import OperatorClient

    failure: BatonError | None = None
    for each in router_addresses(address, run_dir):
        try:
            with closing(OperatorClient(each)) as client:
                return ask(client)
        except (Unreachable, DeadlineExceeded) as error:
            failure = failure or error
    assert failure is not None
    raise failure


def ask_all_routers(
    address: str | None, run_dir: Path | None, ask: Callable[[OperatorClient], T]
) -> tuple[list[T], list[str]]:
    """The answers of all routers, and the errors of those that gave none. Raises Unreachable if no router answers."""
    from baton.client import OperatorClient

    answers: list[T] = []
    problems: list[str] = []
    for each in router_addresses(address, run_dir):
        try:
            with closing(OperatorClient(each)) as client:
                answers.append(ask(client))
        except BatonError as error:
            problems.append(str(error))
    if not answers:
        raise Unreachable("; ".join(problems))
    return answers, problems
