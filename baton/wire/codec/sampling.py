"""Sampling parameters and log-probabilities: messages to Protocol Buffers and back."""

from __future__ import annotations

from collections.abc import Iterable

from baton.messages.sampling import RepetitionDetection, SamplingParams, TokenLogprobs
from baton.v1 import generation_pb2 as generation


def sampling_to_pb(params: SamplingParams) -> generation.SamplingParams:
    """A validated request's parameters, every field set: what routers send to nodes."""
    return generation.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        n=params.n,
        beam_width=params.beam_width or None,
        length_penalty=params.length_penalty if params.beam_width else None,
        early_stopping=params.early_stopping if params.beam_width else None,
        json_schema=params.json_schema or None,
        repetition_detection=repetition_to_pb(params.repetition_detection) if params.repetition_detection else None,
    )


def sampling_from_pb(pb: generation.SamplingParams) -> SamplingParams:
    """What a router sent; all fields are set there."""
    return SamplingParams(
        temperature=pb.temperature,
        top_k=pb.top_k,
        top_p=pb.top_p,
        min_p=pb.min_p,
        seed=pb.seed,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        repetition_penalty=pb.repetition_penalty,
        logit_bias=dict(pb.logit_bias),
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        max_tokens=pb.max_tokens,
        min_tokens=pb.min_tokens,
        stop_token_ids=frozenset(pb.stop_token_ids),
        ignore_eos=pb.ignore_eos,
        n=pb.n if pb.HasField("n") else 1,
        beam_width=pb.beam_width,
        length_penalty=pb.length_penalty if pb.HasField("length_penalty") else 1.0,
        early_stopping=pb.early_stopping,
        json_schema=pb.json_schema,
        repetition_detection=repetition_from_pb(pb),
    )


def repetition_to_pb(rule: RepetitionDetection) -> generation.RepetitionDetection:
    """What ends an output that repeats itself."""
    return generation.RepetitionDetection(
        max_pattern_size=rule.max_pattern_size, min_pattern_size=rule.min_pattern_size, min_count=rule.min_count
    )


def repetition_from_pb(pb: generation.SamplingParams) -> RepetitionDetection | None:
    """The same as it came, with defaults filled in; not checked."""
    if not pb.HasField("repetition_detection"):
        return None
    rule = pb.repetition_detection
    return RepetitionDetection(rule.max_pattern_size, rule.min_pattern_size or 1, rule.min_count or 2)


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


def logprobs_from_pb(pbs: Iterable[generation.PositionLogprobs]) -> list[TokenLogprobs]:
    """One value per output position."""
    return [
        TokenLogprobs(pb.token_id, pb.logprob, pb.rank, [(top.token_id, top.logprob) for top in pb.top]) for pb in pbs
    ]
