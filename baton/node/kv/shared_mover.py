"""One mover for both halves of a node: there is one transfer agent over the node's memory."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.mover.part_mover import BlockFilled, DeliverEvent, FillFailed, MoverEvent
from kv_transfer.mover.parts_mover import PartsMover


class SharedMover:
    """Gives each of the mover's events to the half that asked for it.

    A half names no read and no filling as the other one does: a sender fills blocks with positive ids, and reads
    nothing; a reader fills blocks for its probes with their negative ids.
    """

    def __init__(self, make_mover: Callable[[DeliverEvent], PartsMover]) -> None:
        """`make_mover` gets the callable that takes the mover's events."""
        self._mover = make_mover(self._route)
        self._to_sender: DeliverEvent
        self._to_reader: DeliverEvent

    def of_sender(self, deliver: DeliverEvent) -> PartsMover:
        """The mover, for the half that offers blocks; `deliver` takes its events, in any thread."""
        self._to_sender = deliver
        return self._mover

    def of_reader(self, deliver: DeliverEvent) -> PartsMover:
        """The mover, for the half that reads blocks; `deliver` takes its events, in any thread."""
        self._to_reader = deliver
        return self._mover

    def _route(self, event: MoverEvent) -> None:
        is_senders = isinstance(event, BlockFilled | FillFailed) and event.fill_id > 0
        (self._to_sender if is_senders else self._to_reader)(event)
