"""What routers are told of the outputs of requests."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import EngineCoreOutput
from baton.messages.ids import AttemptKey
from baton.messages.node import Outcome, RequestDelta, StageTimings

_EMBEDDINGS_BYTES = 4 << 20
"""Of one report, about: a router takes no message of more than 16 MiB."""


def request_delta(
    key: AttemptKey,
    sequence_index: int,
    output: EngineCoreOutput,
    outcome: Outcome | None,
    timings: StageTimings | None = None,
) -> RequestDelta:
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
    )


def in_parts(deltas: Sequence[RequestDelta]) -> list[Sequence[RequestDelta]]:
    """In reports of their own where their vectors are too much for one; one at least."""
    if sum([len(delta.embedding) for delta in deltas]) <= _EMBEDDINGS_BYTES:
        return [deltas]
    parts: list[Sequence[RequestDelta]] = []
    part: list[RequestDelta] = []
    size = 0
    for delta in deltas:
        if part and size + len(delta.embedding) > _EMBEDDINGS_BYTES:
            parts.append(part)
            part, size = [], 0
        part.append(delta)
        size += len(delta.embedding)
    return [*parts, part]
