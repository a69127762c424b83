"""Counts of prefix cache lookups and hits, by where the KV was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from baton.metric import Metric
from baton.values import value

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
