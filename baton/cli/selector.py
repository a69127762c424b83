"""-l: which nodes a command is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from baton.cli.usage import ClientUsageError
from baton.messages.cluster import NodeStatus

_KEYS = ("name", "role", "status", "model")

SelectorOption = Annotated[
    str, typer.Option("-l", "--selector", help="Only nodes like this: role=prefill, status=Ready.", metavar="K=V")
]


def parse_selector(text: str) -> dict[str, str]:
    """Raises ClientUsageError for keys that no node has."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, mark, _ in pairs:
        if not mark or key not in _KEYS:
            raise ClientUsageError(f"-l {text}: use name=, role=, status= or model=, with commas between")
    return {key: value for key, _, value in pairs}


def select(nodes: Sequence[NodeStatus], wanted: dict[str, str]) -> list[NodeStatus]:
    """The nodes that have all of these values."""
    return [node for node in nodes if all(getattr(node, key) == value for key, value in wanted.items())]
