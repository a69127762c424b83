"""The events of an answer, made from tokens: a text for each sequence and, with best-of, the choice among them.

An answer may continue behind what its client already has. Text is made token by token, so a text that is cut at a
token's index is exact: what lies before the cut is computed, since the rest depends on it, and then left out, or given
as `KnownText` to a reader that parses the text. Positions are `Chunk.next_position`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from baton.errors import InvalidRequest
from baton.messages.generation import Chunk, GenerateEvent, KnownText, SequenceFinished, joined
from baton.messages.logprob_rows import LogprobLog, logprobs_alone
from baton.messages.node import RequestDelta
from baton.messages.sampling import TokenLogprobs
from baton.text.detokenizer import TextCodec
from router.admission.request import ValidRequest
from router.flight.flight_sequence import FlightSequence
from router.flight.flight_table import EmitTokens, Finish, SequenceEnded
from router.flight.text_stream import TextStream

MAX_LOGPROBS_AT_ONCE = 64
"""The most tokens of a chunk with log-probabilities that is made here: writing it takes some milliseconds."""
_TOKENS_JOINED = 64
"""Chunks that are kept until the choice are joined to one of so many tokens."""
MAX_PARSED_TOKENS = 256
"""The longest chunk of an answer that is parsed, if the answer comes at once: parsing it takes about a millisecond."""


class _Sequence:
    """One sequence: its text, how it ended, and with best-of its chunks, which are kept until the choice."""

    __slots__ = ("_num_joined", "_num_tokens", "finish_reason", "kept", "stop_reason", "text")

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self.kept: list[Chunk] = []
        self._num_joined = 0
        """How many chunks of `kept`, from the first on, are joined, or can't be."""
        self._num_tokens = 0
        """Number of tokens of the others."""

    def keep(self, chunk: Chunk, *, joins: bool) -> None:
        """Keep a chunk until the choice. A chunk without tokens, the rest of the text, stays as it is."""
        self.kept.append(chunk)
        self._num_tokens += len(chunk.token_ids)
        if not chunk.token_ids:
            self._num_joined, self._num_tokens = len(self.kept), 0
        elif joins and self._num_tokens >= _TOKENS_JOINED:
            self.kept[self._num_joined :] = [joined(self.kept[self._num_joined :])]
            self._num_joined, self._num_tokens = self._num_joined + 1, 0

    def end(self, finish_reason: str, stop_reason: int | str | None) -> str:
        """End the sequence; returns the text that was held back, which may still complete a stop string."""
        rest = self.text.finish()
        stop_string = self.text.found
        self.finish_reason = finish_reason if stop_string is None else "stop"
        self.stop_reason = stop_reason if stop_string is None else stop_string
        return rest

    @property
    def cumulative_logprob(self) -> float:
        return math.fsum(chain.from_iterable([logprobs_alone(chunk.logprobs) for chunk in self.kept]))


