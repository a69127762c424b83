"""The codecs of sampling parameters and log-probabilities, to Protocol Buffers and back."""

from __future__ import annotations

from collections.abc import Iterable

from baton.messages.logprob_rows import LogprobRows, packed_row
from baton.messages.sampling import RepetitionDetection, SamplingParams, TokenLogprobs
from baton.v1 import generation_pb2 as generation
from baton.wire.codec.derived import Codec, FieldConversion

REPETITION_DETECTION = Codec(
    RepetitionDetection,
    generation.RepetitionDetection,
    FieldConversion("min_pattern_size", read=lambda size: size or 1),
    FieldConversion("min_count", read=lambda count: count or 2),
)
SAMPLING_PARAMS = Codec(
    SamplingParams,
    generation.SamplingParams,
    FieldConversion(
        "bad_words_token_ids",
        write=lambda words: [generation.TokenIds(ids=word) for word in words],
        read=lambda pbs: tuple(tuple(pb.ids) for pb in pbs),
    ),
    nested=(REPETITION_DETECTION,),
    message_only=("stop", "best_of", "include_stop_str_in_output", "bad_words"),
)
"""The parameters of a validated request, which a router sends to a node: all fields are set, and none is checked."""


def logprobs_to_pb(logprobs: Iterable[TokenLogprobs]) -> list[generation.PositionLogprobs]:
    """One message per output position."""
    return [
        generation.PositionLogprobs(
            token_id=position.token_id,
            logprob=position.logprob,
            rank=position.rank,
            top=[generation.TopLogprob(token_id=token, logprob=value) for token, value in position.top],
        )
        for position in logprobs
    ]


def logprobs_from_pb(pbs: Iterable[generation.PositionLogprobs]) -> LogprobRows:
    """One row per output position: a router keeps them until its client has read them, so they are packed at once."""
    return LogprobRows.of_rows([_row_of(pb) for pb in pbs])


def _row_of(pb: generation.PositionLogprobs) -> bytes:
    top: list[float] = []
    for entry in pb.top:
        top += (entry.token_id, entry.logprob)
    return packed_row(pb.token_id, pb.logprob, pb.rank, top)
