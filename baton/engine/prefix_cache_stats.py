"""Counts of prefix cache lookups and hits, by where the KV was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from baton.values import value

Source = Literal["device", "host", "remote"]
"""Where KV was found: in the engine's device cache, in its host tier, or on another node."""


@value(frozen=True, slots=True)
class PrefixCacheStats:
    """Totals since start. A request counts at each admission, so a preempted one counts again.

    With prefix caching off there are no lookups, and only KV from another node counts as a hit.
    """

    num_requests: int
    """Requests that were looked up."""
    num_tokens: int
    """Tokens of the requests that were looked up."""
    num_hits: Mapping[Source, int]
    """For each source, the requests of which at least one token was found there."""
    num_hit_tokens: Mapping[Source, int]
    """For each source, the tokens that were found there."""


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
        return PrefixCacheStats(self._num_requests, self._num_tokens, dict(self._num_hits), dict(self._num_hit_tokens))
