"""Turns the engine's outputs into the deltas that routers are sent."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import EngineCoreOutput
from baton.messages.ids import AttemptKey
from baton.messages.node import Outcome, RequestDelta, StageTimings

_EMBEDDINGS_BYTES = 4 << 20
"""About how many bytes of embeddings one report holds: a router takes no message of more than 16 MiB."""


def request_delta(
    key: AttemptKey,
    sequence_index: int,
    output: EngineCoreOutput,
    outcome: Outcome | None,
    timings: StageTimings | None = None,
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
    )


def split_by_size(deltas: Sequence[RequestDelta]) -> list[Sequence[RequestDelta]]:
    """Divide deltas among reports, so that no report has too many bytes of embeddings; at least one report."""
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
