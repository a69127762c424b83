"""One flight's output, put together from several legs and attempts in the order of its indices."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import StreamDiverged
from baton.messages.sampling import TokenLogprobs
from baton.values import value


@value(frozen=True, slots=True)
class TokenRun:
    """Tokens that follow the output so far without a gap."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


class OutputMerge:
    """What is known of the output. Each index is given out once, in order; what comes again is compared.

    A token is a function of the request alone, so a second attempt must repeat the first one's. One that does not is
    never mixed in.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}

    def begin_attempt(self) -> None:
        """Forget what came too early: the next attempt sends it again."""
        self._early.clear()

    def append(self, first_index: int, token_ids: Sequence[int]) -> bool:
        """Take tokens that follow the output so far while nothing came too early; False, and nothing taken, for others.

        They are complete at once. Nearly all tokens come so, and this costs a tenth of `add`.
        """
        if first_index != len(self.token_ids) or self._early:
            return False
        self.token_ids.extend(token_ids)
        return True

    def add(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> TokenRun | None:
        """Take tokens from a leg; the run that became complete, if any. Raises StreamDiverged."""
        for offset, token in enumerate(token_ids):
            index = first_index + offset
            known = self._known(index)
            if known is None:
                self._early[index] = (token, logprobs[offset] if offset < len(logprobs) else None)
            elif known != token:
                raise StreamDiverged(f"token {index} came back as {token} after {known} had been computed before")
        return self._close_gap()

    def _known(self, index: int) -> int | None:
        if index < len(self.token_ids):
            return self.token_ids[index]
        early = self._early.get(index)
        return None if early is None else early[0]

    def _close_gap(self) -> TokenRun | None:
        first = len(self.token_ids)
        logprobs: list[TokenLogprobs] = []
        while (entry := self._early.pop(len(self.token_ids), None)) is not None:
            self.token_ids.append(entry[0])
            if entry[1] is not None:
                logprobs.append(entry[1])
        if len(self.token_ids) == first:
            return None
        return TokenRun(first, tuple(self.token_ids[first:]), tuple(logprobs))
