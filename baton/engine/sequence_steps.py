"""Requests with several sequences: how their group is opened, and how a beam search advances from step to step."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import EngineCoreEventType
from baton.engine.request import Request
from baton.engine.scheduler_state import OutputsByClient, SchedulerState
from baton.engine.sequences.beams import MAX_BEAMS, MIN_BEAMS, BeamGroup
from baton.engine.sequences.sequence_group import SequenceGroup
from baton.engine.stopping import max_output_tokens
from baton.engine.waiting.admission import Admission
from baton.errors import InvalidRequest
from baton.messages.node import Leg
from baton.messages.request_limits import MAX_GRAMMAR_SEQUENCES, MAX_SEQUENCES
from baton.messages.sampling import SamplingParams, TokenLogprobs


def check_sequences(params: SamplingParams) -> None:
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


def check_beams_stay(request: Request, state: SchedulerState) -> None:
    """Raises InvalidRequest for a beam search that would outgrow the rotary angles of short sequences and start over:
    its beams share the blocks of those before them.
    """
    rule = state.config.long_sequences
    if rule is None or not rule.starts_over or not request.sampling_params.beam_width:
        return
    most = request.num_prompt_tokens + max_output_tokens(request, state.max_num_tokens(request))
    if not state.is_long(request) and most > rule.most_short + 1:
        raise InvalidRequest(
            "beam_width",
            f"does not go with a prompt of {request.num_prompt_tokens} tokens and an output up to {most} in all: this "
            f"model computes sequences of more than {rule.most_short} tokens from the beginning again; set max_tokens "
            f"to at most {rule.most_short + 1 - request.num_prompt_tokens}",
        )


def open_group(request: Request, state: SchedulerState) -> None:
    """Open the group or beam search of a new request; a prefill leg needs none, since it computes only the prompt."""
    params = request.sampling_params
    if request.leg is Leg.PREFILL:
        return
    if params.beam_width:
        request.beams = state.beams[request.request_id] = BeamGroup(request, state.max_num_tokens(request))
    elif params.n > 1:
        request.group = state.groups[request.request_id] = SequenceGroup(request, state.config.max_num_seqs)


def process_beam(
    request: Request,
    beams: BeamGroup,
    logprobs: Sequence[TokenLogprobs],
    state: SchedulerState,
    admission: Admission,
    outputs: OutputsByClient,
) -> None:
    """Process a computed beam; behind the last one of a step advance the search, or write the search's result."""
    if beams.is_closed:
        return  # Another beam failed in this step, and ended the whole search.
    state.park(request)
    if not beams.add_continuations(request, logprobs[0].top if logprobs else ()):
        return
    if not request.output_token_ids:
        state.events.record(EngineCoreEventType.FIRST_TOKEN, beams.request_id)
    if beams.search.is_over:
        state.finish_beams(beams, outputs)
    else:
        admission.enter(beams.next_requests())
        state.end_computed_beams(beams)
