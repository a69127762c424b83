"""Tokens that a request's `allowed_token_ids` and `bad_words` exclude: a function of the output's tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.messages.sampling import SamplingParams


def has_rules(params: SamplingParams) -> bool:
    """Whether the parameters exclude tokens."""
    return bool(params.allowed_token_ids or params.bad_words_token_ids)


class TokenRules:
    """The rules of one request, in the form in which they are applied. Immutable."""

    def __init__(self, params: SamplingParams) -> None:
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        words = params.bad_words_token_ids
        self._never = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._last_tokens: dict[int, list[tuple[list[int], int]]] = {}
        """Beginnings of words of several tokens, each with the token that completes it, by the beginning's last token:
        most steps look up one token, and compare nothing."""
        for *beginning, last in words:
            if beginning:
                self._last_tokens.setdefault(beginning[-1], []).append((beginning, last))

    def exclude(
        self,
        logits: npt.NDArray[np.float32],
        token_ids: Sequence[int] | npt.NDArray[np.int64],
        num_prompt_tokens: int,
    ) -> None:
        """Set the logits of excluded tokens to minus infinity. A word counts only if all of it is in the output."""
        if self._allowed.size:
            kept = logits[self._allowed]
            logits.fill(-np.inf)
            logits[self._allowed] = kept
        logits[self._never] = -np.inf
        if len(token_ids) == num_prompt_tokens:
            return
        for beginning, last in self._last_tokens.get(int(token_ids[-1]), ()):
            start = len(token_ids) - len(beginning)
            if start >= num_prompt_tokens and list(token_ids[start:]) == beginning:
                logits[last] = -np.inf
