"""Ways to use so many nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest

COLOCATED = "colocated"
CONDITIONAL = "conditional"
_SPLIT = re.compile(r"(\d+)p(\d+)d\Z")
_ANY_PROMPT = str(1 << 30)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Nodes and their roles."""

    name: str
    prefill: int
    decode: int
    flags: tuple[str, ...]
    """Of `baton up`, beside the numbers of nodes."""

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode

    @property
    def is_disaggregated(self) -> bool:
        """Every request goes over two nodes."""
        return _SPLIT.match(self.name) is not None

    def words(self) -> list[str]:
        """For `baton up`."""
        return ["--prefill", str(self.prefill), "--decode", str(self.decode), *self.flags]


def colocated(nodes: int) -> Arrangement:
    """Every node does both."""
    return Arrangement(COLOCATED, 0, nodes, ("--placement", "cost", "--max-local-prefill-tokens", _ANY_PROMPT))


def split(prefill: int, decode: int) -> Arrangement:
    """Every prompt is computed on a prefill node and generated from on a decode node."""
    flags = ("--placement", "cost", "--require-disaggregation", "on")
    return Arrangement(f"{prefill}p{decode}d", prefill, decode, flags)


def conditional(nodes: int) -> Arrangement:
    """Both kinds of nodes; the router hands over what it is worth it for. A decode node may take any prompt itself."""
    prefill = max(1, nodes // 2)
    flags = ("--placement", "cost", "--max-local-prefill-tokens", _ANY_PROMPT)
    return Arrangement(CONDITIONAL, prefill, nodes - prefill, flags)


def splits(nodes: int) -> list[Arrangement]:
    """Every way to have both kinds."""
    return [split(prefill, nodes - prefill) for prefill in range(1, nodes)]


def chosen(names: Sequence[str], nodes: int) -> list[Arrangement]:
    """By name: colocated, conditional, xPyD; none means all that there are. Raises InvalidRequest."""
    if nodes < 2:
        raise InvalidRequest("--nodes", "two at least: one of each kind")
    if not names:
        return [colocated(nodes), *splits(nodes), conditional(nodes)]
    found = [_named(name, nodes) for name in names]
    if len({one.name for one in found}) < len(found):
        raise InvalidRequest("--arrangement", "one is named twice")
    return found


def _named(name: str, nodes: int) -> Arrangement:
    if name == COLOCATED:
        return colocated(nodes)
    if name == CONDITIONAL:
        return conditional(nodes)
    match = _SPLIT.match(name.lower())
    if match is None:
        raise InvalidRequest("--arrangement", f"{name!r} is not colocated, conditional or like 1p1d")
    prefill, decode = int(match[1]), int(match[2])
    if prefill < 1 or decode < 1 or prefill + decode != nodes:
        raise InvalidRequest("--arrangement", f"{name!r} are not {nodes} nodes, of both kinds")
    return split(prefill, decode)
