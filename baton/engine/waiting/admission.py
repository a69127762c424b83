"""Admission: in which order waiting requests are tried, and what each of them needs to run.

Admission allocates the blocks for all tokens that a request has so far, all or nothing, although they are computed in
chunks. So two half-admitted requests can't wait for each other, and a prompt's blocks tend to be contiguous. Where the
blocks don't fit and the model's attention windows bound how many are needed at a time, admission allocates that many,
and the request reuses them. A load from another node also reserves the slot of its first generated token, so that a
request whose KV has arrived never waits for a block.

Requests that lack a seat and requests that lack a load slot (see waiting_requests.py) are tried in one common order.
While no load slot is free, only the requests that need a seat are tried: they take no load slot, and requests whose KV
has arrived get seats before them. While no seat is free, loads may begin in front of requests that wait for a seat, but
the first of these may be passed only `max_times_passed` times, since a loaded request gets a seat before it.

The running requests have at most `max_loras` different adapters. A request whose adapter would be one more is skipped
with all that wait behind it with that adapter, and does not hold up others (see request_queue.py).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from baton.engine.batch import EngineCoreEventType
from baton.engine.connector import NO_EXTERNAL_TOKENS, ExternalTokens
from baton.engine.kv_cache.block_table import NO_COMPUTED_BLOCKS, AllocationAnswer, ComputedBlocks
from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.engine.scheduler_state import OutputsByClient, SchedulerState
from baton.engine.stats import PrefixCacheCounts
from baton.engine.step_plan import StepPlan
from baton.engine.waiting.request_queue import NO_TURN, AdapterQueues, AdapterSlots, Turn
from baton.engine.waiting.sequences import Sequences
from baton.engine.waiting.waiting_requests import WaitingRequests, may_load
from baton.errors import InvalidRequest
from baton.messages.node import Leg, Outcome


class _AdmissionResult(enum.Enum):
    """The result of trying to admit a waiting request."""

    ADMITTED = enum.auto()
    """The request runs, or has blocks and waits for remote KV."""
    ENDED = enum.auto()
    """The request was refused or failed, and has ended."""
    NO_BLOCKS = enum.auto()
    """There are not enough free blocks now. A smaller request may still fit."""
    NO_SEAT = enum.auto()
    """No seat is free or the token budget is too small: no later request gets a seat in this step either."""
    NO_ADAPTER_SLOT = enum.auto()
    """The running requests have as many different adapters as they may. Requests without one still fit."""
    ASK_AGAIN = enum.auto()
    """The connector does not know yet, another sequence still computes the shared prompt, or the next tokens are those
    of an input that is still to be encoded."""


class _Unseated(NamedTuple):
    """The first request in turn that waits for a seat and gets none in this step."""

    turn: Turn
    request: Request


class Admission:
    """Moves waiting requests to running, or from WAITING to WAITING_FOR_REMOTE_KVS."""

    def __init__(self, state: SchedulerState, waiting: WaitingRequests, sequences: Sequences) -> None:
        self._state = state
        self._waiting = waiting
        self._sequences = sequences
        self._config = state.config
        self._manager = state.kv_cache_manager
        self._prompt_needs_whole_step = False
        self._slots = AdapterSlots(state.config.max_loras)
        self._skipped: list[Request] = []
        """Requests that were skipped in this step because their adapter has no slot: the first in turn of each adapter
        that waits, and some that hold blocks."""
        self.prefix_cache = PrefixCacheCounts()

    def add(self, request: Request, outputs: OutputsByClient, *, awaits_adapter: bool = False) -> None:
        """Queue a new request. One that can never fit ends at once. `awaits_adapter`: its adapter is not loaded yet."""
        if request.least_length > self._state.max_num_tokens(request):
            self._refuse(request, outputs)
            return
        if not self._state.encoder_cache.can_ever_hold(request.encoder_inputs):
            field, most = request.encoder_inputs[0].content.kind.field, self._config.num_encoder_rows
            reason = f"one input has more rows than the {most} that this node keeps; make it smaller"
            self._state.fail(request, InvalidRequest(field, reason), outputs)
            return
        try:
            self._state.connector.request_added(request)
        except Exception as exc:
            self._fail(request, exc, outputs)
            return
        self._waiting.enter(request, awaits_adapter=awaits_adapter)

    def begin_step(self) -> None:
        """A new step is decided: what was skipped in the last one is tried again."""
        self._slots.begin_step()
        self._waiting.for_seat.begin_step()
        self._waiting.for_load.begin_step()
        self._skipped.clear()

    def pop_needs_whole_step(self) -> bool:
        """Whether a prompt that may not be split into chunks needs a whole step's budget; resets the answer."""
        needs_whole_step, self._prompt_needs_whole_step = self._prompt_needs_whole_step, False
        return needs_whole_step

    def admit_arrived(self, plan: StepPlan) -> None:
        """Run the requests whose KV has arrived: they already hold blocks."""
        skipped: list[Request] = []
        arrived = self._waiting.arrived
        while arrived and self._has_seat(plan, arrived[0]):
            request = arrived[0]
            if not self._has_slot(request):
                skipped.append(arrived.popleft())
                continue
            num_tokens = plan.chunk_size(request, request.num_tokens - request.num_computed_tokens, plan.token_budget)
            if not num_tokens or self._manager.allocate_slots(request, num_tokens).answer is not AllocationAnswer.OK:
                break
            arrived.popleft()
            self._run(request, num_tokens, plan)
        arrived.extendleft(reversed(skipped))

    def admit_swapped(self, plan: StepPlan) -> bool:
        """Swap requests back in, in turn. False when one has to wait: then no other waiting request may be admitted.

        One whose adapter has no slot holds up those with other adapters only, and one whose input is still to be
        encoded none.
        """
        swapped = self._waiting.swapped
        skipped: list[Request] = []
        may_admit_others = True
        while (request := swapped.next_request) is not None:
            missing = plan.chunk_size(request, request.num_tokens - request.num_computed_tokens, plan.token_budget)
            if not missing or not self._has_seat(plan, request):
                may_admit_others = False
                break
            swapped.pop()
            if not self._has_slot(request):
                skipped.append(request)
                continue
            num_tokens = self._state.num_encoded(request, request.num_computed_tokens, missing)
            if not num_tokens:
                skipped.append(request)
                continue
            answer = self._manager.swap_in(request, num_spared_blocks=self._spared_blocks())
            if answer is not AllocationAnswer.OK:
                self._state.encoder_cache.release(request.request_id, request.encoder_inputs)
                swapped.prepend(request)
                may_admit_others = False
                break
            self._run(request, num_tokens, plan)
        swapped.put_back(skipped)
        return may_admit_others

    def admit_waiting(self, plan: StepPlan, outputs: OutputsByClient) -> None:
        """Try to admit the requests without blocks, in turn.

        A request that does not fit now keeps its position; one that can never fit ends.
        """
        waiting = self._waiting
        if waiting.holding:
            self._sequences.queue_due()
        if not waiting.num_queued:
            return
        stay: dict[AdapterQueues, list[Request]] = {}
        stuck: list[Request] = []
        unseated = self._unseated(plan)
        while (queue := self._next_queue(unseated)) is not None:
            turn = queue.next_turn
            request = queue.pop()
            result = self._try(request, plan, outputs)
            waiting.deferred.discard(request.request_id)
            if result is _AdmissionResult.ASK_AGAIN and request.status is RequestStatus.WAITING:
                waiting.deferred.add(request.request_id)
            if result in (_AdmissionResult.ADMITTED, _AdmissionResult.ENDED):
                waiting.preempted.discard(request.request_id)
            if result is _AdmissionResult.ADMITTED:
                passed = stuck if unseated is None or turn < unseated.turn else [*stuck, unseated.request]
                for skipped in passed:
                    waiting.times_passed[skipped.request_id] += 1
                unseated = unseated or self._unseated(plan)
            elif result is not _AdmissionResult.ENDED:
                stay.setdefault(queue, []).append(request)
            if result is _AdmissionResult.NO_BLOCKS:
                stuck.append(request)
            elif result is _AdmissionResult.NO_ADAPTER_SLOT:
                queue.pass_over(request.adapter)
            if result is _AdmissionResult.NO_SEAT and unseated is None:
                unseated = _Unseated(turn, request)
            if stuck and not self._may_be_passed(stuck):
                break
        for queue, requests in stay.items():
            queue.put_back(requests)

    def _next_queue(self, unseated: _Unseated | None) -> AdapterQueues | None:
        """The queue whose first request is to be tried next; None when no request can get what it lacks.

        `unseated`: the first request in turn that gets no seat in this step; then no other request gets a seat either.
        """
        waiting = self._waiting
        seat = waiting.for_seat.next_turn if unseated is None else NO_TURN
        load = waiting.for_load.next_turn if waiting.has_load_slot else NO_TURN
        if seat < load:
            return waiting.for_seat
        if load == NO_TURN:
            return None
        if unseated is not None and unseated.turn < load and not self._may_be_passed([unseated.request]):
            return None
        return waiting.for_load

    def _unseated(self, plan: StepPlan) -> _Unseated | None:
        """The first request in turn that waits for a seat, if no seat is left."""
        request = self._waiting.for_seat.next_request
        if request is None or self._has_seat(plan, request):
            return None
        return _Unseated(self._waiting.for_seat.next_turn, request)

    def _may_be_passed(self, stuck: list[Request]) -> bool:
        # The stream of a preempted request has stalled: if new requests took its blocks, it could starve.
        return len(stuck) <= self._config.max_stuck_requests and all(
            request.status is not RequestStatus.PREEMPTED
            and self._waiting.times_passed[request.request_id] < self._config.max_times_passed
            for request in stuck
        )

    def _try(self, request: Request, plan: StepPlan, outputs: OutputsByClient) -> _AdmissionResult:
        loads = may_load(request)
        if loads and not self._slots.is_free_for(request.adapter):
            self._skipped.append(request)
            return _AdmissionResult.NO_ADAPTER_SLOT
        if not loads and not self._has_slot(request):
            return _AdmissionResult.NO_ADAPTER_SLOT
        if self._manager.has_table(request.request_id):
            return self._continue_parked(request, plan)
        computed = self._computed_blocks(request, with_host=not loads)
        if computed is None:
            return _AdmissionResult.ASK_AGAIN
        request.num_found_tokens = self._manager.num_tokens_in_use(computed)
        if loads:
            try:
                external = self._external_tokens(request, computed)
            except Exception as exc:
                return self._fail(request, exc, outputs)
            if external.num_tokens is None:
                return _AdmissionResult.ASK_AGAIN
            request.seen_from = external.seen_from
            if external.num_tokens:
                return self._load(request, computed, external.num_tokens, outputs)
            if not self._has_seat(plan, request):
                return _AdmissionResult.NO_SEAT
            if not self._has_slot(request):
                return _AdmissionResult.NO_ADAPTER_SLOT
        elif request.held_prefix is not None and (result := self._pull(request, computed, outputs)) is not None:
            return result
        return self._admit(request, computed, plan, outputs)

    def _computed_blocks(self, request: Request, *, with_host: bool) -> ComputedBlocks | None:
        """The request's prefix with KV in the cache or in another sequence's blocks; at least one token is left out.

        None: another sequence is still computing the shared prompt.
        """
        if request.computes_every_token:
            return NO_COMPUTED_BLOCKS
        if (parent := self._parent(request)) is not None:
            shared = self._manager.shared_prefix(parent, request.num_tokens - 1, is_idle=True)
            if shared is not None:
                return shared
        decoding = self._state.decodes.request_ids
        sibling = request.group.running_sibling(request, decoding) if request.group is not None else None
        if sibling is None:
            return self._manager.get_computed_blocks(request, with_host=with_host)
        if sibling.request_id not in decoding:
            return None
        num_tokens = min(request.num_prompt_tokens, request.num_tokens - 1)
        shared = self._manager.shared_prefix(sibling, num_tokens)
        if shared is not None and not request.output_token_ids:
            return shared
        cached = self._manager.get_computed_blocks(request)
        return max(shared or NO_COMPUTED_BLOCKS, cached, key=lambda computed: computed.num_tokens)

    def _parent(self, request: Request) -> Request | None:
        """The beam from which this one was forked, as long as that one's blocks are kept."""
        parent = self._state.parked.get(request.parent_id) if request.parent_id else None
        return parent if parent is not None and self._manager.has_table(parent.request_id) else None

    def _continue_parked(self, request: Request, plan: StepPlan) -> _AdmissionResult:
        """Run a parked beam again in the blocks that it has."""
        allocation = self._manager.allocate_slots(request, 1)
        if allocation.answer is not AllocationAnswer.OK:
            return _AdmissionResult.NO_BLOCKS
        plan.add_known(request, 1, allocation.new_block_ids)
        self._seat(request)
        return _AdmissionResult.ADMITTED

    def _has_slot(self, request: Request) -> bool:
        """Whether the request's adapter has a slot or can get one. Otherwise the request is skipped in this step.

        The next slot is kept for a skipped request that ran before or was passed often.
        """
        slots = self._slots
        if not request.adapter or slots.fits(request.adapter, self._state.running):
            return True
        self._skipped.append(request)
        ran_before = request.status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED) or request.beams is not None
        times_passed = self._waiting.times_passed[request.request_id]
        if ran_before or times_passed >= self._config.max_times_passed:
            slots.keep_for(request.adapter)
        return False

    def _has_seat(self, plan: StepPlan, request: Request) -> bool:
        """Whether a seat is free and the step may compute a token of the request, if it lacks only one."""
        return plan.room_for(request, 1) > 0 and len(self._state.running) < self._config.max_num_seqs

    def _external_tokens(self, request: Request, computed: ComputedBlocks) -> ExternalTokens:
        external = self._state.connector.get_num_new_matched_tokens(request, computed.num_tokens)
        if external.num_tokens is None:
            return external
        if external.num_tokens == 0:
            return NO_EXTERNAL_TOKENS
        if not external.load_async or computed.num_tokens + external.num_tokens != request.num_exchanged_tokens:
            raise ValueError(f"{external} does not complete a prompt with {computed.num_tokens} tokens here")
        return external

    def _admit(
        self, request: Request, computed: ComputedBlocks, plan: StepPlan, outputs: OutputsByClient
    ) -> _AdmissionResult:
        result = self._allocate_and_run(request, computed, plan, outputs)
        if result is not _AdmissionResult.ADMITTED:
            # While it waits, others may need the room of its inputs.
            self._state.encoder_cache.release(request.request_id, request.encoder_inputs)
        return result

    def _allocate_and_run(
        self, request: Request, computed: ComputedBlocks, plan: StepPlan, outputs: OutputsByClient
    ) -> _AdmissionResult:
        missing = request.num_tokens - computed.num_tokens
        # The logits of a whole prompt would take too much memory, and its inputs may have no room together.
        cuts = self._config.enable_chunked_prefill or request.computes_prompt_logprobs or bool(request.encoder_inputs)
        if cuts:
            num_tokens = plan.chunk_size(request, missing, plan.token_budget)
            if not num_tokens:
                return _AdmissionResult.NO_SEAT
        elif missing <= plan.room_for(request, missing):
            num_tokens = missing
        else:
            self._prompt_needs_whole_step = True
            return _AdmissionResult.NO_SEAT
        num_encoded = self._state.num_encoded(request, computed.num_tokens, num_tokens)
        if not num_encoded:
            return _AdmissionResult.ASK_AGAIN
        num_tokens = num_encoded
        allocation = self._manager.allocate_slots(
            request, missing, computed=computed, num_spared_blocks=self._spared_blocks()
        )
        answer = allocation.answer
        if answer is not AllocationAnswer.OK and self._may_grow(request):
            computed = computed.without_host()
            answer = self._allocate_to_grow(request, computed)
            if answer is AllocationAnswer.NEVER and computed.blocks:
                # Hits are held beside the blocks that grow; without them the request may fit.
                computed = NO_COMPUTED_BLOCKS
                num_tokens = self._state.num_encoded(request, 0, num_tokens)
                answer = self._allocate_to_grow(request, computed)
        if answer is AllocationAnswer.LATER:
            return _AdmissionResult.NO_BLOCKS
        if answer is AllocationAnswer.NEVER:
            return self._refuse(request, outputs)
        self._note_hits(request, computed)
        if answer is not allocation.answer:
            num_tokens = self._manager.grow(request, num_tokens).num_tokens
        plan.blocks_to_copy += allocation.copies
        self._run(request, num_tokens, plan)
        if request.leg is Leg.PREFILL:
            self._report_begun(request)
        return _AdmissionResult.ADMITTED

    def _allocate_to_grow(self, request: Request, computed: ComputedBlocks) -> AllocationAnswer:
        config = self._config
        most = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_num_batched_tokens)
        return self._manager.allocate_to_grow(request, computed, most, self._spared_blocks())

    def _may_grow(self, request: Request) -> bool:
        """Whether the request may be computed with fewer blocks than its tokens fill: its queries only see a window.

        A request of several sequences may not: they share the blocks of its whole prompt.
        """
        is_alone = request.group is None and request.beams is None
        return is_alone and self._manager.has_windows and self._config.enable_chunked_prefill

    def _report_begun(self, request: Request) -> None:
        try:
            self._state.connector.update_state_after_alloc(request, self._manager.exchanged_block_ids(request), 0)
        except Exception:
            # The decode node that waits for this notice gets the offer of the first blocks instead.
            self._state.counters.num_connector_errors += 1

    def _load(
        self, request: Request, computed: ComputedBlocks, num_external_tokens: int, outputs: OutputsByClient
    ) -> _AdmissionResult:
        """Reserve blocks for all submitted tokens and one more; the connector fills those that are not cached here.

        Of a stream that is moved here also for the tokens that it may have by then.
        """
        max_num_tokens = self._state.max_num_tokens(request)
        needs_more = not request.cut_by and request.num_submitted_tokens + 1 < max_num_tokens
        allocation = self._manager.allocate_slots(
            request,
            0,
            computed=computed,
            num_external_tokens=num_external_tokens,
            num_lookahead_tokens=1 if needs_more else 0,
            num_spared_blocks=self._spared_blocks(),
        )
        if allocation.answer is AllocationAnswer.LATER:
            return _AdmissionResult.NO_BLOCKS
        if allocation.answer is AllocationAnswer.NEVER:
            return self._refuse(request, outputs)
        self._note_hits(request, computed)
        self._waiting.times_passed.pop(request.request_id, None)
        request.transition(RequestEvent.LOAD_BEGUN)
        self._state.events.record(EngineCoreEventType.REMOTE_KV_REQUESTED, request, num_external_tokens)
        try:
            self._state.connector.update_state_after_alloc(
                request, self._manager.exchanged_block_ids(request), num_external_tokens
            )
        except Exception as exc:
            return self._fail(request, exc, outputs)
        self._waiting.remote[request.request_id] = request
        self._state.begun_loads.append(request)
        return _AdmissionResult.ADMITTED

    def _pull(self, request: Request, computed: ComputedBlocks, outputs: OutputsByClient) -> _AdmissionResult | None:
        """Reserve blocks for what another node has cached of the prompt, which the connector fills; None: it can't be
        done now, and the request is computed. It is tried once, when the connector knows.

        When that is over the request waits for a seat again, and finds in the prefix cache what was pulled: while it is
        pulled the request holds no other blocks, so nobody waits for it.
        """
        connector, waiting = self._state.connector, self._waiting
        if request.computes_every_token or not waiting.has_load_slot:
            request.held_prefix = None
            return None
        try:
            external = connector.get_num_new_matched_tokens(request, computed.num_tokens)
        except Exception:
            self._state.counters.num_connector_errors += 1
            external = NO_EXTERNAL_TOKENS
        if external.num_tokens is None:
            return _AdmissionResult.ASK_AGAIN
        if not external.num_tokens:
            request.held_prefix = None
            return None
        request.pulled_end = computed.num_tokens + external.num_tokens
        computed = computed.without_host()
        num_pulled = request.pulled_end - computed.num_tokens
        allocation = self._manager.allocate_slots(
            request, 0, computed=computed, num_external_tokens=num_pulled, num_spared_blocks=self._spared_blocks()
        )
        if allocation.answer is AllocationAnswer.LATER:
            request.pulled_end = 0
            return _AdmissionResult.NO_BLOCKS
        if allocation.answer is AllocationAnswer.NEVER:
            connector.load_failed(request, ())
            request.held_prefix, request.pulled_end = None, 0
            return None
        request.num_computed_tokens = computed.num_tokens
        waiting.times_passed.pop(request.request_id, None)
        request.transition(RequestEvent.LOAD_BEGUN)
        self._state.events.record(EngineCoreEventType.REMOTE_KV_REQUESTED, request, num_pulled)
        try:
            connector.update_state_after_alloc(request, self._manager.exchanged_block_ids(request), num_pulled)
        except Exception as exc:
            return self._fail(request, exc, outputs)
        waiting.remote[request.request_id] = request
        return _AdmissionResult.ADMITTED

    def _run(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        block_ids = self._manager.block_ids(request.request_id)
        if request.beams is None or request.is_root:
            self._state.events.record(EngineCoreEventType.SCHEDULED, request, request.num_computed_tokens)
        parent = self._parent(request)
        if request.is_known:
            plan.add_known(request, num_tokens, block_ids, resumed=True)
        elif parent is not None and parent.is_known:
            plan.add_fork(request, num_tokens, block_ids)
        else:
            plan.add_new(request, num_tokens, block_ids)
        self._seat(request)

    def _seat(self, request: Request) -> None:
        request.is_known = True
        request.parent_id = ""
        request.transition(RequestEvent.SEATED)
        if request.adapter:
            self._slots.take(request.adapter)
            for skipped in self._skipped:
                if skipped.adapter != request.adapter:
                    self._waiting.times_passed[skipped.request_id] += 1
        self._state.running.append(request)
        self._state.filling.append(request)
        self._waiting.times_passed.pop(request.request_id, None)

    def _spared_blocks(self) -> int:
        return self._config.watermark_blocks if self._state.running else 0

    def _note_hits(self, request: Request, computed: ComputedBlocks) -> None:
        request.num_computed_tokens = computed.num_tokens
        num_external = 0
        if request.num_preemptions == 0:
            # Tokens that a failed load left in the cache count as external as long as they are still cached.
            num_external = request.num_external_tokens = min(request.num_external_tokens, computed.num_tokens)
            request.num_cached_tokens = computed.num_tokens - num_external
        if not request.is_root:
            return
        if self._config.enable_prefix_caching:
            self.prefix_cache.note_lookup(request.num_tokens)
        self.prefix_cache.note_hit("remote", num_external)
        self.prefix_cache.note_hit("device", computed.num_tokens - computed.num_host_tokens - num_external)
        self.prefix_cache.note_hit("host", computed.num_host_tokens)

    def _refuse(self, request: Request, outputs: OutputsByClient) -> _AdmissionResult:
        error = (
            f"a prompt of {request.num_submitted_tokens} tokens leaves no room to generate: this engine holds at most "
            f"{self._state.max_num_tokens(request)} tokens of a request (max_model_len {self._config.max_model_len}, "
            f"KV cache {self._config.num_slots})"
        )
        self._waiting.times_passed.pop(request.request_id, None)
        self._state.end(request, Outcome.IGNORED, outputs, error=error)
        return _AdmissionResult.ENDED

    def _fail(self, request: Request, exc: Exception, outputs: OutputsByClient) -> _AdmissionResult:
        self._waiting.times_passed.pop(request.request_id, None)
        self._state.end_after_connector_error(request, exc, outputs)
        return _AdmissionResult.ENDED
