"""Requests with several sequences: how their group is opened and forked, and how a beam search advances."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import EngineCoreEventType
from baton.engine.request import Request
from baton.engine.scheduler_state import OutputsByClient, SchedulerState
from baton.engine.sequences.beams import MAX_BEAMS, MIN_BEAMS, BeamGroup
from baton.engine.sequences.sequence_group import SequenceGroup
from baton.engine.stopping import max_output_tokens
from baton.engine.waiting.waiting_requests import WaitingRequests
from baton.errors import InvalidRequest
from baton.messages.node import Leg
from baton.messages.request_limits import MAX_GRAMMAR_SEQUENCES, MAX_SEQUENCES
from baton.messages.sampling import SamplingParams, TokenLogprobs


class Sequences:
    """Opens groups and beam searches, and queues the sequences and beams that continue what others computed."""

    def __init__(self, state: SchedulerState, waiting: WaitingRequests) -> None:
        self._state = state
        self._waiting = waiting

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for sequences, beams or repetitions that the engine can't serve."""
        _check_params(request.sampling_params)
        self._check_beams_stay(request)

    def _check_beams_stay(self, request: Request) -> None:
        """Raises InvalidRequest for a beam search that would outgrow the rotary angles of short sequences and start
        over: its beams share the blocks of those before them.
        """
        state = self._state
        rule = state.config.long_sequences
        if rule is None or not rule.starts_over or not request.sampling_params.beam_width:
            return
        most = request.num_prompt_tokens + max_output_tokens(request, state.max_num_tokens(request))
        if not state.is_long(request) and most > rule.most_short + 1:
            raise InvalidRequest(
                "beam_width",
                f"does not go with a prompt of {request.num_prompt_tokens} tokens and an output up to {most} in all: "
                f"this model computes sequences of more than {rule.most_short} tokens from the beginning again; set "
                f"max_tokens to at most {rule.most_short + 1 - request.num_prompt_tokens}",
            )

    def open_group(self, request: Request) -> None:
        """Open the group or beam search of a new request. A prefill leg, which computes only the prompt, needs none."""
        state, params = self._state, request.sampling_params
        if request.leg is Leg.PREFILL:
            return
        if params.beam_width:
            request.beams = state.beams[request.request_id] = BeamGroup(request, state.max_num_tokens(request))
        elif params.n > 1:
            request.group = state.groups[request.request_id] = SequenceGroup(request, state.config.max_num_seqs)

    def fork(self, request: Request) -> None:
        """Queue or hold back the other sequences, if there are any, of a request whose prompt is computed."""
        group = request.group
        if group is None or group.is_forked:
            return
        children = group.fork()
        self._register(children)
        self._waiting.for_seat.prepend_many(group.take_due())
        if group.held:
            self._waiting.holding.append(group)
        for child in children:
            self._state.events.record(EngineCoreEventType.QUEUED, child, child.num_prompt_tokens)

    def enter(self, requests: Sequence[Request]) -> None:
        """Put new sequences or beams, which continue what others computed, next in turn."""
        self._register(requests)
        self._waiting.for_seat.prepend_many(requests)

    def _register(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.is_long = self._state.is_long(request)
            self._state.requests[request.request_id] = request

    def queue_due(self) -> None:
        """Queue sequences that were held back, behind all that waits, as far as earlier ones of them have ended."""
        now = self._state.clock.monotonic()
        for group in self._waiting.holding:
            for child in group.take_due():
                # A queue with priorities orders equals by their arrival.
                child.arrival_time = now
                self._waiting.add(child)
        self._waiting.holding = [group for group in self._waiting.holding if group.held]

    def process_beam(
        self, request: Request, beams: BeamGroup, logprobs: Sequence[TokenLogprobs], outputs: OutputsByClient
    ) -> None:
        """Process a computed beam; behind the last one of a step advance the search, or write the search's result."""
        state = self._state
        if beams.is_closed:
            return  # Another beam failed in this step, and ended the whole search.
        state.park(request)
        if not beams.add_continuations(request, logprobs[0].top if logprobs else ()):
            return
        if not request.output_token_ids:
            state.events.record(EngineCoreEventType.FIRST_TOKEN, beams.root)
        if beams.search.is_over:
            state.end_beams(beams, outputs)
        else:
            self.enter(beams.next_requests())
            state.end_computed_beams(beams)


def _check_params(params: SamplingParams) -> None:
    """Raises InvalidRequest for sampling parameters of sequences, beams or repetitions that the engine can't serve."""
    width = params.beam_width
    if width and not MIN_BEAMS <= width <= MAX_BEAMS:
        raise InvalidRequest("beam_width", f"must be {MIN_BEAMS} to {MAX_BEAMS}, not {width}")
    most = width or (MAX_GRAMMAR_SEQUENCES if params.has_grammar else MAX_SEQUENCES)
    if not 1 <= params.n <= most:
        raise InvalidRequest("n", f"must be 1 to {most}, not {params.n}")
    if width and (kind := params.constraint_kind) is not None:
        raise InvalidRequest(kind, "does not go with beam_width")
    if params.repetition_detection is not None:
        if width:
            raise InvalidRequest("repetition_detection", "does not go with beam_width")
        if not params.repetition_detection.is_sound:
            raise InvalidRequest("repetition_detection", f"{params.repetition_detection} is out of bounds")
