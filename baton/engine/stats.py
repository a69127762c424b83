"""What an engine counts since its start, and its metrics: counters, prefix cache hits, verified drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from baton.metric import Metric
from baton.values import value


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start. All parts of an engine count in one instance, which the scheduler's state has.

    A new metric is a field here and the line that counts it.
    """

    num_skipped_results: Annotated[
        int, Metric("skipped_results_total", "Results for requests that had ended meanwhile.")
    ] = 0
    """Results for requests that had ended or were never scheduled."""
    num_unknown_transfers: Annotated[
        int, Metric("unknown_transfers_total", "Transfer reports that no request waited for.")
    ] = 0
    num_connector_errors: Annotated[
        int, Metric("kv_connector_errors_total", "Calls of the KV connector that raised.")
    ] = 0
    num_encoded_inputs: Annotated[
        int, Metric("encoded_inputs_total", "Inputs (images, speech, texts) of which the encoder made rows.")
    ] = 0
    num_fetched_inputs: Annotated[
        int, Metric("fetched_inputs_total", "Inputs whose rows came from a node that had made them.")
    ] = 0
    num_encoder_hits: Annotated[
        int, Metric("encoder_cache_hits_total", "Inputs of prompts that were computed with rows made earlier.")
    ] = 0


Source = Literal["device", "host", "remote"]
"""Where KV was found: in the engine's device cache, in its host tier, or on another node."""


@value(frozen=True, slots=True)
class PrefixCacheStats:
    """Totals since start. A request counts at each admission, so a preempted one counts again.

    With prefix caching off there are no lookups, and only KV from another node counts as a hit.
    """

    num_tokens: Annotated[int, Metric("prefix_cache_queries_total", "Tokens of admitted requests.")]
    """Tokens of the requests that were looked up."""
    num_hit_tokens: Annotated[
        Mapping[Source, int],
        Metric(
            "prefix_cache_hits_total",
            "Tokens of admitted requests whose KV was there already, by source.",
            label="source",
        ),
    ]
    """For each source, the tokens that were found there."""
    num_requests: Annotated[int, Metric("prefix_cache_requests_total", "Admissions that searched for known KV.")]
    """Requests that were looked up."""
    num_hits: Annotated[
        Mapping[Source, int],
        Metric(
            "prefix_cache_request_hits_total",
            "Admitted requests of which some KV was there already, by source.",
            label="source",
        ),
    ]
    """For each source, the requests of which at least one token was found there."""


class PrefixCacheCounts:
    """The running counts from which `PrefixCacheStats` are made."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_tokens = 0
        self._num_hits: dict[Source, int] = {"device": 0, "host": 0, "remote": 0}
        self._num_hit_tokens: dict[Source, int] = {"device": 0, "host": 0, "remote": 0}

    def note_lookup(self, num_tokens: int) -> None:
        """Count the lookup of a request with `num_tokens` tokens."""
        self._num_requests += 1
        self._num_tokens += num_tokens

    def note_hit(self, source: Source, num_tokens: int) -> None:
        """Count a hit of `num_tokens` tokens; 0 tokens are no hit."""
        if num_tokens:
            self._num_hits[source] += 1
            self._num_hit_tokens[source] += num_tokens

    def stats(self) -> PrefixCacheStats:
        """The present counts as a value."""
        return PrefixCacheStats(self._num_tokens, dict(self._num_hit_tokens), self._num_requests, dict(self._num_hits))


@value(frozen=True, slots=True)
class SpecDecodingStats:
    """Totals over all steps of what `StepFigures` says of one: the drafts that were verified."""

    num_drafts: Annotated[int, Metric("spec_decode_num_drafts_total", "Drafts that were verified.")] = 0
    num_draft_tokens: Annotated[int, Metric("spec_decode_num_draft_tokens_total", "Tokens of these drafts.")] = 0
    num_accepted_tokens: Annotated[
        int, Metric("spec_decode_num_accepted_tokens_total", "Tokens of drafts that were right.")
    ] = 0
    num_accepted_tokens_per_pos: Annotated[
        Mapping[int, int],
        Metric(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Tokens of drafts that were right, by position in the draft.",
            label="position",
            keys=(0,),
        ),
    ] = field(default_factory=dict)
    """By position in the draft, counted from 0."""


class SpecDecodingCounts:
    """The running counts from which `SpecDecodingStats` are made."""

    def __init__(self) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted: list[int] = []
        """Right tokens by position."""

    def note(self, num_drafted: int, num_right: int) -> None:
        """Count a verified draft."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        self._accepted += [0] * (num_right - len(self._accepted))
        for position in range(num_right):
            self._accepted[position] += 1

    def stats(self) -> SpecDecodingStats:
        """The present counts as a value."""
        return SpecDecodingStats(
            self._num_drafts, self._num_draft_tokens, sum(self._accepted), dict(enumerate(self._accepted))
        )
