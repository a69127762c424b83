"""The engine's side of a node's offers: notes what each step computed, on the engine's thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.engine.connector import NO_EXTERNAL_TOKENS, BlockFate, ExternalTokens, Pin
from baton.engine.request import Request
from baton.engine.runner import KVLayout
from baton.errors import BatonError, TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, Outcome
from baton.node.kv.offering import Offering
from kv_transfer.digests import BlockName, block_names, names_of_cached
from kv_transfer.link.link_messages import Closing

_log = logging.getLogger(__name__)
_COMPUTED = frozenset({Outcome.HANDED_OFF, Outcome.STOP, Outcome.LENGTH})
_PER_STEP = 64
"""Stripes of which digests are computed after one step, while all streams wait: of those that are moved, and of what is
pulled."""


@dataclass(slots=True)
class _OfferProgress:
    """How much of a request was offered."""

    attempt: AttemptKey
    """Under which it is offered."""
    num_blocks: int
    """Number of its blocks that were offered."""
    num_preemptions: int
    """How often the request had been preempted when its first block was offered."""
    digest_parts: int
    """How many digests each of its blocks gets."""
    was_lent: bool = False
    """Whether blocks of it were offered in an earlier move."""
    is_withdrawn: bool = False


@dataclass(slots=True)
class _PinProgress:
    """How far the digests of what is pulled are told: those of the first `num_blocks` blocks are."""

    pin: Pin
    block_ids: Sequence[int]
    num_blocks: int = 0


class OfferConnector:
    """Reports to `Offering` what the engine computes for prefill legs and for streams that are moved. Belongs to the
    engine's thread."""

    def __init__(
        self,
        handoff: Offering,
        layout: KVLayout,
        post: Callable[[Callable[[], None]], object],
        post_now: Callable[[Callable[[], None]], object],
        after_step: Callable[[Callable[[], None]], None],
        per_step: int = _PER_STEP,
    ) -> None:
        """`post` and `post_now` run a callable on the event loop, in order: `post` once the step's tokens are on their
        way, `post_now` at once, so that the other node can reserve blocks while the step computes. `after_step` calls
        one on this thread, once everything is posted and before anything else is computed. `per_step`: stripes of
        streams that are moved that are offered after one step, and of what is pulled of which digests are computed.
        """
        self._handoff = handoff
        self._layout = layout
        self._post = post
        self._post_now = post_now
        self._after_step = after_step
        self._per_step = per_step * len(layout.groups)
        """The same in blocks."""
        self._num_moved_in_step = 0
        """Blocks of streams that are moved that were offered since the last step."""
        self._pins: deque[_PinProgress] = deque()
        """What is pulled of which not all digests are computed, the earliest first."""
        self._offered: dict[str, _OfferProgress] = {}
        """By request id as the engine knows it."""

    @property
    def num_followed(self) -> int:
        """Number of live requests that this connector remembers."""
        return len(self._offered)

    def request_added(self, request: Request) -> None:
        return

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        return NO_EXTERNAL_TOKENS

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if request.leg is Leg.PREFILL:
            attempt = request.attempt
            self._post_now(lambda: self._handoff.begun(attempt))

    def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        offered = self._offer_progress(request)
        is_moved = request.move is not None
        # The end of the prompt comes with `request_finished` in the same step, in one offer with the first token.
        is_last = not is_moved and num_computed_tokens >= request.num_submitted_tokens
        if offered is None or offered.is_withdrawn or is_last:
            return
        end = num_computed_tokens // self._layout.block_size * len(self._layout.groups)
        if is_moved:
            end = min(end, offered.num_blocks + self._per_step - self._num_moved_in_step)
        if end > offered.num_blocks:
            first, offered.num_blocks = offered.num_blocks, end
            if is_moved:
                self._note_moved(end - first)
            self._offer(request, offered, first, tuple(block_ids[first:end]))

    def _note_moved(self, num_blocks: int) -> None:
        if not self._num_moved_in_step:
            self._after_step(self._step_ended)
        self._num_moved_in_step += num_blocks

    def _step_ended(self) -> None:
        self._num_moved_in_step = 0

    def move_begun(self, request: Request) -> None:
        assert request.move is not None
        handoff, to, num_tokens = self._handoff, request.move.to, request.seen_from
        earlier = self._offered.get(request.request_id)
        was_lent = earlier is not None and (earlier.was_lent or earlier.num_blocks > 0)
        progress = _OfferProgress(to, 0, request.num_preemptions, digest_parts=1, was_lent=was_lent)
        self._offered[request.request_id] = progress
        self._post_now(lambda: handoff.move_begun(to, num_tokens))

    def move_ended(self, request_id: str, to: AttemptKey, why: str) -> None:
        handoff, offered = self._handoff, self._offered.get(request_id)
        detail = f"the stream stays where it is: {why}"
        if offered is None or offered.attempt != to:
            self._post_now(lambda: handoff.move_refused(to, detail))
            return
        # What was offered may be overwritten from now on, as the request goes on.
        offered.is_withdrawn = True
        self._post_now(lambda: handoff.withdraw(to, detail, promise_broken=True))

    def may_cut(self, request: Request) -> bool:
        offered = self._offered.get(request.request_id)
        if offered is None or offered.is_withdrawn:
            return False
        num_groups, num_read = len(self._layout.groups), self._handoff.num_read(offered.attempt)
        num_full = request.num_exchanged_tokens // self._layout.block_size * num_groups
        return num_read is not None and num_full - num_read <= num_groups

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> BlockFate:
        return BlockFate.FREE

    def pinned(self, pin: Pin, block_ids: Sequence[int]) -> None:
        handoff, num_tokens = self._handoff, len(block_ids) // len(self._layout.groups) * self._layout.block_size
        self._post(lambda: handoff.pinned(pin, block_ids, num_tokens))
        if block_ids and handoff.has_digests:
            self._pins.append(_PinProgress(pin, block_ids))
            if len(self._pins) == 1:
                self._after_step(self._digest_pins)
        elif block_ids:
            self._post(lambda: handoff.pin_digested(pin, len(block_ids), num_tokens))

    def _digest_pins(self) -> None:
        """Compute digests of what is pulled, the earliest first, until some were not known. The others follow after the
        next step, or after none if there is nothing to compute."""
        handoff = self._handoff
        num_computed = handoff.num_digests_computed
        while self._pins and handoff.num_digests_computed == num_computed:
            self._digest_more(self._pins[0])
        if self._pins:
            self._after_step(self._digest_pins)
            self._post_now(handoff.wake_engine)

    def _digest_more(self, pinned: _PinProgress) -> None:
        pin, groups, first = pinned.pin, len(self._layout.groups), pinned.num_blocks
        block_ids = pinned.block_ids[first : first + self._per_step]
        pinned.num_blocks += len(block_ids)
        keys = pin.keys[first // groups : pinned.num_blocks // groups]

        def withdrawn() -> None:
            pinned.num_blocks = len(pinned.block_ids)

        self._digest(pin.attempt, first, block_ids, partial(names_of_cached, keys, groups), 1, withdrawn)
        if pinned.num_blocks == len(pinned.block_ids):
            self._pins.popleft()
            handoff, num_tokens = self._handoff, pinned.num_blocks // groups * self._layout.block_size
            self._post_now(lambda: handoff.pin_digested(pin, pinned.num_blocks, num_tokens))

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        offered = self._offer_progress(request)
        if offered is None:
            return BlockFate.FREE
        attempt, holder = offered.attempt, request.request_id
        del self._offered[holder]
        if offered.is_withdrawn:
            self._post(lambda: self._handoff.ended(attempt, holder))
            return BlockFate.LEASED
        closing = _closing(request)
        if closing is not None:
            self._offer(request, offered, offered.num_blocks, tuple(block_ids[offered.num_blocks :]), closing)
            self._post(lambda: self._handoff.ended(attempt, holder))
            return BlockFate.LEASED
        end = (request.outcome or request.status).name
        detail = str(request.error or f"the request ended as {end} on the node that had it")
        aborted = request.outcome is Outcome.ABORTED
        cause = TransferCause.CANCELLED if aborted else TransferCause.LEASE_LOST
        self._post(lambda: self._handoff.withdraw(attempt, detail, cause))
        if not (offered.num_blocks or offered.was_lent):
            return BlockFate.FREE
        self._post(lambda: self._handoff.ended(attempt, holder))
        return BlockFate.LEASED

    def _offer(
        self,
        request: Request,
        offered: _OfferProgress,
        first: int,
        block_ids: Sequence[int],
        closing: Closing | None = None,
    ) -> None:
        attempt, parts, handoff = offered.attempt, offered.digest_parts, self._handoff
        # A stream that moves stands still until the other node has the last blocks.
        post = self._post if request.move is None else self._post_now
        post(lambda: handoff.offer(attempt, first, block_ids, closing, parts))
        if handoff.has_digests:
            # The reader needs the digests only when it has read everything, so nothing waits for them yet.
            self._after_step(lambda: self._digest_blocks(request, offered, first, block_ids))

    def _digest_blocks(self, request: Request, offered: _OfferProgress, first: int, block_ids: Sequence[int]) -> None:
        def withdrawn() -> None:
            offered.is_withdrawn = True

        names = partial(block_names, request, self._layout, first, len(block_ids))
        self._digest(offered.attempt, first, block_ids, names, offered.digest_parts, withdrawn)

    def _digest(
        self,
        attempt: AttemptKey,
        first: int,
        block_ids: Sequence[int],
        names: Callable[[], Sequence[BlockName]],
        parts: int,
        withdrawn: Callable[[], None],
    ) -> None:
        """Tell the digests of offered blocks. If they can't be computed, withdraw the offers and call `withdrawn`."""
        handoff = self._handoff
        try:
            digests = handoff.compute_digests(attempt, first, block_ids, names(), parts)
        except Exception as error:
            # Without digests the reader could not check the blocks that it reads.
            # A typed error, such as that of a stage that is gone, says all; of any other one the traceback tells more.
            said = "%s: could not compute the digests of its blocks, so its offers are withdrawn: %s"
            _log.error(said, attempt, error, exc_info=not isinstance(error, BatonError))
            detail = f"the sender could not compute digests: {error!r}"
            self._post_now(lambda: handoff.withdraw(attempt, detail, promise_broken=True))
            withdrawn()
        else:
            self._post_now(lambda: handoff.digested(attempt, digests))

    def _offer_progress(self, request: Request) -> _OfferProgress | None:
        """The progress of the request's offers; None: nothing of it is offered. They are withdrawn if the request was
        preempted since the first one, since its blocks may hold the KV of other tokens by now."""
        offered = self._offered.get(request.request_id)
        if request.leg is not Leg.PREFILL:
            return offered
        if offered is None or not offered.num_blocks:
            # The reader can compare each of its blocks, though it may lack other parts of a block here.
            parts = max(1, self._layout.block_size // (request.reader_block_size or self._layout.block_size))
            offered = _OfferProgress(request.attempt, 0, request.num_preemptions, parts)
            self._offered[request.request_id] = offered
        elif offered.num_preemptions != request.num_preemptions and not offered.is_withdrawn:
            offered.is_withdrawn = True
            attempt = request.attempt
            self._post(lambda: self._handoff.withdraw(attempt, "preempted", promise_broken=True))
        return offered


def _closing(request: Request) -> Closing | None:
    """What the last offer of a request says that has ended; None: it is not to be continued elsewhere."""
    move, outcome = request.move, request.outcome
    if move is not None:
        known = move.num_tokens - request.num_prompt_tokens
        sampled = tuple(request.output_token_ids[known:])
        is_cut = outcome is Outcome.HANDED_OFF
        return Closing(request.num_exchanged_tokens, sampled, ended=False) if is_cut else None
    if outcome not in _COMPUTED or request.num_output_tokens <= request.num_given_tokens:
        return None
    sampled = tuple(request.output_token_ids[request.num_given_tokens :])
    has_ended = outcome is not Outcome.HANDED_OFF
    return Closing(request.num_submitted_tokens, sampled, has_ended, request.last_logprobs)
