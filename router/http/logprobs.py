"""Writes log-probabilities in the formats of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.messages.sampling import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have; as in vLLM."""

Spelling = Callable[[int], bytes]
"""The bytes that a token stands for, or a name of the token."""


def as_token_id(token_id: int) -> bytes:
    """A token's spelling that tells tokens with the same text apart; as in vLLM."""
    return b"token_id:%d" % token_id


def unknown(token_id: int) -> TokenLogprobs:
    """The position of a token that has no log-probability, as the first one of a prompt: its rank is 0."""
    return TokenLogprobs(token_id, 0.0, 0, ())


def prompt_entries(positions: Sequence[TokenLogprobs], spelling: Spelling) -> list[dict[int, dict[str, Any]]]:
    """Log-probabilities of a prompt as vLLM writes them: at each position the token itself, then the likeliest."""
    found = []
    for position in positions:
        ranked = {position.token_id: (position.rank, position.logprob)}
        for rank, (token_id, logprob) in enumerate(position.top, 1):
            ranked.setdefault(token_id, (rank, logprob))
        found.append(
            {
                token_id: {"logprob": _finite(logprob), "rank": rank, "decoded_token": _text(spelling(token_id))}
                for token_id, (rank, logprob) in ranked.items()
            }
        )
    return found


class CompletionLogprobs:
    """The log-probabilities of one sequence of /v1/completions, piece by piece, as parallel lists."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._offset = 0

    def take(self, positions: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The lists for the next positions; some may be `unknown`. Offsets count characters of the spellings."""
        tokens = [_text(self._spelling(position.token_id)) for position in positions]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(position.logprob) if position.rank else None for position in positions],
            "top_logprobs": [self._top(position) if position.rank else None for position in positions],
            "text_offset": offsets,
        }

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in _top_and_drawn(position):
            # Among tokens with the same text, the most likely one counts.
            found.setdefault(_text(self._spelling(token_id)), _finite(logprob))
        return found


class ChatLogprobs:
    """The log-probabilities of one sequence of /v1/chat/completions, piece by piece, as an object for each token."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def take(self, positions: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The list for the next positions."""
        return {
            "content": [
                self._entry(position.token_id, position.logprob)
                | {"top_logprobs": [self._entry(token, logprob) for token, logprob in position.top]}
                for position in positions
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelling = self._spelling(token_id)
        return {"token": _text(spelling), "logprob": _finite(logprob), "bytes": list(spelling)}


def _top_and_drawn(position: TokenLogprobs) -> Sequence[tuple[int, float]]:
    """The most likely tokens of a position, and the token that was drawn, each with its log-probability."""
    if any(token == position.token_id for token, _ in position.top):
        return position.top
    return (*position.top, (position.token_id, position.logprob))


def _text(spelling: bytes) -> str:
    return spelling.decode(errors="replace")


def _finite(logprob: float) -> float:
    # NaN becomes the least one, too.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
