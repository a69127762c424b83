"""How many nodes do what: `colocated:4`, `2p2d`, `conditional:2p2d`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.errors import InvalidRequest

_PAIRS = re.compile(r"(conditional:)?([1-9][0-9]*)p([1-9][0-9]*)d\Z")
_COLOCATED = re.compile(r"(?:colocated|c):?([1-9][0-9]*)\Z")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A cluster's nodes."""

    prefill: int
    decode: int
    is_conditional: bool = False
    """A decode node may compute a short prompt itself, if the router finds that cheaper."""

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
    def splits(nodes: int) -> list[Arrangement]:
        """All of so many nodes: colocated first, then every split."""
        return [Arrangement(0, nodes), *(Arrangement(count, nodes - count) for count in range(1, nodes))]

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        if not self.prefill:
            return f"colocated:{self.decode}"
        return f"{'conditional:' * self.is_conditional}{self.prefill}p{self.decode}d"
