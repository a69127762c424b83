"""The engine's side of a node's transfers: plans them for the scheduler, on the engine's thread."""

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
from baton.messages.node import HeldPrefix, Leg
from baton.node.kv.intake import Intake
from kv_transfer.receiver.transfer_values import (
    TransferPlan,
    TransferStats,
)

_MAX_PULLS = 4
"""Pulls of a node that may be open at once: more would share its bandwidth, and hold blocks for longer."""


class IntakeConnector:
    """The scheduler's interface to `Intake`: plans the transfers of decode legs, and pulls. Belongs to the engine's
    thread."""

    def __init__(self, intake: Intake, layout: KVLayout, post: Callable[[Callable[[], None]], object]) -> None:
        """`post` runs a callable on the event loop, in order, from any thread (`loop.call_soon_threadsafe`)."""
        self._intake = intake
        self._layout = layout
        self._post = post
        self._expected: set[str] = set()
        """Requests whose KV is awaited, without reserved blocks yet."""
        self._planned: set[str] = set()
        """Requests with blocks that were reserved for a transfer."""
        self._pulling: set[str] = set()
        """The requests in either set that pull."""

    @property
    def num_followed(self) -> int:
        """Number of live requests that this connector remembers."""
        return len(self._expected) + len(self._planned)

    def request_added(self, request: Request) -> None:
        held = request.held_prefix
        if held is not None and not self._intake.holders.may_pull(held.peer.incarnation):
            self._intake.holders.meet(held.peer)
        if request.leg is not Leg.DECODE:
            return
        attempt, source = request.attempt, request.kv_source
        if source is None:
            raise ValueError(f"{request.request_id}: a decode leg must name its KV source")
        self._expected.add(request.request_id)
        self._post(lambda: self._intake.expect(attempt, source))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        if request.held_prefix is not None:
            return self._tokens_to_pull(request, request.held_prefix, num_computed_tokens)
        # A prompt is read once: after a preemption its lease is over, and this node computes the lost KV itself.
        if request.leg is not Leg.DECODE or request.request_id in self._planned:
            return NO_EXTERNAL_TOKENS
        source, missing = request.kv_source, request.num_exchanged_tokens - num_computed_tokens
        if source is not None and not request.kv_bits and self._intake.has_other_numerics(source.incarnation):
            # Its blocks would be cached as if this node had computed them.
            raise ValueError(f"{source.node_id} computes under other numerics, and the leg's router does not say so")
        if missing > 0 and not self._intake.may_plan(request.attempt):
            return ExternalTokens(None)
        if request.cut_by:
            return self._tokens_to_take_over(request, missing)
        return ExternalTokens(missing, load_async=True) if missing > 0 else NO_EXTERNAL_TOKENS

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        size, source, num_tokens = self._layout.block_size, request.kv_source, request.num_exchanged_tokens
        if request.held_prefix is not None:
            source, num_tokens = request.held_prefix.peer, request.pulled_end
        if source is None:
            raise ValueError(f"{request.request_id}: a decode leg must name its KV source")
        plan = TransferPlan(
            attempt=request.attempt,
            source=source,
            num_prompt_tokens=num_tokens,
            block_ids=tuple(block_ids),
            first_block=(num_tokens - num_external_tokens) // size * len(self._layout.groups),
            is_pull=request.held_prefix is not None,
            num_known_tokens=request.num_submitted_tokens if request.cut_by else 0,
        )
        self._expected.discard(request.request_id)
        self._planned.add(request.request_id)
        self._post(lambda: self._intake.plan(plan))

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        return

    def _tokens_to_take_over(self, request: Request, missing: int) -> ExternalTokens:
        """All that a stream which is moved here may have when it is cut. Raises ValueError if its node has other tokens
        than its router says."""
        seen_from = self._intake.num_kept(request.attempt) or 0
        if not request.num_submitted_tokens - 1 <= seen_from < request.cut_by:
            raise ValueError(f"a stream of {request.num_submitted_tokens} tokens has KV of {seen_from} on its node")
        return ExternalTokens(missing, load_async=True, seen_from=seen_from)

    def _tokens_to_pull(self, request: Request, held: HeldPrefix, num_computed_tokens: int) -> ExternalTokens:
        """What another node keeps for the request beyond what is here; not known yet until it has said that, for which
        a link to it may have to be opened."""
        size, attempt, peer = self._layout.block_size, request.attempt, held.peer
        if request.request_id in self._expected:
            num_held = self._intake.num_kept(attempt)
            if num_held is None or num_held > num_computed_tokens:
                return ExternalTokens(num_held and num_held - num_computed_tokens, load_async=True)
            self._expected.discard(request.request_id)
            self._pulling.discard(request.request_id)
            self._post(lambda: self._intake.abandon(attempt))
            return NO_EXTERNAL_TOKENS
        end = min(held.num_tokens, request.most_cached_tokens, len(request.block_hashes) * size) // size
        if end * size <= num_computed_tokens or len(self._pulling) >= _MAX_PULLS:
            return NO_EXTERNAL_TOKENS
        if not self._intake.holders.may_pull(peer.incarnation):
            return ExternalTokens(None) if self._intake.holders.is_meeting(peer.incarnation) else NO_EXTERNAL_TOKENS
        self._expected.add(request.request_id)
        self._pulling.add(request.request_id)
        keys = tuple(request.block_hashes[:end])
        self._post(lambda: self._intake.expect(attempt, peer, keys))
        return ExternalTokens(None)

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        # The KV of a pull that has arrived is proven, and no read writes to these blocks.
        is_over = request.request_id in self._pulling and self.stats(request.attempt) is not None
        return self.request_finished(request, block_ids, transferring=not is_over)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        if request.request_id in self._expected:
            self._expected.discard(request.request_id)
            self._pulling.discard(request.request_id)
            attempt = request.attempt
            self._post(lambda: self._intake.abandon(attempt))
        if request.request_id not in self._planned:
            return BlockFate.FREE
        self._planned.discard(request.request_id)
        self._pulling.discard(request.request_id)
        attempt = request.attempt
        if not transferring and self.stats(attempt) is not None:
            return BlockFate.FREE
        # Only the event loop knows whether a read has started. If none has, it answers `released` at once.
        self._post(lambda: self._intake.ended(attempt))
        return BlockFate.QUARANTINED

    def stats(self, attempt: AttemptKey) -> TransferStats | None:
        """The statistics of the attempt's transfer; None before the KV has arrived. May be called from any thread."""
        return self._intake.stats(attempt)
