"""Which nodes get new requests, where nodes of one model's name would not all give the same tokens. Pure.

Nodes are of one version if they compute the same bits (`NodeDescription.bits`): weights, dtype, kernels, and whether
they are bit-exact. New requests go to one version alone, so that equal requests get equal answers. It is the one that
can serve as a pair of nodes, of these the one with the most nodes, and of equally many the one whose first node was
started before the others'. So a new version takes over when it has more nodes than the old one, and streams that the
old one began go on at its nodes. Within that version, nodes that can exchange KV with none of the other role get no new
requests either while a pair is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import groupby
from typing import NamedTuple

from baton.messages.kv_format import KVFormat
from baton.messages.node import NodeDescription, Role
from router.placement.placement import disagreement

_DECIDE_BITS = ("model_fingerprint", "dtype", "numerics", "bit_exact")


class Registered(NamedTuple):
    """A node that takes work."""

    node: NodeDescription
    start_number: int
    """`NodeRecord.start_number`, so that all routers agree and no clocks are compared. An older version has 0."""


def left_out(nodes: Sequence[Registered]) -> Mapping[str, str]:
    """Why nodes get no new requests, by incarnation. `nodes`: all that take work; those that get them are missing."""
    reasons: dict[str, str] = {}
    for _, same_model in groupby(sorted(nodes, key=_name_of_model), key=_name_of_model):
        reasons |= _left_out_of_model([*same_model])
    return reasons


def _name_of_model(one: Registered) -> str:
    return one.node.model


def _left_out_of_model(nodes: Sequence[Registered]) -> Mapping[str, str]:
    versions: dict[str, list[Registered]] = {}
    for one in nodes:
        versions.setdefault(one.node.bits, []).append(one)
    serving = [one.node for one in max(versions.values(), key=_rank)]
    others = [one.node for one in nodes if one.node.bits != serving[0].bits]
    return {**{node.incarnation: _other_bits(node, serving) for node in others}, **_without_partner(serving)}


def _rank(version: Sequence[Registered]) -> tuple[bool, int, int, str]:
    """The key of the version that gets new requests: the largest one."""
    nodes = [one.node for one in version]
    return bool(_paired_formats(nodes)), len(nodes), -min(one.start_number for one in version), nodes[0].bits


def _paired_formats(nodes: Sequence[NodeDescription]) -> Set[tuple[Role, KVFormat]]:
    """The formats of KV, each with the role, that fit the format of a node of the other role."""
    kinds = {(node.role, KVFormat.of(node)) for node in nodes}
    return {(role, ours) for role, ours in kinds for other, theirs in kinds if other is not role and ours.fits(theirs)}


def _without_partner(serving: Sequence[NodeDescription]) -> Mapping[str, str]:
    """The nodes that can exchange KV with none of the other role while others can, with the reason."""
    paired = _paired_formats(serving)
    alone = [node for node in serving if paired and (node.role, KVFormat.of(node)) not in paired]
    return {node.incarnation: disagreement(node, serving) for node in alone}


def _other_bits(node: NodeDescription, serving: Sequence[NodeDescription]) -> str:
    """Why a node gets no new requests while those of another version do."""
    first, count = serving[0], len(serving)
    names = [name for name in _DECIDE_BITS if getattr(node, name) != getattr(first, name)]
    here, there = (" ".join(f"{name}={getattr(one, name)}" for name in names) for one in (node, first))
    which = f"{first.node_id}, which serves" if count == 1 else f"the {count} nodes that serve"
    return f"computes other tokens than {which}: {node.node_id} [{here}], {first.node_id} [{there}]"
