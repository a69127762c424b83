"""Turns the engine's outputs into the deltas that routers are sent."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import EngineCoreOutput
from baton.messages.ids import AttemptKey
from baton.messages.node import Outcome, RequestDelta, StageTimings

_PART_BYTES = 4 << 20
"""About how many bytes of embeddings and of prompts' log-probabilities one report holds: a router takes no message of
more than 16 MiB."""
_LOGPROB_BYTES = 11
"""About the bytes of one log-probability in a message."""


def request_delta(
    key: AttemptKey,
    sequence_index: int,
    output: EngineCoreOutput,
    outcome: Outcome | None,
    timings: StageTimings | None = None,
    prompt_timings: StageTimings | None = None,
) -> RequestDelta:
    """The delta of one output of the engine."""
    return RequestDelta(
        key,
        output.first_index,
        output.new_token_ids,
        output.new_logprobs,
        outcome,
        output.stop_reason,
        output.error or "",
        timings,
        sequence_index,
        output.transfer_cause,
        output.embedding,
        prompt_logprobs=output.prompt_logprobs,
        draft_counts=output.draft_counts,
        prompt_timings=prompt_timings,
    )


def split_by_size(deltas: Sequence[RequestDelta]) -> list[Sequence[RequestDelta]]:
    """Divide deltas among reports, so that no report is too large; at least one report."""
    if sum(map(_num_bytes, deltas)) <= _PART_BYTES:
        return [deltas]
    parts: list[Sequence[RequestDelta]] = []
    part: list[RequestDelta] = []
    size = 0
    for delta in deltas:
        num_bytes = _num_bytes(delta)
        if part and size + num_bytes > _PART_BYTES:
            parts.append(part)
            part, size = [], 0
        part.append(delta)
        size += num_bytes
    return [*parts, part]


def _num_bytes(delta: RequestDelta) -> int:
    """About the bytes of what may be large in a delta."""
    positions = delta.prompt_logprobs
    return len(delta.embedding) + (len(positions) * (2 + len(positions[0].top)) * _LOGPROB_BYTES if positions else 0)
