"""The movers of a node, from what its runner says about the parts of its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from baton.clock import Clock
from baton.engine.runner import ModelRunner, RemotePart
from baton.runner.blocks.block_digests import BlockDigests, block_digests
from kv_transfer.mover.mover import STALL_S
from kv_transfer.mover.part_mover import DeliverEvent, PartMover
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.peer_node import part_name
from kv_transfer.remote.remote_mover import RemoteMover, digests_of_parts


def mover_of_node(
    runner: ModelRunner,
    incarnation: str,
    make_mover: Callable[[str, DeliverEvent], PartMover],
    deliver: DeliverEvent,
    clock: Clock,
    stall_s: float = STALL_S,
) -> PartsMover:
    """The mover of all parts of a node's KV cache. `make_mover` makes that of the part in this process, with an agent
    of that name.

    Raises ConfigError if the parts don't have each layer once.
    """
    own_layers = runner.memory.layers

    def make(number: int, part: RemotePart | None, deliver: DeliverEvent) -> PartMover:
        name = part_name(incarnation, number)
        if part is None:
            return make_mover(name, deliver)
        return RemoteMover(part.socket, name, part.layers, runner.layout, deliver, clock, stall_s)

    here = (range(runner.layout.num_layers) if own_layers is None else own_layers, None)
    parts = sorted([here, *((part.layers, part) for part in runner.remote_parts)], key=lambda part: part[0].start)
    movers = [OwnPart(layers, partial(make, number, part)) for number, (layers, part) in enumerate(parts)]
    return PartsMover(runner.layout, movers, deliver)


def digests_of_node(runner: ModelRunner, movers: Callable[[], Sequence[PartMover]]) -> BlockDigests:
    """The digests of a node's blocks, of all their layers. `movers`: the movers of its parts, once there are some."""
    here = block_digests(runner.memory)
    if not runner.remote_parts:
        return here
    return digests_of_parts(here, lambda: [part for part in movers() if isinstance(part, RemoteMover)])
