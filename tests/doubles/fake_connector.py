"""The fake of `KVConnector`: it answers as a test has configured it, and records how it was called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.engine.connector import NO_EXTERNAL_TOKENS, BlockFate, ExternalTokens, LostKV, Pin
from baton.engine.request import Request
from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import NULL_BLOCK
from baton.messages.node import Leg


@dataclass(frozen=True, slots=True)
class FakeLoad:
    """A load of KV from another node into a request's blocks, from position `num_local_tokens` on."""

    block_ids: Sequence[int]
    num_local_tokens: int
    num_external_tokens: int
    num_valid_blocks: int = 0
    """The number of leading blocks of a failed load that are valid: nothing writes to them any more."""


class FakeConnector:
    """Answers for both sides of a hand-off, without any transfer.

    A decode leg can load its whole prompt; it cannot be said yet while its id is in `unknown`, and it can load nothing
    while its id is in `unavailable`. The blocks of a request that ends while it loads are quarantined if `quarantine`
    is set. Those of a prefill leg that ends with computed blocks are leased if `lease` is set.
    """

    def __init__(self, *, lease: bool = True, quarantine: bool = True) -> None:
        self.lease = lease
        self.quarantine = quarantine
        self.unknown: set[str] = set()
        self.unavailable: set[str] = set()
        self.raise_in: str | None = None
        """The name of a method whose next call raises RuntimeError."""
        self.on_load: Callable[[FakeLoad], None] | None = None
        """Called when a load begins, to write its blocks at once."""
        self.added: list[str] = []
        """Requests that were added, in order."""
        self.begun: set[str] = set()
        """Prefill legs whose blocks are reserved."""
        self.loads: dict[str, FakeLoad] = {}
        """Loads that have begun and whose request has not ended, by request id."""
        self.pinned_blocks: dict[AttemptKey, Sequence[int]] = {}
        """The blocks of each pin."""
        self.offers: dict[str, tuple[Sequence[int], int]] = {}
        """For each prefill leg, by request id: its blocks, and the number of tokens that are computed in them."""
        self.moves: dict[str, int] = {}
        """For each request that was moved: how many tokens had KV when that began."""
        self.moves_ended: dict[AttemptKey, str] = {}
        """Why each move ended whose request went on, or was not there."""
        self.may_be_cut: set[str] = set()
        """Requests that are moved and of which the other node has nearly all."""
        self.leased: dict[str, tuple[Sequence[int], int]] = {}
        """Ended prefill legs, by request id: their blocks and computed tokens, until the test removes them."""
        self.quarantined: dict[str, FakeLoad] = {}
        """Loads whose request has ended and whose blocks are quarantined, until the test removes them."""
        self.finished: dict[str, tuple[Sequence[int], bool]] = {}
        """For each ended request: its blocks, and whether a transfer into them was still open."""

    def request_added(self, request: Request) -> None:
        self._maybe_raise("request_added")
        self.added.append(request.request_id)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        self._maybe_raise("get_num_new_matched_tokens")
        if request.request_id in self.unknown:
            return ExternalTokens(None)
        if request.held_prefix is not None and request.held_prefix.num_tokens > num_computed_tokens:
            return ExternalTokens(request.held_prefix.num_tokens - num_computed_tokens, load_async=True)
        if request.leg is not Leg.DECODE or request.request_id in self.unavailable:
            return NO_EXTERNAL_TOKENS
        missing = request.num_exchanged_tokens - num_computed_tokens
        return ExternalTokens(missing, load_async=True, seen_from=request.cut_by and request.num_submitted_tokens)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if request.leg is Leg.PREFILL and not num_external_tokens:
            self.begun.add(request.request_id)
            self._maybe_raise("update_state_after_alloc")
            return
        num_tokens = request.pulled_end or request.num_exchanged_tokens
        load = FakeLoad(tuple(block_ids), num_tokens - num_external_tokens, num_external_tokens)
        self.loads[request.request_id] = load
        if self.on_load is not None:
            self.on_load(load)
        self._maybe_raise("update_state_after_alloc")

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._maybe_raise("blocks_computed")
        self.offers[request.request_id] = (tuple(block_ids), num_computed_tokens)

    def move_begun(self, request: Request) -> None:
        self.moves[request.request_id] = request.seen_from

    def move_ended(self, request_id: str, to: AttemptKey, why: str) -> None:
        self.moves_ended[to] = why

    def may_cut(self, request: Request) -> bool:
        return request.request_id in self.may_be_cut

    def lose(self, request_id: str, cause: TransferCause, detail: str, num_valid_blocks: int = 0) -> LostKV:
        """The report of a load that has failed, after this number of leading blocks had arrived and was verified."""
        load = self.loads.get(request_id)
        if load is not None:
            self.loads[request_id] = replace(load, num_valid_blocks=num_valid_blocks)
        return LostKV(cause, detail, num_valid_blocks)

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        self._maybe_raise("load_failed")
        load = self.loads.pop(request.request_id)
        unwritten = (NULL_BLOCK,) * load.num_valid_blocks
        load = replace(load, block_ids=(*unwritten, *load.block_ids[load.num_valid_blocks :]))
        if not self.quarantine:
            return BlockFate.FREE
        self.quarantined[request.request_id] = load
        return BlockFate.QUARANTINED

    def pinned(self, pin: Pin, block_ids: Sequence[int]) -> None:
        self.pinned_blocks[pin.attempt] = tuple(block_ids)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        self.finished[request.request_id] = (tuple(block_ids), transferring)
        self._maybe_raise("request_finished")
        load = self.loads.pop(request.request_id, None)
        offer = self.offers.pop(request.request_id, None)
        if transferring:
            if not self.quarantine or load is None:
                return BlockFate.FREE
            self.quarantined[request.request_id] = load
            return BlockFate.QUARANTINED
        is_read = request.leg is Leg.PREFILL or request.move is not None
        if is_read and self.lease and offer is not None:
            self.leased[request.request_id] = (tuple(block_ids), offer[1])
            return BlockFate.LEASED
        return BlockFate.FREE

    def _maybe_raise(self, method: str) -> None:
        if self.raise_in == method:
            self.raise_in = None
            raise RuntimeError(f"the test made {method} fail")
