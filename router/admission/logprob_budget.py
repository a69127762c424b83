"""Bounds the memory that log-probabilities of all live requests take together.

A request reserves, before anything is allocated for it, the bytes of all log-probabilities that a router may have to
keep for it at once. An answer that is sent when it is complete keeps all of them, and so does one of which the best
sequences are chosen. `/v1/responses` keeps all of them in JSON. A stream keeps the latest ones, for a client that comes
back, and those that its client has not read; if more than `UNREAD_TOKENS` of each sequence are unread, it reserves
more.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from baton.errors import InvalidRequest, LogprobsFull
from baton.messages.generation import Delivery
from baton.messages.logprob_rows import BLOCK_ROWS, row_bytes
from router.admission.request import ValidRequest

KEPT_TOKENS = 1024
"""So many of the latest tokens of each sequence keep their log-probabilities until a stream has ended."""
_MOST_KEPT = KEPT_TOKENS + BLOCK_ROWS
"""Older ones are forgotten a block at a time."""
UNREAD_TOKENS = 256
"""For so many unread tokens of each sequence a stream reserves memory at its beginning. `/v1/responses`, which keeps
all tokens, does so for as many."""
_JSON_BYTES = 110
"""What one log-probability takes in JSON, with its token as text and as a list of bytes."""


@dataclass(slots=True)
class LogprobReservation:
    """What one request has reserved."""

    num_bytes: int = 0
    bytes_each: int = 0
    """For one more token; 0: the request has reserved all that it may ever need."""
    num_covered: int = 0
    """For so many tokens, of all sequences together, memory is reserved: unread ones, or all that came."""
    most_covered: int = 0
    """The most tokens for which the request may need memory."""
    keeps_all: bool = False
    """Whether all tokens that came are kept, and not only unread ones."""


class LogprobBudget:
    """The log-probabilities of the live requests of one router."""

    def __init__(self, most: int, rng: Random) -> None:
        """`most`: the bytes that all reservations may come to."""
        self._most = most
        self._rng = rng
        self.num_bytes = 0
        """Bytes that are reserved now."""

    def reserve(self, request: ValidRequest, delivery: Delivery) -> LogprobReservation:
        """Reserve memory for a request, which `release` gives back.

        Raises InvalidRequest if the request needs more than there is for all, and LogprobsFull if the others leave too
        little.
        """
        reservation = reservation_for(request, delivery)
        needed = reservation.num_bytes
        if needed > self._most:
            raise InvalidRequest(
                "prompt_logprobs" if _is_of_prompt(request, needed) else "logprobs",
                f"of this request may take {needed} bytes, and those of all requests {self._most} (--logprob-memory): "
                f"{_how_to_need_less(request, delivery, needed)}",
            )
        if needed and self.num_bytes + needed > self._most:
            raise LogprobsFull(
                f"log-probabilities of this request may take {needed} bytes, and {self._most - self.num_bytes} of "
                f"{self._most} (--logprob-memory) are free: try again later, or "
                f"{_how_to_need_less(request, delivery, needed)}",
                self._rng.uniform(0.75, 1.25),
            )
        self.num_bytes += needed
        return reservation

    def covers(self, reservation: LogprobReservation, num_tokens: int) -> bool:
        """Whether memory for so many tokens is reserved, or could be reserved now.

        The tokens are those that came if all are kept, and otherwise the unread ones.
        """
        if not reservation.bytes_each or num_tokens <= reservation.num_covered:
            return True
        room = (self._most - self.num_bytes) // reservation.bytes_each
        doubled = min(2 * reservation.num_covered, reservation.most_covered)
        if num_tokens - reservation.num_covered > room:
            return False
        if doubled > num_tokens and doubled - reservation.num_covered <= room:
            num_tokens = doubled
        more = (num_tokens - reservation.num_covered) * reservation.bytes_each
        reservation.num_covered = num_tokens
        reservation.num_bytes += more
        self.num_bytes += more
        return True

    def full(self, reservation: LogprobReservation) -> LogprobsFull:
        """The error that ends a request for which `covers` found no memory, and whose tokens are all kept."""
        return LogprobsFull(
            f"log-probabilities of the {reservation.num_covered} tokens so far take {reservation.num_bytes} bytes, and "
            f"for more of them no memory is left of {self._most} (--logprob-memory): try again later, or ask for fewer "
            "tokens or alternatives",
            self._rng.uniform(0.75, 1.25),
        )

    def release(self, reservation: LogprobReservation) -> None:
        """Give the memory of a request back. Idempotent."""
        self.num_bytes -= reservation.num_bytes
        reservation.num_bytes = reservation.bytes_each = 0


def reservation_for(request: ValidRequest, delivery: Delivery) -> LogprobReservation:
    """What a request needs at its beginning."""
    params, of_prompt = request.sampling_params, _prompt_bytes(request)
    if params.logprobs is None or request.embeds:
        return LogprobReservation(of_prompt)
    per_token, longest = row_bytes(params.logprobs), params.max_tokens
    if delivery == "json":
        per_token, first = per_token + _JSON_BYTES * (1 + params.logprobs), params.n * min(longest, UNREAD_TOKENS)
        return LogprobReservation(of_prompt + first * per_token, per_token, first, params.n * longest, keeps_all=True)
    is_best_of = request.num_returned < params.n
    if delivery == "whole" or is_best_of:
        kept = 0 if delivery == "whole" else min(longest, _MOST_KEPT)
        return LogprobReservation(of_prompt + params.n * (longest + kept) * per_token)
    if longest <= BLOCK_ROWS:  # what is unread is what is kept
        return LogprobReservation(of_prompt + params.n * longest * per_token)
    kept, unread = min(longest, _MOST_KEPT), min(longest, UNREAD_TOKENS)
    num_bytes = of_prompt + params.n * (kept + unread) * per_token
    return LogprobReservation(num_bytes, per_token if unread < longest else 0, params.n * unread, params.n * longest)


def _prompt_bytes(request: ValidRequest) -> int:
    num_top = request.sampling_params.prompt_logprobs
    return 0 if num_top is None else max(0, request.num_prompt_tokens - 1) * row_bytes(num_top)


def _is_of_prompt(request: ValidRequest, needed: int) -> bool:
    """Whether most of what a request needs is for its prompt."""
    return 2 * _prompt_bytes(request) > needed


def _how_to_need_less(request: ValidRequest, delivery: Delivery, needed: int) -> str:
    """What a client may change. APIs have different fields for it, so it names none."""
    params = request.sampling_params
    if _is_of_prompt(request, needed):
        return "ask for fewer alternatives, or with a shorter prompt"
    is_shorter_as_stream = delivery == "whole" and request.num_returned == params.n and params.max_tokens > _MOST_KEPT
    return f"ask for fewer alternatives, tokens or sequences{', or for a stream' if is_shorter_as_stream else ''}"
