"""The drafts of one request: its drafters, and how long each one's drafts are, from how often they were right."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from typing import Protocol

from baton.engine.constraints import TokenMatcher
from baton.engine.request import Request
from baton.engine.speculation.step_cost import Prices
from baton.errors import BatonError
from baton.messages.speculation import SpeculationConfig


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
        best, longest = -1, self._least - 1
        candidate = self._latest[self._hash(end)]
        for _ in range(_MAX_PLACES):
            if candidate <= end - WINDOW or candidate < self._least:
                break
            length = self._num_common(candidate, end)
            if length > longest:
                best, longest = candidate, length
                if length == self._most:
                    break
            candidate = self._earlier[candidate % WINDOW]
        if best < 0:
            return ()
        self.num_matched = longest
        # Where the earlier place and the end overlap, the text repeats itself, and may go on doing so.
        period = end - best
        drafted: list[int] = []
        for offset in range(most):
            drafted.append(tokens[best + offset % period])
            if drafted[-1] in self._stop_ids:
                break
        return drafted

    def _num_common(self, start: int, end: int) -> int:
        """How many tokens before `start` equal those before `end`, up to `most`."""
        tokens = self._tokens
        most = min(self._most, start)
        for length in range(most):
            if tokens[start - 1 - length] != tokens[end - 1 - length]:
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


_MEMORY = 0.85
"""The weight of earlier drafts against that of one token later."""
_LARGEST_SHARE = 0.99
"""The largest share of right drafts that is counted on, since none is certain."""
_FIRST_TRIED = 2.0
"""The weight of what is assumed of a new sequence, in drafted tokens."""


class DraftLength:
    """Adapts the length of one sequence's drafts.

    With p, the share of drafted tokens that were right, weighted towards the latest, the i-th token of a draft is right
    with p to the power of i. A draft is as long as this is at least the price of computing one token more. Where no
    token is worth its price, drafting pauses, each time for twice as long.
    """

    def __init__(self, most: int, longest_pause: int, assumed_share: float) -> None:
        """At most `most` tokens a draft. After at most `longest_pause` steps without one, a token is drafted again.

        `assumed_share`: the share of drafted tokens that are assumed to be right, until some have been verified.
        """
        self._most = most
        self._longest_pause = longest_pause
        self._right = assumed_share * _FIRST_TRIED
        self._tried = _FIRST_TRIED
        self._pause = 0
        self._num_to_skip = 0

    def next(self, price: float) -> int:
        """The number of tokens to draft now. To be called once for each step of the sequence.

        `price`: what computing one token more costs, as a share of what a sampled token is worth, above 0.
        """
        if price >= 1.0:
            return 0
        if self._num_to_skip:
            self._num_to_skip -= 1
            return 0
        share = min(_LARGEST_SHARE, self._right / self._tried)
        if share < price:
            return 1  # a pause has ended, and one token tells whether drafts are right again
        return min(self._most, max(1, int(math.log(price) / math.log(share))))

    def verified(self, num_drafted: int, num_right: int, price: float) -> None:
        """Note the fate of a draft. Tokens behind the first wrong one tell nothing."""
        for is_right in [True] * num_right + [False] * (num_right < num_drafted):
            self._right = self._right * _MEMORY + is_right
            self._tried = self._tried * _MEMORY + 1
        if num_right == num_drafted or self._right / self._tried >= price:
            self._pause = 0
        else:
            self.missed()

    def missed(self) -> None:
        """Pause, since drafts are not worth their price, or there was nothing to draft."""
        self._pause = min(self._longest_pause, max(1, 2 * self._pause))
        self._num_to_skip = self._pause


_PAUSE_OF_GRAMMAR = 4
"""The most tokens after which a grammar is asked again what it forces. What it forces is nearly always right, and may
begin at any token."""
_SHARE_OF_GRAMMAR = 0.9
"""The share of forced tokens that are assumed to be right: the same text may be written with other tokens."""
_PAUSE_OF_TEXT = 128
"""The most tokens without a draft from the text, after the last ones were wrong."""
_SHARES_OF_TEXT = ((8, 0.85), (5, 0.6), (0, 0.35))
"""The share of drafts from the text that are assumed to be right, by the least number of tokens that have occurred
before: the more, the likelier does the same follow. Each kind is adapted by itself."""
PAUSE_OF_MODEL = 128
"""The most tokens without a draft from the draft model, after its last ones were not worth their price."""
SHARE_OF_MODEL = 0.6
"""The share of the draft model's tokens that are assumed to be right."""


