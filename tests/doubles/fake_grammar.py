"""The fake of `TokenMatcher`: a grammar that is a set of tokens for each position."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from baton.errors import EngineFault, InvalidRequest


class FakeMatcher:
    """A grammar in which output token i must be in `allowed[i]`, and all further tokens in `end`."""

    def __init__(
        self,
        allowed: Sequence[Collection[int]],
        end: Collection[int],
        too_complex_at: int = -1,
        mean_seconds: float = 0.0,
    ) -> None:
        """`too_complex_at`: the position at which `fill` raises InvalidRequest, as for a too complex grammar.

        `mean_seconds`: what each call of `fill` takes, as far as others can know.
        """
        self._untaken_s = 0.0
        self._allowed = allowed
        self._end = end
        self._too_complex_at = too_complex_at
        self.mean_seconds = mean_seconds
        self.tokens: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def next_tokens(self) -> Collection[int]:
        """The tokens that are allowed at the next position."""
        return self._allowed[len(self.tokens)] if len(self.tokens) < len(self._allowed) else self._end

    def take_seconds(self) -> float:
        seconds, self._untaken_s = self._untaken_s, 0.0
        return seconds

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id not in self.next_tokens:
                raise EngineFault(f"json_schema: token {token_id} may not follow {self.tokens}")
            self.tokens.append(int(token_id))

    def forced_tokens(self) -> Sequence[int]:
        following = self._allowed[len(self.tokens) :]
        return [token for allowed in takewhile(lambda allowed: len(allowed) == 1, following) for token in allowed]

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        self._untaken_s += self.mean_seconds
        if len(self.tokens) == self._too_complex_at:
            raise InvalidRequest("json_schema", "too complex")
        bits = np.zeros(mask.size * 32, dtype=np.uint8)
        bits[list(self.next_tokens)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
