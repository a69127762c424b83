"""Which node has rows of an input, or makes them: the same encode node for the same input, which makes them once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from baton.messages.ids import Peer
from baton.messages.node import NodeDescription
from baton.values import value
from router.placement.placement import Placement

MOST_MORE = 2
"""The encode node of an input is passed over while it has more than so many inputs more than the least loaded one."""


@value(frozen=True, slots=True)
class LoadedEncoder:
    """An encode node that takes work."""

    node: NodeDescription
    load: int
    """The inputs that wait there, or are encoded or read."""


def encoder_for(digest: str, encoders: Sequence[LoadedEncoder]) -> NodeDescription | None:
    """The encode node for an input with this digest; None if there is none.

    The nodes have another order for each input (rendezvous hashing), by their names: so a node that comes, goes or
    starts anew changes the place of no input of the others.
    """
    most = min((encoder.load for encoder in encoders), default=0) + MOST_MORE
    able = [encoder.node for encoder in encoders if encoder.load <= most]
    return max(able, key=lambda node: _rank(digest, node), default=None)


def with_rows(
    placement: Placement,
    having: Sequence[tuple[str, Collection[str]]],
    attached: Mapping[str, NodeDescription],
    num_live_on: Mapping[str, int],
    encoders: Sequence[LoadedEncoder],
) -> Placement:
    """The placement with who has rows of the inputs of which the node that computes the prompt has none.

    An encode node that makes the same is named before others that have them, the least loaded of those before another
    one. Of what nobody has it makes rows. `having`: the digests of the inputs, each with the incarnations that have
    rows; `num_live_on`: the live requests of each attached node.
    """
    node = placement.prompt_node
    able = [each for each in encoders if each.node.rows_decided_by == node.rows_decided_by]
    held: list[tuple[str, Peer]] = []
    made: list[tuple[str, Peer]] = []
    for digest, incarnations in having:
        if node.incarnation in incarnations:
            continue
        others = [attached[incarnation] for incarnation in incarnations if incarnation in attached]
        holders = [other for other in others if other.rows_decided_by == node.rows_decided_by]
        encoder = encoder_for(digest, [each for each in able if each.node in holders] if holders else able)
        if encoder is not None:
            made.append((digest, encoder.as_peer))
        elif holders:
            least = min(holders, key=lambda other: (num_live_on.get(other.incarnation, 0), other.incarnation))
            held.append((digest, least.as_peer))
    return replace(placement, holders=held, encoders=made) if held or made else placement


def _rank(digest: str, node: NodeDescription) -> bytes:
    return hashlib.sha256(f"{digest} {node.node_id}".encode()).digest()