class RequestDrafts:
    """Drafts what a request's grammar forces or, where it forces nothing, what followed its last tokens before.

    With a draft model the drafts are those of the model instead of the text's; the runner makes them one step earlier.
    """

    def __init__(self, request: Request, config: SpeculationConfig) -> None:
        most = config.num_speculative_tokens
        self._request = request
        self._grammar: Drafter | None = None
        if request.matchers:
            self._grammar = ForcedDrafter(request.matchers[0], request.output_token_ids)
        self._text: NgramDrafter | None = None
        if config.method == "ngram":
            self._text = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, request.stop_ids)
        self._model_length: DraftLength | None = None
        # A draft model would read placeholders as text.
        if config.method == "draft_model" and not request.spans:
            self._model_length = DraftLength(most, PAUSE_OF_MODEL, SHARE_OF_MODEL)
        self.num_wanted = 0
        """How many tokens the draft model is to draft behind the next step's."""
        self._most = most
        self._grammar_length = DraftLength(most, _PAUSE_OF_GRAMMAR, _SHARE_OF_GRAMMAR)
        self._text_lengths = [DraftLength(most, _PAUSE_OF_TEXT, share) for _, share in _SHARES_OF_TEXT]
        self._text_length = self._text_lengths[0]
        """The length that the draft from the text has."""
        self._num_followed = request.spans[-1].stop if request.spans else 0
        """Tokens that were looked at, or are in front of the text behind the last span."""
        self._num_forced = 0
        """How many forced tokens to ask the grammar for."""
        self._repeated: Sequence[int] = ()
        """The draft from the text."""
        self._modelled: Sequence[int] = ()
        """The draft of the draft model."""
        self._latest: DraftLength | None = None
        """What the length of the latest draft came from; None: the draft was not made here."""

    def model_missed(self) -> None:
        """Ask the draft model less often, since it was asked and can't draft."""
        if self._model_length is not None:
            self._model_length.missed()

    def follow(self, prices: Prices, modelled: Sequence[int] = ()) -> bool:
        """Note the request's new tokens. Returns whether there may be a draft, once no step is in flight.

        `modelled`: what the draft model guesses to follow the new tokens.
        """
        request, self._latest, self._modelled = self._request, None, modelled
        if self._model_length is not None:
            self.num_wanted = self._model_length.next(prices.model)
        if self._text is not None:
            self._text.extend(request.token_ids(self._num_followed, request.num_tokens))
            self._num_followed = request.num_tokens
            self._repeated = self._text.draft(self._most)
            if self._repeated:
                kind = next(kind for kind, (least, _) in enumerate(_SHARES_OF_TEXT) if self._text.num_matched >= least)
                self._text_length = self._text_lengths[kind]
                self._repeated = self._repeated[: self._text_length.next(prices.row)]
        self._num_forced = self._grammar_length.next(prices.row) if self._grammar is not None else 0
        return bool(self._num_forced or self._repeated or self._modelled)

    def draft(self) -> Sequence[int]:
        """The draft behind the tokens that `follow` has noted. Only while no step with the request is in flight."""
        if self._grammar is not None and self._num_forced:
            forced = self._grammar.draft(self._num_forced)
            if forced:
                self._latest = self._grammar_length
                return forced
            self._grammar_length.missed()
        if self._model_length is not None:
            self._latest = self._model_length
            return self._modelled
        self._latest = self._text_length
        return self._repeated

    def verified(self, num_drafted: int, num_right: int, prices: Prices) -> None:
        """Note the fate of the latest draft."""
        if self._latest is not None:
            price = prices.model if self._latest is self._model_length else prices.row
            self._latest.verified(num_drafted, num_right, price)
