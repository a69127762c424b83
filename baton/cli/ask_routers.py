"""Which router is asked, and which one's answer counts."""

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


def routers(address: str | None, run_dir: Path | None) -> Sequence[str]:
    """Where operators are heard; raises Unreachable."""
    found = [address] if address is not None else local_cluster(run_dir).state.operator_addresses
    if not found:
        raise Unreachable("no router is ready: see `baton status`")
    return found


def ask_routers(address: str | None, run_dir: Path | None, question: Callable[[OperatorClient], T]) -> T:
    """The first answer about a request; raises RequestNotFound when a router answers and none knows it."""
    from baton.client import OperatorClient

    trouble: BatonError | None = None
    for place in routers(address, run_dir):
        try:
            with closing(OperatorClient(place)) as client:
                return question(client)
        except BatonError as error:
            if not isinstance(trouble, RequestNotFound):
                trouble = error
    assert trouble is not None
    raise trouble


def at_a_router(address: str | None, run_dir: Path | None, do: Callable[[OperatorClient], T]) -> T:
    """Have it done by the first router that answers: any one will do, and doing it twice is doing it once."""
    from baton.client import OperatorClient

    trouble: BatonError | None = None
    for place in routers(address, run_dir):
        try:
            with closing(OperatorClient(place)) as client:
                return do(client)
        except (Unreachable, DeadlineExceeded) as error:
            trouble = trouble or error
    assert trouble is not None
    raise trouble


def ask_all_routers(
    address: str | None, run_dir: Path | None, question: Callable[[OperatorClient], T]
) -> tuple[list[T], list[str]]:
    """The answers, and what is wrong with the routers that gave none; raises Unreachable if nobody answers."""
    from baton.client import OperatorClient

    answers: list[T] = []
    problems: list[str] = []
    for place in routers(address, run_dir):
        try:
            with closing(OperatorClient(place)) as client:
                answers.append(question(client))
        except BatonError as error:
            problems.append(str(error))
    if not answers:
        raise Unreachable("; ".join(problems))
    return answers, problems
