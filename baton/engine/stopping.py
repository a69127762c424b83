"""Whether a request stops at its last token. Stop strings are found by the router, since they need text."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.request import Request
from baton.messages.node import Outcome


@dataclass(frozen=True, slots=True)
class Stop:
    """How a request ends at its last token.

    `stop_reason`: the stop token's id; None for an end-of-sequence token and for length. `error`: the message for an
    output that repeats itself.
    """

    outcome: Outcome
    stop_reason: int | None = None
    error: str | None = None


_AT_EOS = Stop(Outcome.STOP)
_AT_LENGTH = Stop(Outcome.LENGTH)


def max_output_tokens(request: Request, max_model_len: int) -> int:
    """The most output tokens that the request and the model's length permit."""
    return min(request.sampling_params.max_tokens, max_model_len - request.num_prompt_tokens)


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """Whether and how the last output token ends the request; below min_tokens only length and repetition can."""
    params = request.sampling_params
    num_output_tokens = len(request.output_token_ids)
    pattern_size = (
        request.repetition.repeated_pattern_size(request.output_token_ids) if request.repetition is not None else 0
    )
    if num_output_tokens >= params.min_tokens:
        token_id = request.output_token_ids[-1]
        if not params.ignore_eos and token_id in request.eos_token_ids:
            return _AT_EOS
        if token_id in params.stop_token_ids:
            return Stop(Outcome.STOP, token_id)
    if pattern_size:
        return _at_repetition(request, pattern_size)
    if num_output_tokens >= params.max_tokens or request.num_tokens >= max_model_len:
        return _AT_LENGTH
    return None


def _at_repetition(request: Request, pattern_size: int) -> Stop:
    rule = request.sampling_params.repetition_detection
    times = rule.min_count if rule is not None else 0
    size = f"{pattern_size} tokens" if pattern_size > 1 else "token"
    return Stop(Outcome.REPETITION, error=f"the output repeats itself: its last {size} came {times} times in a row")
