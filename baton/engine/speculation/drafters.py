"""The interface of what guesses the tokens that will follow a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Protocol

from baton.engine.constraints import TokenMatcher
from baton.errors import BatonError


class Drafter(Protocol):
    """Guesses the tokens that follow those of one sequence.

    A guess may be wrong, too short or empty: the runner verifies every token of it. It costs time and never quality.
    """

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append the sequence's next tokens; the first call has its prompt."""
        ...

    def draft(self, most: int) -> Sequence[int]:
        """Guess at most `most` tokens that follow all tokens so far."""
        ...


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


WINDOW = 1 << 14
"""The number of latest tokens among which occurrences are found; a power of two."""

_MAX_PLACES = 16
"""The most earlier places that one search compares."""

_MAX_INDEXED = 4096
"""The most tokens that one draft enters into the table. After a longer prompt the first drafts are empty."""

_MULTIPLIER = 0x9E3779B1
_HASH_BITS = 32
_MASK = (1 << _HASH_BITS) - 1
_SHIFT = _HASH_BITS - (WINDOW.bit_length() - 1)
"""By how much a hash is shifted to be below WINDOW; its highest bits are the best mixed ones."""


class NgramDrafter:
    """A `Drafter` for one sequence. Its memory is 4 bytes for each token, and 128 KiB from the first draft on."""

    def __init__(self, least: int, most: int, stop_ids: Collection[int] = ()) -> None:
        """At least `least` tokens must have occurred before; places are compared by at most `most` tokens.

        `stop_ids`: tokens that end the sequence, and so a draft.
        """
        self._least = least
        self._most = most
        self._stop_ids = stop_ids
        self._tokens = array("i")
        self.num_matched = 0
        """How many tokens the place of the last draft has in common with the end of the text."""
        self._num_indexed = 0
        """How many leading tokens have been entered into the table, each with those before it."""
        self._latest = array("i")
        """For each hash, the end of the latest place with it; -1: none."""
        self._earlier = array("i")
        """For each end of a place, modulo the window, the end of the place before it with the same hash; -1: none."""

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)

    def draft(self, most: int) -> Sequence[int]:
        tokens, end = self._tokens, len(self._tokens)
        self._index(end - 1)
        if self._num_indexed < end - 1 or end <= self._least:
            return ()
        place, longest = -1, self._least - 1
        candidate = self._latest[self._hash(end)]
        for _ in range(_MAX_PLACES):
            if candidate <= end - WINDOW or candidate < self._least:
                break
            length = self._num_common(candidate, end)
            if length > longest:
                place, longest = candidate, length
                if length == self._most:
                    break
            candidate = self._earlier[candidate % WINDOW]
        if place < 0:
            return ()
        self.num_matched = longest
        # Where the place and the end overlap, the text repeats itself, and may go on doing so.
        period = end - place
        drafted: list[int] = []
        for offset in range(most):
            drafted.append(tokens[place + offset % period])
            if drafted[-1] in self._stop_ids:
                break
        return drafted

    def _num_common(self, place: int, end: int) -> int:
        """How many tokens before `place` equal those before `end`, up to `most`."""
        tokens = self._tokens
        most = min(self._most, place)
        for length in range(most):
            if tokens[place - 1 - length] != tokens[end - 1 - length]:
                return length
        return most

    def _index(self, stop: int) -> None:
        """Enter the tokens before `stop` that are not in the table yet, as far as one call may."""
        if not self._latest:
            self._latest = array("i", [-1]) * WINDOW
            self._earlier = array("i", [-1]) * WINDOW
        # Tokens that have left the window would not be found.
        start = max(self._num_indexed, stop - WINDOW, 0)
        stop = min(stop, start + _MAX_INDEXED)
        latest, earlier = self._latest, self._earlier
        for end in range(max(start + 1, self._least), stop + 1):
            key = self._hash(end)
            earlier[end % WINDOW] = latest[key]
            latest[key] = end
        self._num_indexed = max(self._num_indexed, stop)

    def _hash(self, end: int) -> int:
        """The hash of the `least` tokens before `end`, below WINDOW."""
        key = 0
        for token_id in self._tokens[end - self._least : end]:
            key = (key ^ token_id) * _MULTIPLIER & _MASK
        return key >> _SHIFT
