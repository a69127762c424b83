"""Drafts from a grammar: the tokens that it forces, such as the keys of a JSON schema's objects."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.sampling.grammar import TokenMatcher
from baton.errors import BatonError


class ForcedDrafter:
    """A `Drafter` for one sequence with a grammar, from the sequence's own matcher.

    The runner uses the matcher, too: `draft` may be called only while no step with the sequence is in flight.
    """

    def __init__(self, matcher: TokenMatcher, output_token_ids: Sequence[int]) -> None:
        """`output_token_ids`: the sequence's output so far; it may grow until `draft` is called."""
        self._matcher = matcher
        self._output_token_ids = output_token_ids

    def extend(self, token_ids: Sequence[int]) -> None:
        return

    def draft(self, most: int) -> Sequence[int]:
        try:
            self._matcher.advance(self._output_token_ids[self._matcher.num_tokens :])
            return self._matcher.forced_tokens()[:most]
        except BatonError:
            return ()  # the runner meets the same error when it samples, and ends the request with it
