"""Tokens that a request's `allowed_token_ids` and `bad_words` exclude: a function of the output's tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.messages.sampling import SamplingParams


def has_rules(params: SamplingParams) -> bool:
    """Whether the parameters exclude tokens."""
    return bool(params.allowed_token_ids or params.bad_words_token_ids)


TokenIds = Sequence[int] | npt.NDArray[np.int64]
"""Prompt and output together."""


class TokenRules:
    """The rules of one request, in the form in which they are applied. Immutable."""

    def __init__(self, params: SamplingParams) -> None:
        self.allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        """The only tokens that may be sampled; empty: any."""
        words = params.bad_words_token_ids
        self._never = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._last_tokens: dict[int, list[tuple[list[int], int]]] = {}
        """Beginnings of words of several tokens, each with the token that completes it, by the beginning's last token:
        most steps look up one token, and compare nothing."""
        for *beginning, last in words:
            if beginning:
                self._last_tokens.setdefault(beginning[-1], []).append((beginning, last))

    def exclude(self, logits: npt.NDArray[np.float32], token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Set the logits of excluded tokens to minus infinity."""
        if self.allowed.size:
            kept = logits[self.allowed]
            logits.fill(-np.inf)
            logits[self.allowed] = kept
        logits[self.excluded(token_ids, num_prompt_tokens)] = -np.inf

    def excluded(self, token_ids: TokenIds, num_prompt_tokens: int) -> npt.NDArray[np.int64]:
        """The tokens that would complete a bad word; it counts only if all of it is in the output."""
        completing = []
        if len(token_ids) > num_prompt_tokens:
            for beginning, last in self._last_tokens.get(int(token_ids[-1]), ()):
                start = len(token_ids) - len(beginning)
                if start >= num_prompt_tokens and list(token_ids[start:]) == beginning:
                    completing.append(last)
        return np.append(self._never, completing) if completing else self._never
