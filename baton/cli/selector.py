"""The option `-l`, which selects nodes by their properties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from baton.errors import UsageError
from baton.messages.operator import NodeStatus

_KEYS = ("name", "role", "status", "model")

SelectorOption = Annotated[
    str,
    typer.Option(
        "-l", "--selector", help="Only nodes with this property, such as role=prefill or status=Ready.", metavar="K=V"
    ),
]


def parse_selector(text: str) -> dict[str, str]:
    """The wanted value of each key. Raises UsageError for keys that no node has."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, mark, _ in pairs:
        if not mark or key not in _KEYS:
            raise UsageError(f"-l {text}: use name=, role=, status= or model=, separated by commas")
    return {key: value for key, _, value in pairs}


def select(nodes: Sequence[NodeStatus], wanted: dict[str, str]) -> list[NodeStatus]:
    """The nodes that have all the wanted values."""
    return [node for node in nodes if all(getattr(node, key) == value for key, value in wanted.items())]
