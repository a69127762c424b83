"""Ways to use so many nodes, live or simulated: `colocated:4`, `2p2d`, `conditional:2p2d`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest

_PAIRS = re.compile(r"(conditional:)?([1-9][0-9]*)p([1-9][0-9]*)d\Z")
_COLOCATED = re.compile(r"(?:colocated|c):?([1-9][0-9]*)\Z")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A cluster's nodes."""

    prefill: int
    """0: every node does both."""
    decode: int
    is_conditional: bool = False
    """A decode node may compute a prompt itself, if the router finds that cheaper."""

    @staticmethod
    def parse(text: str) -> Arrangement:
        """Raises InvalidRequest."""
        word = text.strip().lower()
        if found := _COLOCATED.match(word):
            return Arrangement(0, int(found[1]))
        if found := _PAIRS.match(word):
            return Arrangement(int(found[2]), int(found[3]), found[1] is not None)
        raise InvalidRequest("--arrangement", f"{text!r} is neither colocated:N, xPyD nor conditional:xPyD")

    @staticmethod
    def of_nodes(text: str, nodes: int) -> Arrangement:
        """As `parse`, of so many nodes: then their number may be left out. Raises InvalidRequest."""
        word = text.strip().lower()
        if word == "colocated":
            return Arrangement(0, nodes)
        if word == "conditional":
            return Arrangement.conditional(nodes)
        found = Arrangement.parse(word)
        if found.num_nodes != nodes:
            raise InvalidRequest("--arrangement", f"{text!r} are {found.num_nodes} nodes, not {nodes}")
        return found

    @staticmethod
    def conditional(nodes: int) -> Arrangement:
        """Half of them for prompts, if the router finds that worth it."""
        prefill = max(1, nodes // 2)
        return Arrangement(prefill, nodes - prefill, is_conditional=True)

    @staticmethod
    def splits(nodes: int) -> list[Arrangement]:
        """All of so many nodes: colocated first, then every split."""
        return [Arrangement(0, nodes), *(Arrangement(count, nodes - count) for count in range(1, nodes))]

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode

    @property
    def is_colocated(self) -> bool:
        return not self.prefill

    @property
    def is_disaggregated(self) -> bool:
        """Every request goes over two nodes."""
        return self.prefill > 0 and not self.is_conditional

    def __str__(self) -> str:
        if self.is_colocated:
            return f"colocated:{self.decode}"
        return f"{'conditional:' * self.is_conditional}{self.prefill}p{self.decode}d"


def chosen(names: Sequence[str], nodes: int) -> list[Arrangement]:
    """By name, of so many nodes; no name means all that there are. Raises InvalidRequest."""
    if nodes < 2:
        raise InvalidRequest("--nodes", "two at least: one of each kind")
    if not names:
        return [*Arrangement.splits(nodes), Arrangement.conditional(nodes)]
    found = [Arrangement.of_nodes(name, nodes) for name in names]
    if len(set(found)) < len(found):
        raise InvalidRequest("--arrangement", "one is named twice")
    return found