class Answer:
    """The answer to one client. Events are to be sent in the order in which the methods return them."""

    joins_kept = True
    """Whether chunks that are kept until the choice may be joined."""

    __slots__ = (
        "_is_best_of",
        "_is_parsed",
        "_keeps_logprobs",
        "_num_returned",
        "_ranked",
        "_sequences",
        "has_stop_strings",
    )

    def __init__(self, codec: TextCodec | None, request: ValidRequest) -> None:
        params = request.sampling_params
        self._num_returned = request.num_returned
        self._keeps_logprobs = request.wants_logprobs
        self._is_best_of = request.num_returned < params.n
        self._is_parsed = request.is_parsed
        self.has_stop_strings = bool(request.stop)
        """Whether `stop_string_found` may return one."""
        self._sequences = [
            _Sequence(
                TextStream(
                    codec,
                    request.stop,
                    params.min_tokens,
                    keeps_stop=request.keeps_stop,
                    shown_tokens=request.shown_tokens,
                    context=request.context_tokens,
                    reasoning=request.reasoning,
                )
            )
            for _ in range(params.n)
        ]
        self._ranked: Sequence[_Sequence] = self._sequences

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences, each up to its end or its stop string."""
        return sum(sequence.text.num_tokens for sequence in self._sequences)

    @property
    def finish_reason(self) -> str:
        """The finish reason of the first sequence of the answer; known after `finish`."""
        return self._ranked[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._ranked[0].stop_reason

    def stop_string_found(self, sequence_index: int) -> str | None:
        """The stop string that ended a sequence's text, if one did."""
        return self._sequences[sequence_index].text.found

    def push(self, tokens: EmitTokens) -> Sequence[GenerateEvent]:
        """The events for these tokens."""
        if len(tokens.logprobs) > MAX_LOGPROBS_AT_ONCE:
            cuts = range(MAX_LOGPROBS_AT_ONCE, len(tokens.token_ids), MAX_LOGPROBS_AT_ONCE)
            return [event for part in tokens.divided(cuts) for event in self._push(part)]
        return self._push(tokens)

    def _push(self, tokens: EmitTokens) -> Sequence[GenerateEvent]:
        index = tokens.sequence_index
        text = self._sequences[index].text
        ends = tokens.ends_with_stop_token
        chunk = text.push(tokens.first_index, tokens.token_ids, tokens.logprobs, ends_with_stop_token=ends)
        return self._give(index, chunk)

    def push_next(self, delta: RequestDelta) -> Sequence[GenerateEvent]:
        """The events for a delta whose tokens continue the output; none of them is a stop token."""
        index = delta.sequence_index
        if delta.logprobs and len(delta.logprobs) > MAX_LOGPROBS_AT_ONCE:
            return self.push(EmitTokens(delta.first_index, delta.token_ids, delta.logprobs, False, index))
        return self._give(index, self._sequences[index].text.push(delta.first_index, delta.token_ids, delta.logprobs))

    def end_sequence(self, ended: SequenceEnded) -> Sequence[GenerateEvent]:
        """The events for the end of one of several sequences."""
        index = ended.sequence_index
        events = self._end(index, ended.finish_reason, ended.stop_reason)
        return events if self._is_best_of else [*events, self._finished(index, index)]

    def finish(self, finish: Finish) -> Sequence[GenerateEvent]:
        """The events for the end of the request."""
        if len(self._sequences) == 1:
            return self._end(0, finish.finish_reason, finish.stop_reason)
        return self._choose() if self._is_best_of else ()

    def _give(self, index: int, chunk: Chunk) -> Sequence[GenerateEvent]:
        if self._is_best_of:
            self._sequences[index].keep(chunk, joins=self.joins_kept)
            return ()
        return (replace(chunk, sequence_index=index),) if index else (chunk,)

    def _end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> Sequence[GenerateEvent]:
        sequence = self._sequences[index]
        rest = sequence.end(finish_reason, stop_reason)
        return self._give(index, Chunk(sequence.text.num_tokens, (), rest)) if rest else ()

    def _finished(self, index: int, rank: int) -> SequenceFinished:
        sequence = self._sequences[index]
        return SequenceFinished(rank, sequence.finish_reason, sequence.stop_reason, sequence.text.num_tokens)

    def _choose(self) -> Sequence[GenerateEvent]:
        """The events of the most likely sequences, best first; among equals the smaller index comes first."""
        order = sorted(range(len(self._sequences)), key=lambda index: -self._sequences[index].cumulative_logprob)
        self._ranked = [self._sequences[index] for index in order]
        events: list[GenerateEvent] = []
        for rank, index in enumerate(order[: self._num_returned]):
            events += self._whole(self._sequences[index].kept, rank)
            if self._num_returned > 1:
                events.append(self._finished(index, rank))
        return events

    def _whole(self, chunks: Sequence[Chunk], rank: int) -> Sequence[Chunk]:
        """All tokens as one chunk, or as several if the text is parsed or has log-probabilities.

        Text that came without tokens stays a chunk, as it has its own position.
        """
        rest = [replace(chunk, sequence_index=rank) for chunk in chunks if not chunk.token_ids and chunk.text]
        chunks = [chunk for chunk in chunks if chunk.token_ids]
        if not chunks:
            return rest
        most = MAX_LOGPROBS_AT_ONCE if self._keeps_logprobs else MAX_PARSED_TOKENS if self._is_parsed else 0
        parts = [joined(piece) for piece in (_in_pieces(chunks, most) if most else [chunks])]
        for part in parts:
            part.sequence_index = rank
            if not self._keeps_logprobs:
                part.logprobs = ()
        return [*parts, *rest]


def _in_pieces(chunks: Sequence[Chunk], most: int) -> Sequence[Sequence[Chunk]]:
    """The chunks in groups, each of at most `most` tokens unless it is one chunk."""
    pieces: list[list[Chunk]] = []
    num_tokens = most
    for chunk in chunks:
        num_tokens += len(chunk.token_ids)
        if num_tokens > most:
            pieces.append([])
            num_tokens = len(chunk.token_ids)
        pieces[-1].append(chunk)
    return pieces


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

    def _whole(self, chunks: Sequence[Chunk], rank: int) -> Sequence[Chunk]:
        begin = self._begin[rank]
        following = super()._whole([chunk for chunk in chunks if chunk.next_position > begin], rank)
        before = [chunk for chunk in chunks if chunk.next_position <= begin]
        if not self._is_parsed or not before:
            return following
        return [*(replace(_known(chunk), sequence_index=rank) for chunk in before), *following]


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
