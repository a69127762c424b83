"""Resuming a stream: an answer that continues behind what its client already has, and the nodes of its flight's record.

Text is made token by token, so a text that is cut at a token's index is exact: what lies before the cut is computed,
since the rest depends on it, and then left out, or given as `KnownText` to a reader that parses the text. Positions are
`Chunk.next_position`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from baton.errors import InvalidRequest
from baton.messages.generation import Chunk, GenerateEvent, KnownText
from baton.messages.logprob_rows import LogprobLog
from baton.messages.node import NodeDescription, RequestDelta
from baton.messages.sampling import TokenLogprobs
from baton.text.detokenizer import TextCodec
from router.admission.request import ValidRequest
from router.flight.answer import MAX_PARSED_TOKENS, Answer
from router.flight.flight_record import FlightRecord
from router.flight.flight_sequence import FlightSequence
from router.flight.flight_table import EmitTokens, SequenceEnded
from router.placement.placement import Placement


def check_positions(request: ValidRequest, positions: Sequence[int]) -> None:
    """Raises InvalidRequest for positions that no client of this request can have reached."""
    if len(positions) > request.num_returned:
        raise InvalidRequest("next_token_index", f"names {len(positions)} sequences; there are {request.num_returned}")
    # The rest of a text that comes without tokens is one more position.
    last = request.sampling_params.max_tokens + 1
    for position in positions:
        if not 0 <= position <= last:
            raise InvalidRequest("next_token_index", f"must be 0 to {last}, not {position}")


class ResumedAnswer(Answer):
    """An answer from a position on in each sequence that the client gets; positions that are missing are 0."""

    __slots__ = ("_begin",)
    joins_kept = False

    def __init__(self, codec: TextCodec | None, request: ValidRequest, positions: Sequence[int]) -> None:
        super().__init__(codec, request)
        self._begin = [*positions, *[0] * (request.sampling_params.n - len(positions))]

    def push(self, tokens: EmitTokens) -> Sequence[GenerateEvent]:
        return [event for part in self._cut_known(tokens) for event in super(ResumedAnswer, self).push(part)]

    def push_next(self, delta: RequestDelta) -> Sequence[GenerateEvent]:
        return self.push(EmitTokens(delta.first_index, delta.token_ids, delta.logprobs, False, delta.sequence_index))

    def _cut_known(self, tokens: EmitTokens) -> Iterable[EmitTokens]:
        """The same tokens in pieces, none of which lies on both sides of the client's position, or is long to parse."""
        count = len(tokens.token_ids)
        if self._is_best_of:
            # Which sequence gets which place in the answer is not known yet.
            cuts = list(range(1, count))
        else:
            at = self._begin[tokens.sequence_index] - tokens.first_index
            cuts = [at] if 0 < at < count else []
            if self._is_parsed:
                cuts = sorted({*cuts, *range(MAX_PARSED_TOKENS, count, MAX_PARSED_TOKENS)})
        return tokens.divided(cuts)

    def _give(self, index: int, chunk: Chunk) -> Sequence[GenerateEvent]:
        if not self._is_best_of and chunk.next_position <= self._begin[index]:
            # Known tokens without text count, too: a reader has to know that all of them are known.
            is_wanted = self._is_parsed and (chunk.token_ids or chunk.text)
            return super()._give(index, _known(chunk)) if is_wanted else ()
        if not chunk.token_ids and not chunk.text:
            # A piece after a stop string.
            return ()
        return super()._give(index, chunk)

    def _whole(self, chunks: Sequence[Chunk], place: int) -> Sequence[Chunk]:
        begin = self._begin[place]
        following = super()._whole([chunk for chunk in chunks if chunk.next_position > begin], place)
        before = [chunk for chunk in chunks if chunk.next_position <= begin]
        if not self._is_parsed or not before:
            return following
        return [*(replace(_known(chunk), sequence_index=place) for chunk in before), *following]


def _known(chunk: Chunk) -> Chunk:
    """A chunk that the client has. Text that came without tokens stays as it is."""
    if not chunk.token_ids:
        return chunk
    return KnownText(chunk.next_position - 1, (), chunk.text, known_token_ids=chunk.token_ids)


def lacks_logprobs(
    request: ValidRequest, sequences: Sequence[FlightSequence], kept: Sequence[LogprobLog], positions: Sequence[int]
) -> bool:
    """Whether log-probabilities behind a client's positions are forgotten."""
    params = request.sampling_params
    if params.logprobs is None:
        return False
    is_best_of = request.num_returned < params.n
    for sequence in sequences:
        if not kept[sequence.index].num_forgotten:
            continue
        first = sequence.num_tokens - len(kept[sequence.index])
        # The best sequences are chosen by all log-probabilities.
        is_from_start = is_best_of or sequence.index >= len(positions)
        if first > (0 if is_from_start else positions[sequence.index]):
            return True
    return False


def replayed(
    answer: Answer, sequences: Sequence[FlightSequence], logprobs: Sequence[LogprobLog]
) -> Sequence[GenerateEvent]:
    """The events of a new answer for all tokens of a live flight so far, without its end."""
    events: list[GenerateEvent] = []
    for sequence in sequences:
        events += _replayed_sequence(answer, sequence, logprobs[sequence.index].whole() if logprobs else ())
        if sequence.is_closed and len(sequences) > 1:
            ended = SequenceEnded(sequence.index, sequence.finish_reason, sequence.stop_reason)
            events += answer.end_sequence(ended)
    return events


def _replayed_sequence(
    answer: Answer, sequence: FlightSequence, logprobs: Sequence[TokenLogprobs]
) -> Sequence[GenerateEvent]:
    tokens = tuple(sequence.token_ids)
    events: list[GenerateEvent] = []
    ends = sequence.is_closed and isinstance(sequence.stop_reason, int)
    # The first tokens may have none: an attempt that was adopted does not know them, and a long stream forgets them.
    at = len(tokens) - len(logprobs) if logprobs else 0
    if at:
        events += answer.push(EmitTokens(0, tokens[:at], (), False, sequence.index))
    if tokens[at:]:
        events += answer.push(EmitTokens(at, tokens[at:], logprobs, ends, sequence.index))
    return events


def placement_in_record(
    record: FlightRecord, positions: Sequence[int], attached: Mapping[str, NodeDescription]
) -> Placement | None:
    """The nodes of the record's attempt; None if they can't give the client everything that it lacks.

    If only the prefill node is gone, the decode node is asked alone: it knows whether it still needs the other one.
    """
    decode = attached.get(record.decode)
    if decode is None:
        return None
    wants_logprobs = record.request.sampling_params.logprobs is not None
    if wants_logprobs and min(positions, default=0) < record.num_given:
        return None
    return Placement(attached.get(record.prefill), decode, "adopted from another router")
