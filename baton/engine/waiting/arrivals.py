"""KV from another node: its arrival lets a request run, and its loss ends a request or has it computed here."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import EngineCoreEventType
from baton.engine.connector import ArrivedKV, KVTransferOutput, LostKV
from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.engine.scheduler_state import OutputsByClient, SchedulerState
from baton.engine.stats import PrefixCacheCounts
from baton.engine.stopping import check_stop
from baton.engine.waiting.sequences import Sequences
from baton.engine.waiting.waiting_requests import WaitingRequests
from baton.errors import TransferCause
from baton.messages.node import Leg, Outcome


class Arrivals:
    """Takes the reports of KV transfers."""

    def __init__(
        self, state: SchedulerState, waiting: WaitingRequests, sequences: Sequences, prefix_cache: PrefixCacheCounts
    ) -> None:
        """`prefix_cache` counts what arrives."""
        self._state = state
        self._waiting = waiting
        self._sequences = sequences
        self._prefix_cache = prefix_cache
        self._manager = state.kv_cache_manager

    def take(self, transfers: KVTransferOutput, outputs: OutputsByClient) -> None:
        """Process arrivals and failures of transfers, and releases; see `Scheduler.update_from_kv_transfer`."""
        state, policy = self._state, self._state.config.on_transfer_failure
        for request_id, arrived in transfers.arrived.items():
            request = self._waiting.remote.pop(request_id, None)
            if request is None:
                state.counters.num_unknown_transfers += 1
            elif request.pulled_end:
                num_blocks = request.pulled_end // self._manager.block_size * self._manager.num_groups
                self._end_pull(request, num_blocks, arrived.partly_filled)
            else:
                self._arrive(request, arrived, outputs)
        for request_id, lost in transfers.failed.items():
            request = self._pop_unloaded(request_id)
            if request is None:
                state.counters.num_unknown_transfers += 1
            elif request.pulled_end:
                self._end_pull(request, lost.num_valid_blocks, lost.partly_filled)
            elif policy == "recompute" and not (request.cut_by or request.kv_bits):
                self._compute_here(request, lost)
            else:
                # A stream that was to move here may go on where it is. One that began under other numerics may have a
                # first token that is not this node's.
                outcome = Outcome.ERROR if policy == "fail" and not request.cut_by else Outcome.KV_LOST
                state.end(request, outcome, outputs, error=lost.detail, transfer_cause=lost.cause)
        for request_id in transfers.released:
            state.counters.num_unknown_transfers += not self._manager.held.release(request_id)
        for to in transfers.moves_ended:
            for request in [r for r in state.moving.values() if r.move is not None and r.move.to == to]:
                state.end_move(request, "it was aborted")
        for pin in transfers.pins:
            state.connector.pinned(pin, self._manager.pin(pin.holder, pin.keys))

    def _pop_unloaded(self, request_id: str) -> Request | None:
        """Remove and return a request that waits for remote KV, or for the blocks that a load needs; otherwise None."""
        request = self._waiting.remote.pop(request_id, None) or self._state.requests.get(request_id)
        if request is None or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request
        queued = request.status in (
            RequestStatus.WAITING,
            RequestStatus.WAITING_FOR_GRAMMAR,
            RequestStatus.WAITING_FOR_ADAPTER,
        )
        if request.leg is not Leg.DECODE or not queued or self._manager.has_table(request_id):
            return None
        self._waiting.remove([request])
        return request

    def _arrive(self, request: Request, arrived: ArrivedKV, outputs: OutputsByClient) -> None:
        """Take over arrived KV: it can be found in the prefix cache, and the request runs from the next step on."""
        state, first_token_ids, is_moved = self._state, arrived.first_token_ids, request.cut_by > 0
        request.transition(RequestEvent.LOADED)
        if is_moved:
            request.output_token_ids.extend(first_token_ids[:-1])
            first_token_ids, request.cut_by, request.seen_from = first_token_ids[-1:], 0, 0
        num_loaded = request.num_tokens
        request.num_external_tokens = num_loaded - request.num_computed_tokens
        request.num_computed_tokens = num_loaded
        self._prefix_cache.note_hit("remote", request.num_external_tokens)
        state.events.record(EngineCoreEventType.REMOTE_KV_ARRIVED, request, request.num_external_tokens)
        self._manager.note_partly_filled(request, arrived.partly_filled)
        self._manager.cache_blocks(request, num_loaded)
        self._sequences.fork(request)
        if request.beams is not None:
            state.park(request)
            self._sequences.enter([request.beams.restart_from_prompt()])
            state.end_computed_beams(request.beams)
            return
        request.last_logprobs = arrived.first_logprobs
        # The router has all tokens of a stream that was moved from the other node.
        reports = not is_moved and (request.sampling_params.logprobs is None or bool(arrived.first_logprobs))
        for token_id in first_token_ids:
            request.output_token_ids.append(token_id)
            request.num_unreported += reports
            stop = check_stop(request, state.max_num_tokens(request))
            if stop is not None:
                state.end(request, stop.outcome, outputs, stop_reason=stop.stop_reason, error=stop.error)
                return
        if not first_token_ids:
            error, cause = "the KV arrived without a first token", TransferCause.REFUSED
            state.end(request, Outcome.KV_LOST, outputs, error=error, transfer_cause=cause)
            return
        if state.is_long(request) and not request.is_long:
            # Its first token makes it a long sequence, so the KV that arrived is only for others.
            state.forget_short(request)
            request.leg, request.kv_source = Leg.WHOLE, None
            self._waiting.for_seat.prepend(request)
            return
        self._waiting.kv_arrived(request)

    def _end_pull(self, request: Request, num_valid_blocks: int, partly_filled: Sequence[int]) -> None:
        """Queue a request whose pull is over: next in its turn it finds in the prefix cache what the pull brought."""
        num_here = self._state.give_up_load(request, num_valid_blocks, partly_filled)
        request.num_external_tokens = max(0, num_here - request.num_computed_tokens)
        is_here = num_here >= request.pulled_end
        kind = EngineCoreEventType.REMOTE_KV_ARRIVED if is_here else EngineCoreEventType.REMOTE_KV_LOST
        self._state.events.record(kind, request, request.num_external_tokens)
        request.held_prefix, request.pulled_end, request.num_computed_tokens = None, 0, 0
        request.transition(RequestEvent.LOADED if is_here else RequestEvent.LOAD_LOST)
        self._waiting.for_seat.prepend(request)

    def _compute_here(self, request: Request, lost: LostKV) -> None:
        """Compute a request here whose KV does not arrive completely, before new requests, as a request of one leg.

        It finds those of its blocks in the prefix cache that hold the right KV all the same.
        """
        num_here = 0
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            num_here = self._state.give_up_load(request, lost.num_valid_blocks, lost.partly_filled)
        request.num_external_tokens = max(0, num_here - request.num_computed_tokens)
        self._state.events.record(EngineCoreEventType.REMOTE_KV_LOST, request, num_here)
        request.leg, request.kv_source, request.num_computed_tokens = Leg.WHOLE, None, 0
        request.transition(RequestEvent.LOAD_LOST)
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._waiting.for_grammar[request.request_id] = request
            return
        if request.status is RequestStatus.WAITING_FOR_ADAPTER:
            self._waiting.for_adapter[request.request_id] = request
            return
        self._waiting.for_seat.prepend(request)
