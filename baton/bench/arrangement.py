"""Arrangements: how a number of nodes is split into roles, as in `colocated:4`, `2p2d`, `conditional:2p2d`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest

_PAIRS = re.compile(r"(conditional:)?([1-9][0-9]*)p([1-9][0-9]*)d\Z")
_COLOCATED = re.compile(r"(?:colocated|c):?([1-9][0-9]*)\Z")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How many nodes of a cluster have which role."""

    prefill: int
    """Number of prefill nodes. 0: every node computes prompts and decodes."""
    decode: int
    is_conditional: bool = False
    """A decode node may compute a prompt itself, if the router finds that cheaper."""

    @staticmethod
    def parse(text: str) -> Arrangement:
        """Reads `colocated:N`, `xPyD` or `conditional:xPyD`; raises InvalidRequest."""
        word = text.strip().lower()
        if match := _COLOCATED.match(word):
            return Arrangement(0, int(match[1]))
        if match := _PAIRS.match(word):
            return Arrangement(int(match[2]), int(match[3]), match[1] is not None)
        raise InvalidRequest("--arrangement", f"{text!r} is neither colocated:N, xPyD nor conditional:xPyD")

    @staticmethod
    def of_nodes(text: str, nodes: int) -> Arrangement:
        """Like `parse`, but the number of nodes is known and may be left out of the text. Raises InvalidRequest."""
        word = text.strip().lower()
        if word == "colocated":
            return Arrangement(0, nodes)
        if word == "conditional":
            return Arrangement.conditional(nodes)
        arrangement = Arrangement.parse(word)
        if arrangement.num_nodes != nodes:
            raise InvalidRequest("--arrangement", f"{text!r} has {arrangement.num_nodes} nodes, not {nodes}")
        return arrangement

    @staticmethod
    def conditional(nodes: int) -> Arrangement:
        """Half of the nodes are prefill nodes, used if the router finds that cheaper."""
        prefill = max(1, nodes // 2)
        return Arrangement(prefill, nodes - prefill, is_conditional=True)

    @staticmethod
    def splits(nodes: int) -> list[Arrangement]:
        """All arrangements of this many nodes that are not conditional: colocated first, then every split."""
        return [Arrangement(0, nodes), *(Arrangement(count, nodes - count) for count in range(1, nodes))]

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode

    @property
    def is_colocated(self) -> bool:
        return not self.prefill

    @property
    def is_disaggregated(self) -> bool:
        """Whether every request uses two nodes."""
        return self.prefill > 0 and not self.is_conditional

    def __str__(self) -> str:
        if self.is_colocated:
            return f"colocated:{self.decode}"
        return f"{'conditional:' * self.is_conditional}{self.prefill}p{self.decode}d"


def chosen(names: Sequence[str], nodes: int) -> list[Arrangement]:
    """The named arrangements of this many nodes; without names, all possible ones. Raises InvalidRequest."""
    if nodes < 2:
        raise InvalidRequest("--nodes", "at least two are needed: one of each role")
    if not names:
        return [*Arrangement.splits(nodes), Arrangement.conditional(nodes)]
    arrangements = [Arrangement.of_nodes(name, nodes) for name in names]
    if len(set(arrangements)) < len(arrangements):
        raise InvalidRequest("--arrangement", "an arrangement is named twice")
    return arrangements
