"""The connector of an engine that offers blocks and reads blocks: each request's leg decides which half it concerns."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.connector import BlockFate, ExternalTokens, Pin
from baton.engine.request import Request
from baton.messages.ids import AttemptKey
from baton.node.kv.intake_connector import IntakeConnector
from baton.node.kv.offer_connector import OfferConnector


class BothHalves:
    """Passes each call to the half that it concerns. Belongs to the engine's thread."""

    def __init__(self, offering: OfferConnector, reading: IntakeConnector) -> None:
        self._offering = offering
        self._reading = reading

    @property
    def num_followed(self) -> int:
        """Number of live requests that the halves remember."""
        return self._offering.num_followed + self._reading.num_followed

    def request_added(self, request: Request) -> None:
        self._reading.request_added(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        return self._reading.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens:
            self._reading.update_state_after_alloc(request, block_ids, num_external_tokens)
        else:
            self._offering.update_state_after_alloc(request, block_ids, num_external_tokens)

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._offering.blocks_computed(request, block_ids, num_computed_tokens)

    def move_begun(self, request: Request) -> None:
        self._offering.move_begun(request)

    def move_ended(self, request_id: str, to: AttemptKey, why: str) -> None:
        self._offering.move_ended(request_id, to, why)

    def may_cut(self, request: Request) -> bool:
        return self._offering.may_cut(request)

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        return self._reading.load_failed(request, block_ids)

    def pinned(self, pin: Pin, block_ids: Sequence[int]) -> None:
        self._offering.pinned(pin, block_ids)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        # A leg has one fate: while blocks are read into it, none of them is offered.
        offered = self._offering.request_finished(request, block_ids, transferring)
        read = self._reading.request_finished(request, block_ids, transferring)
        return offered if read is BlockFate.FREE else read
