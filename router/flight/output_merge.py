"""The output of one sequence, merged from several legs and attempts in the order of the tokens' indices."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import StreamDiverged
from baton.messages.logprob_rows import joined_logprobs
from baton.messages.sampling import TokenLogprobs
from baton.values import value


@value(frozen=True, slots=True)
class TokenRun:
    """Tokens that follow the output so far without a gap."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


class OutputMerge:
    """Merges the tokens of one sequence. Each index is given out once, in order; a token that comes again is compared.

    A token is a function of the request alone, so a later attempt must repeat the tokens of the earlier ones. One that
    does not is an error, and its tokens are never mixed in.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        """`is_held`: no token is given out before `release`, as if there were a gap before all."""
        self._is_held = is_held
        self.token_ids: list[int] = []
        """The output so far, without a gap."""
        self._early: dict[int, tuple[int, Sequence[TokenLogprobs]]] = {}
        """Tokens behind a gap, by index, each with its log-probabilities or none."""

    def begin_attempt(self) -> None:
        """Forget tokens behind a gap: the next attempt sends them again."""
        self._early.clear()

    def append(self, first_index: int, token_ids: Sequence[int]) -> bool:
        """Take tokens that continue the output while it has no gap, and return True; False: nothing was taken.

        Nearly all tokens come so, and this costs a tenth of `add`.
        """
        if first_index != len(self.token_ids) or self._early or self._is_held:
            return False
        self.token_ids.extend(token_ids)
        return True

    def add(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> TokenRun | None:
        """Take any tokens of a leg; returns those that now continue the output without a gap, if any.

        Raises StreamDiverged when a token differs from the known one of its index.
        """
        for offset, token in enumerate(token_ids):
            index = first_index + offset
            known = self._known(index)
            if known is None:
                self._early[index] = (token, logprobs[offset : offset + 1])
            elif known != token:
                raise StreamDiverged(f"token {index} came back as {token} after {known} had been computed before")
        return self._close_gap()

    def release(self) -> TokenRun | None:
        """Hold back nothing from now on; returns the tokens that were held back, if any."""
        self._is_held = False
        return self._close_gap()

    def _known(self, index: int) -> int | None:
        if index < len(self.token_ids):
            return self.token_ids[index]
        early = self._early.get(index)
        return None if early is None else early[0]

    def _close_gap(self) -> TokenRun | None:
        if self._is_held:
            return None
        first = len(self.token_ids)
        logprobs: list[Sequence[TokenLogprobs]] = []
        while (entry := self._early.pop(len(self.token_ids), None)) is not None:
            self.token_ids.append(entry[0])
            logprobs.append(entry[1])
        if len(self.token_ids) == first:
            return None
        return TokenRun(first, tuple(self.token_ids[first:]), joined_logprobs(logprobs))
