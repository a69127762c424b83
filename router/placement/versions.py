"""Which nodes get new requests, where nodes of one model's name would not all give the same tokens. Pure.

Nodes are of one version if they compute the same bits (`NodeDescription.bits`): weights, dtype, kernels, and whether
they are bit-exact. New requests go to one version alone, so that equal requests get equal answers. It is the one with
most nodes, of equally large ones one that can serve as a pair of nodes, and of these the one whose first node was
started before the others'. (Where requests are served by pairs alone, having one comes first.) So a new version takes
over when it has more nodes than the old one, and streams that the old one began go on at its nodes. It takes over once
it has ranked first for `PASSES_OVER_AFTER_S` without interruption, so that a short loss of nodes changes nothing; at
once if the old one can serve nothing any more. Within that version, nodes that can exchange KV with none of the other
role get no new requests either while a pair is left.

Where the operator lets nodes pair across numerics (`across` below), all nodes that can exchange KV are of one version,
whatever bits they compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import NamedTuple

from baton.messages.kv_cache import KVFormat
from baton.messages.node import NodeDescription, Role
from router.placement.placement import disagreement

PASSES_OVER_AFTER_S = 10.0
"""For so long another version must rank before the one that serves until new requests pass over to it: longer than a
connection takes to come back, and short beside the start of a node."""
_DECIDE_BITS = ("model_fingerprint", "dtype", "numerics", "bit_exact")


def version_of(node: NodeDescription, *, across: bool) -> str:
    """The name of the version that a node is of."""
    return node.family or node.bits if across else node.bits


class Registered(NamedTuple):
    """A node that takes work."""

    node: NodeDescription
    start_number: int
    """`NodeRecord.start_number`, so that all routers agree and no clocks are compared. An older version has 0."""


class Serving(NamedTuple):
    """The version of a model that gets new requests. Seconds on the router's clock."""

    version: str
    """See `version_of`."""
    settles_at: float
    """Until then it is the version that ranks first at each moment, since the nodes are still coming: they do so one by
    one when a router has started, and when a version that was gone comes back."""
    challenger: str = ""
    """The version that ranks before it; empty: none does."""
    passes_at: float = math.inf
    """When new requests pass over to the challenger, if it ranks first until then."""


def serving_versions(
    nodes: Sequence[Registered],
    before: Mapping[str, Serving],
    now: float,
    *,
    needs_pairs: bool = False,
    across: bool = False,
) -> Mapping[str, Serving]:
    """The version of each model that gets new requests, by the model's name.

    `nodes`: all that take work. `before`: what this returned last. `needs_pairs`: requests are served by pairs alone.
    `across`: nodes pair across numerics.
    """
    return {
        model: _serving(_versions(same_model, across), before.get(model), now, needs_pairs, across)
        for model, same_model in _models(nodes)
    }


def left_out(nodes: Sequence[Registered], serving: Mapping[str, Serving], *, across: bool = False) -> Mapping[str, str]:
    """Why nodes get no new requests, by incarnation. `nodes`: all that take work; those that get them are missing.

    `serving`: what `serving_versions` has returned for these nodes. `across`: as there.
    """
    reasons: dict[str, str] = {}
    for model, same_model in _models(nodes):
        versions = _versions(same_model, across)
        first = [registered.node for registered in versions.pop(serving[model].version)]
        reasons |= {
            registered.node.incarnation: _other_bits(registered.node, first)
            for version in versions.values()
            for registered in version
        }
        reasons |= _without_partner(first, across)
    return reasons


def _models(nodes: Sequence[Registered]) -> Iterator[tuple[str, Sequence[Registered]]]:
    """Each model's name and its nodes."""
    for model, same_model in groupby(sorted(nodes, key=_name_of_model), key=_name_of_model):
        yield model, [*same_model]


def _name_of_model(registered: Registered) -> str:
    return registered.node.model


def _versions(nodes: Sequence[Registered], across: bool) -> dict[str, list[Registered]]:
    """The nodes of each version of a model."""
    versions: dict[str, list[Registered]] = {}
    for registered in nodes:
        versions.setdefault(version_of(registered.node, across=across), []).append(registered)
    return versions


def _serving(
    versions: Mapping[str, Sequence[Registered]],
    before: Serving | None,
    now: float,
    needs_pairs: bool,
    across: bool,
) -> Serving:
    """The version of a model that serves, of which these are the versions."""
    if len(versions) == 1 and before is not None and before.version in versions:
        return before._replace(challenger="", passes_at=math.inf)
    ranks = {name: _rank(version, needs_pairs, across) for name, version in versions.items()}
    first = max(ranks, key=ranks.__getitem__)
    can_serve = before is not None and before.version in ranks and ranks[before.version][0] == ranks[first][0]
    if before is None or not can_serve:
        return Serving(first, now + PASSES_OVER_AFTER_S)
    if first == before.version or now < before.settles_at:
        return Serving(first, before.settles_at)
    passes_at = before.passes_at if first == before.challenger else now + PASSES_OVER_AFTER_S
    if now >= passes_at:
        return Serving(first, before.settles_at)
    return before._replace(challenger=first, passes_at=passes_at)


def _rank(version: Sequence[Registered], needs_pairs: bool, across: bool) -> tuple[bool, int, bool, int, str]:
    """The key of the version that ranks first: the largest one. Begins with whether it can serve anything."""
    nodes = [registered.node for registered in version]
    has_pair = bool(_paired_formats(nodes, across))
    oldest = min(registered.start_number for registered in version)
    return has_pair or not needs_pairs, len(nodes), has_pair, -oldest, nodes[0].bits


def _paired_formats(nodes: Sequence[NodeDescription], across: bool) -> Set[tuple[Role, KVFormat]]:
    """The formats of KV, each with the role, that fit the format of a node of the other role."""
    kinds = {(node.role, KVFormat.of(node)) for node in nodes}
    return {
        (role, ours)
        for role, ours in kinds
        for other_role, theirs in kinds
        if other_role is not role and ours.fits(theirs, across=across)
    }


def _without_partner(serving: Sequence[NodeDescription], across: bool) -> Mapping[str, str]:
    """The nodes that can exchange KV with none of the other role while others can, with the reason."""
    paired = _paired_formats(serving, across)
    alone = [node for node in serving if paired and (node.role, KVFormat.of(node)) not in paired]
    return {node.incarnation: disagreement(node, serving, across=across) for node in alone}


def _other_bits(node: NodeDescription, serving: Sequence[NodeDescription]) -> str:
    """Why a node gets no new requests while those of another version do."""
    first, count = serving[0], len(serving)
    names = [name for name in _DECIDE_BITS if getattr(node, name) != getattr(first, name)]
    here, there = (" ".join(f"{name}={getattr(description, name)}" for name in names) for description in (node, first))
    which = f"{first.node_id}, which serves" if count == 1 else f"the {count} nodes that serve"
    return f"computes other tokens than {which}: {node.node_id} [{here}], {first.node_id} [{there}]"
