"""A sender's memories in its welcome, as it writes them and as a reader finds them. Pure."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.runner import KVLayout
from kv_transfer.backends.base import PeerMemory
from kv_transfer.layout import LinkIdentity
from kv_transfer.link.link_messages import LinkWelcome, MemoryPart
from kv_transfer.peer_node import PeerNode, part_name


def welcome_of(identity: LinkIdentity, node: PeerNode, heartbeat_ms: int) -> LinkWelcome:
    """The welcome of a sender with these memories."""
    first, *others = node.parts
    return LinkWelcome(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        layout=identity.layout,
        agent_metadata=first.agent_metadata,
        base_address=first.base_address,
        num_blocks=first.num_blocks,
        memory_kind=first.kind,
        device_id=first.device_id,
        num_probe_blocks=first.num_probe_blocks,
        heartbeat_ms=heartbeat_ms,
        layers=first.layers,
        other_parts=[
            # A memory of all layers has no others beside it.
            MemoryPart(part.layers or range(0), part.agent_metadata, part.base_address, part.kind, part.device_id)
            for part in others
        ],
    )


def sender_of(welcome: LinkWelcome, layout: KVLayout | None) -> PeerNode:
    """The sender that sent a welcome. `layout`: of the reader's blocks, from which the sender's differ in nothing but
    their size; None: it is not known.

    Nothing but the number of its parts is checked here: `PartsMover.connect` refuses what does not fit.
    """
    theirs = replace(layout, block_size=welcome.layout.block_size) if layout is not None else None

    def block_bytes(layers: range | None) -> int:
        return welcome.layout.block_bytes if theirs is None or layers is None else theirs.part(layers).block_bytes

    first = PeerMemory(
        incarnation=welcome.incarnation,
        agent_metadata=welcome.agent_metadata,
        base_address=welcome.base_address,
        num_blocks=welcome.num_blocks,
        block_bytes=block_bytes(welcome.layers),
        kind=welcome.memory_kind,
        device_id=welcome.device_id,
        num_probe_blocks=welcome.num_probe_blocks,
        block_size=welcome.layout.block_size,
        layers=welcome.layers,
    )
    others = (
        replace(
            first,
            incarnation=part_name(welcome.incarnation, number),
            agent_metadata=part.agent_metadata,
            base_address=part.base_address,
            block_bytes=block_bytes(part.layers),
            kind=part.memory_kind,
            device_id=part.device_id,
            layers=part.layers,
        )
        for number, part in enumerate(welcome.other_parts, 1)
    )
    return PeerNode(welcome.incarnation, (first, *others))
