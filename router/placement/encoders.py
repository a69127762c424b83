"""Which encode node makes rows of an input: the same one for the same input, so that it makes them once. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from baton.messages.node import NodeDescription
from baton.values import value

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


def _rank(digest: str, node: NodeDescription) -> bytes:
    return hashlib.sha256(f"{digest} {node.node_id}".encode()).digest()
