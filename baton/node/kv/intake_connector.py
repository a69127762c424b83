"""The engine's side of a decode node's transfers: plans them for the scheduler, on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.connector import (
    NO_EXTERNAL_TOKENS,
    BlockFate,
    ExternalTokens,
)
from baton.engine.request import Request
from baton.engine.runner import KVLayout
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg
from baton.node.kv.intake import Intake
from kv_transfer.receiver.transfer_values import (
    TransferPlan,
    TransferStats,
)


class IntakeConnector:
    """The scheduler's interface to `Intake`: plans the transfers of decode legs. Belongs to the engine's thread."""

    def __init__(self, intake: Intake, layout: KVLayout, post: Callable[[Callable[[], None]], object]) -> None:
        """`post` runs a callable on the event loop, in order, from any thread (`loop.call_soon_threadsafe`)."""
        self._intake = intake
        self._layout = layout
        self._post = post
        self._expected: set[str] = set()
        """Requests whose KV is awaited, without reserved blocks yet."""
        self._planned: set[str] = set()
        """Requests with blocks that were reserved for a transfer."""

    @property
    def num_followed(self) -> int:
        """Number of live requests that this connector remembers."""
        return len(self._expected) + len(self._planned)

    def request_added(self, request: Request) -> None:
        if request.leg is not Leg.DECODE:
            return
        attempt, source = request.attempt, request.kv_source
        if source is None:
            raise ValueError(f"{request.request_id}: a decode leg must name its KV source")
        self._expected.add(request.request_id)
        self._post(lambda: self._intake.expect(attempt, source))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        # A prompt is read once: after a preemption its lease is over, and this node computes the lost KV itself.
        if request.leg is not Leg.DECODE or request.request_id in self._planned:
            return NO_EXTERNAL_TOKENS
        missing = request.num_submitted_tokens - num_computed_tokens
        if missing > 0 and not self._intake.may_plan(request.attempt):
            return ExternalTokens(None)
        return ExternalTokens(missing, load_async=True) if missing > 0 else NO_EXTERNAL_TOKENS

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        if request.kv_source is None:
            raise ValueError(f"{request.request_id}: a decode leg must name its KV source")
        num_local = request.num_submitted_tokens - num_external_tokens
        plan = TransferPlan(
            attempt=request.attempt,
            source=request.kv_source,
            num_prompt_tokens=request.num_submitted_tokens,
            block_ids=tuple(block_ids),
            first_block=num_local // self._layout.block_size * len(self._layout.groups),
        )
        self._expected.discard(request.request_id)
        self._planned.add(request.request_id)
        self._post(lambda: self._intake.plan(plan))

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        return

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        return self.request_finished(request, block_ids, transferring=True)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        if request.request_id in self._expected:
            self._expected.discard(request.request_id)
            attempt = request.attempt
            self._post(lambda: self._intake.abandon(attempt))
        if request.request_id not in self._planned:
            return BlockFate.FREE
        self._planned.discard(request.request_id)
        attempt = request.attempt
        if not transferring and self.stats(attempt) is not None:
            return BlockFate.FREE
        # Only the event loop knows whether a read has started. If none has, it answers `released` at once.
        self._post(lambda: self._intake.ended(attempt))
        return BlockFate.QUARANTINED

    def stats(self, attempt: AttemptKey) -> TransferStats | None:
        """The statistics of the attempt's transfer; None before the KV has arrived. May be called from any thread."""
        return self._intake.stats(attempt)
