"""Nodes in parts, whose memories hold some layers each, and the same blocks undivided, to compare with."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import threading
from collections.abc import Callable, Sequence

from baton.clock import SystemClock
from baton.engine.runner import ELEMENT_BYTES, KVLayout, KVMemory
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.backends.base import TransferBackend
from kv_transfer.layout import part_name
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.mover_server import MoverServer
from kv_transfer.mover.part_mover import DeliverEvent, PartMover
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.mover.remote_mover import RemoteMover, digests_of_parts
from tests.support.mover_events import WITHIN_S, MoverEvents

MakeBackend = Callable[[str, KVMemory], TransferBackend]


def new_memory(layout: KVLayout, num_blocks: int, num_probe_blocks: int = 0, layers: range | None = None) -> KVMemory:
    """Zeroed host memory for these layers of each block."""
    block_bytes = layout.block_bytes if layers is None else layout.part(layers).block_bytes
    buffer = (ctypes.c_char * ((num_blocks + num_probe_blocks) * block_bytes))()
    where = (ctypes.addressof(buffer), num_blocks, block_bytes, "DRAM", 0, buffer)
    return KVMemory(*where, num_probe_blocks=num_probe_blocks, layout=layout, layers=layers)


def layer_bytes(layout: KVLayout, layer: int) -> int:
    return layout.layer_elements(layer) * ELEMENT_BYTES[layout.dtype]


def layer_of(memory: KVMemory, block: int, group: int, layer: int) -> bytes:
    """The bytes of one layer of a block, which holds the layers of this group."""
    address, size = _place(memory, block, group, layer)
    return ctypes.string_at(address, size)


def copy_block(source: KVMemory, target: KVMemory, block: int, group: int) -> None:
    """Copy the layers that both memories hold."""
    assert source.layout is not None
    for layer in source.layout.groups[group].layers:
        if all(memory.layers is None or layer in memory.layers for memory in (source, target)):
            content = layer_of(source, block, group, layer)
            ctypes.memmove(_place(target, block, group, layer)[0], content, len(content))


def _place(memory: KVMemory, block: int, group: int, layer: int) -> tuple[int, int]:
    layout, held = memory.layout, memory.layers
    assert layout is not None
    before = [each for each in layout.groups[group].layers if each < layer and (held is None or each in held)]
    offset = sum(layer_bytes(layout, each) for each in before)
    return memory.base_address + block * memory.block_bytes + offset, layer_bytes(layout, layer)


class PartsNode:
    """A node in parts with a mover for each; block b holds the layers of group b % (number of groups)."""

    def __init__(
        self,
        incarnation: str,
        layout: KVLayout,
        layers: Sequence[range],
        num_blocks: int,
        make_backend: MakeBackend,
        remote: Sequence[int] = (),
        num_probe_blocks: int = 2,
    ) -> None:
        """`remote`: the parts that have their mover at the other end of a stream."""
        self.incarnation = incarnation
        self.layout = layout
        self.whole = new_memory(layout, num_blocks, num_probe_blocks)
        """The same blocks undivided; no mover knows it."""
        self.memories = [new_memory(layout, num_blocks, num_probe_blocks, each) for each in layers]
        self.events = MoverEvents()
        self._make_backend = make_backend
        self._streams: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        makers = [self._remote if n in remote else self._local for n in range(len(layers))]
        self.mover = PartsMover(layout, [OwnPart(each, makers[n](n)) for n, each in enumerate(layers)], self.events.put)
        self.mover.start()
        self.node = self.mover.published(incarnation)

    def digests(self, ids: Sequence[int], division: Division = WHOLE) -> Sequence[int]:
        """Digests of the parts, added up."""
        remote = [part for part in self.mover.parts if isinstance(part, RemoteMover)]
        local = [memory for memory, part in zip(self.memories, self.mover.parts, strict=True) if part not in remote]
        total = digests_of_parts(block_digests(local[0]), lambda: remote)(ids, division)
        # A real node has one part in its own process.
        for memory in local[1:]:
            total = [(a + b) % (1 << 64) for a, b in zip(total, block_digests(memory)(ids, division), strict=True)]
        return total

    def group_of(self, block: int) -> int:
        return block % len(self.layout.groups)

    def fill(self, seed: int) -> None:
        """Put random bytes into all blocks."""
        content = random.Random(seed).randbytes(self.whole.num_bytes)
        ctypes.memmove(self.whole.base_address, content, len(content))
        for memory in self.memories:
            for block in range(self.whole.num_blocks):
                copy_block(self.whole, memory, block, self.group_of(block))

    def gather(self) -> KVMemory:
        """The undivided blocks, as the parts hold them now."""
        for memory in self.memories:
            for block in range(self.whole.num_blocks):
                copy_block(memory, self.whole, block, self.group_of(block))
        return self.whole

    def _local(self, number: int) -> Callable[[DeliverEvent], PartMover]:
        memory, agent = self.memories[number], part_name(self.incarnation, number)

        def make(deliver: DeliverEvent) -> PartMover:
            make_backend = self._make_backend
            return Mover(lambda: make_backend(agent, memory), deliver, SystemClock(), digests=block_digests(memory))

        return make

    def _remote(self, number: int) -> Callable[[DeliverEvent], PartMover]:
        memory, agent = self.memories[number], part_name(self.incarnation, number)
        ours, theirs = socket.socketpair()
        server = MoverServer(theirs, memory, self._make_backend)
        self._streams += [ours, theirs]
        self._threads.append(threading.Thread(target=server.serve, daemon=True))
        self._threads[-1].start()
        assert memory.layers is not None
        layers = memory.layers
        return lambda deliver: RemoteMover(ours, agent, layers, self.layout, deliver, SystemClock())

    def close(self) -> None:
        self.mover.stop()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive()
        for stream in self._streams:
            stream.close()
