"""The interface of the movers of a node's parts: of the one in this process (`mover.py`), and of those in others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kv_transfer.backends.base import PeerMemory
from kv_transfer.mover.mover_events import MoverEvent
from kv_transfer.piece_plan import ReadRange

DeliverEvent = Callable[[MoverEvent], None]
"""Takes the events of a mover, in any thread, and returns at once."""


class PartMover(Protocol):
    """Reads blocks of peers into one memory. The methods and events are those of `Mover`, which says more."""

    @property
    def bytes_arrived(self) -> int: ...

    @property
    def arrived_at(self) -> float | None: ...

    @property
    def reads_in_flight(self) -> int: ...

    @property
    def stuck_reads(self) -> int: ...

    @property
    def fault(self) -> BaseException | None: ...

    def start(self) -> None:
        """Make the agent and return when it is up; raises what making it raised."""
        ...

    def published(self, name: str) -> PeerMemory:
        """This node's memory as it is published to readers, once the agent of that name is up."""
        ...

    def connect(self, peer: PeerMemory) -> None: ...

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> None: ...

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> None: ...

    def cancel(self, read_id: int) -> None: ...

    def disconnect(self, incarnation: str) -> None: ...

    def set_num_readers(self, num_readers: int) -> None: ...

    def stop(self) -> None: ...

    async def watch_turns(self) -> None: ...
