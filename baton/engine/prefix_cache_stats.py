"""How often a prompt's KV was there already, and where it was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from baton.values import value

Source = Literal["device", "host", "remote"]
"""The engine's own cache, its host tier, or another node."""


@value(frozen=True, slots=True)
class PrefixCacheStats:
    """Since start. A request counts at each admission, so a preempted one counts again.

    With prefix caching off nothing is looked up, and only what came from another node is a hit.
    """

    num_requests: int
    """Requests that were looked up."""
    num_tokens: int
    """Their tokens."""
    num_hits: Mapping[Source, int]
    """Requests of which anything was found there."""
    num_hit_tokens: Mapping[Source, int]


class PrefixCacheCounts:
    """The same while it is counted."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_tokens = 0
        self._num_hits: dict[Source, int] = {"device": 0, "host": 0, "remote": 0}
        self._num_hit_tokens: dict[Source, int] = {"device": 0, "host": 0, "remote": 0}

    def note_lookup(self, num_tokens: int) -> None:
        """A request of so many tokens was admitted."""
        self._num_requests += 1
        self._num_tokens += num_tokens

    def note_hit(self, source: Source, num_tokens: int) -> None:
        """So many of its tokens were found there; none is no hit."""
        if num_tokens:
            self._num_hits[source] += 1
            self._num_hit_tokens[source] += num_tokens

    def stats(self) -> PrefixCacheStats:
        """The counts now."""
        return PrefixCacheStats(self._num_requests, self._num_tokens, dict(self._num_hits), dict(self._num_hit_tokens))
