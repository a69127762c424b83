"""From logits to tokens, one row at a time: a row's token is a function of its logits, its request and its position.

As in vLLM V1: log-probabilities from the raw logits; then logit_bias, penalties, min_tokens, allowed_token_ids,
bad_words; then greedy, or temperature, top_n_sigma (which vLLM lacks), min_p, top_k, top_p and one draw by inverse
transform. Tokens that a grammar does not allow have a logit of minus infinity, in the log-probabilities as well. The
draw for output position i uses one random number that is a function of (seed, i) alone (philox.py), so any node samples
the same token. Everything runs in numpy on one thread, so that the number of threads can't change the order of a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, EngineFault, InvalidRequest
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.runner.execution.philox import uniform
from baton.runner.execution.token_counts import TokenCounts
from baton.runner.execution.token_rules import TokenRules, has_rules
from baton.values import value

Row = npt.NDArray[np.float32]
Mask = npt.NDArray[np.int32]

_FOLD = 8
"""Number of tokens of which only the maximum is compared at first, in the search for the heaviest tokens."""

_FIRST_LOOK = 1024
"""How many of the best tokens are sorted first for top_p: nearly always enough; otherwise all tokens are sorted."""


@value(frozen=True, slots=True)
class SamplingState:
    """Everything but the logits on which the token of one row depends."""

    params: SamplingParams
    token_ids: Sequence[int] | npt.NDArray[np.int64]
    """Prompt and output together; not copied."""
    num_prompt_tokens: int
    eos_token_ids: frozenset[int]
    mask: Mask | None = None
    """A bit for each token that may be sampled, lowest bit of the first word first; None: all may be."""
    rules: TokenRules | None = None
    """The rules that follow from `params`, if the caller keeps them."""
    counts: TokenCounts | None = None
    """The counts of `token_ids`, if the caller keeps them; None: penalties count the tokens anew."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@value(frozen=True, slots=True)
class Sampled:
    """The result for one row. If `error` is set, no token could be sampled."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: BatonError | None = None
    """InvalidRequest if the request's parameters leave no token."""


class Sampler(Protocol):
    """Draws tokens from logits, where these are."""

    is_on_device: bool
    """Whether it takes tensors of the device that computes the model, too, and not only numpy's arrays."""

    def sample(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """Draw one token per row. `logits` is float32 [rows, vocabulary], `states` one per row.

        Rows with a non-finite value get a result with `error`; they don't affect the other rows. On return a device has
        computed all that was started before.
        """
        ...


class HostSampler:
    """Draws in numpy."""

    is_on_device = False

    def sample(self, logits: npt.NDArray[np.float32], states: Sequence[SamplingState]) -> list[Sampled]:
        return sample(logits, states)


def sample(logits: npt.NDArray[np.float32], states: Sequence[SamplingState]) -> list[Sampled]:
    """See `Sampler.sample`."""
    finite = _finite_rows(logits)
    best = logits.argmax(axis=1).tolist()
    results = []
    for row, state in enumerate(states):
        if not finite[row]:
            results.append(Sampled(-1, error=not_finite()))
        elif is_plain_greedy(state):
            results.append(Sampled(best[row]))
        else:
            results.append(sample_row(logits[row], state))
    return results


def _finite_rows(logits: npt.NDArray[np.float32]) -> list[bool]:
    """Which rows have neither NaN nor infinity. The sum of a row tells, unless finite numbers overflow it."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite: list[bool] = np.isfinite(logits.sum(axis=1)).tolist()
    return [known or bool(np.isfinite(logits[row]).all()) for row, known in enumerate(finite)]


def is_plain_greedy(state: SamplingState) -> bool:
    """Whether the row's token is the one with the largest logit, and no log-probabilities are wanted."""
    params = state.params
    return params.is_greedy and params.logprobs is None and state.mask is None and not _is_processed(state)


def sample_row(logits: Row, state: SamplingState) -> Sampled:
    """Draw one token from finite float32 logits [vocabulary]."""
    params = state.params
    processed = process(logits, state) if _is_processed(state) else logits
    if state.mask is not None:
        # The mask is applied last, so that no bias can bring back a token that it excludes.
        processed = _masked(processed, state.mask)
    if processed is not logits and processed.max() == -np.inf:
        return Sampled(-1, error=no_token_left(params))
    if params.is_greedy:
        token_id = int(processed.argmax())
    else:
        token_ids, probabilities = distribution(processed, params)
        number = uniform(params.seed, state.num_output_tokens)
        token_id = _draw(token_ids, probabilities, number)
    if params.logprobs is None:
        return Sampled(token_id)
    possible = logits if state.mask is None else _masked(logits, state.mask)
    return Sampled(token_id, token_logprobs(possible, token_id, params.logprobs))


def _masked(row: Row, mask: Mask) -> Row:
    allowed = np.unpackbits(mask.view(np.uint8), count=row.size, bitorder="little").view(np.bool_)
    return np.where(allowed, row, np.float32(-np.inf))


def _is_processed(state: SamplingState) -> bool:
    params = state.params
    return bool(
        params.logit_bias or has_penalties(params) or state.num_output_tokens < params.min_tokens or has_rules(params)
    )


def not_finite() -> EngineFault:
    """The error of a row with a logit that is not finite."""
    return EngineFault("the model produced non-finite logits")


def no_token_left(params: SamplingParams) -> InvalidRequest:
    """The error of a request whose parameters together exclude every token, named after the first of them."""
    given = {
        "min_tokens": params.min_tokens,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_token_ids,
    }
    fields = [params.constraint_kind or "", *(name for name, value in given.items() if value)]
    field, *others = [name for name in fields if name]
    return InvalidRequest(
        field, "leaves no token that may follow" + (f", with {' and '.join(others)}" if others else "")
    )


def has_penalties(params: SamplingParams) -> bool:
    """Whether a choice depends on how often each token occurred."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def process(logits: Row, state: SamplingState) -> Row:
    """A new row with logit_bias, the penalties, min_tokens, allowed_token_ids and bad_words applied.

    A bias beyond float32's range is infinite: the token is always sampled (of several the first), or never. No bias
    permits a token that another parameter excludes.
    Penalties as vLLM defines them: repetition divides positive and multiplies negative logits of every token in prompt
    or output; frequency subtracts per occurrence in the output, presence once if there is one.
    """
    params = state.params
    row = logits.astype(np.float32, copy=True)
    counts = state.counts
    if counts is None and has_penalties(params):
        counts = TokenCounts(state.token_ids, state.num_prompt_tokens)
    with np.errstate(over="ignore"):
        for token_id, bias in params.logit_bias.items():
            row[token_id] += np.float32(bias)
        if counts is not None and params.repetition_penalty != 1.0:
            seen = counts.seen()
            # A tiny penalty must not be rounded to zero, by which logits would be divided.
            penalty = max(np.float32(params.repetition_penalty), np.finfo(np.float32).tiny)
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if counts is not None and (params.frequency_penalty or params.presence_penalty):
        seen, times = counts.in_output()
        row[seen] -= np.float32(params.frequency_penalty) * times.astype(np.float32)
        row[seen] -= np.float32(params.presence_penalty)
    if state.num_output_tokens < params.min_tokens:
        # What excludes tokens is applied last, so that no infinite bias can override it.
        stops = params.stops(state.eos_token_ids)
        row[[token_id for token_id in stops if 0 <= token_id < row.size]] = -np.inf
    if has_rules(params):
        (state.rules or TokenRules(params)).exclude(row, state.token_ids, state.num_prompt_tokens)
    return row


def distribution(logits: Row, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that may be sampled and their unnormalised probabilities, in the order of the cumulative sum.

    Ties are ordered by token id, and top_k and top_p keep a prefix of the order, so the kept set depends on the row
    alone. At least one token is kept.
    """
    with np.errstate(over="ignore"):
        row = logits / np.float32(params.temperature)
    peak = row.max()
    if np.isinf(peak):  # a temperature so small that scaling overflows: the largest logit takes it all
        return np.array([logits.argmax()], dtype=np.int64), np.ones(1)
    weights = np.exp(row - peak, dtype=np.float32)
    if params.top_n_sigma > 0.0:
        weights[row < peak - params.top_n_sigma * _deviation(row)] = 0.0
    if params.min_p > 0.0:
        # The best token weighs exactly 1, so a weight is the probability relative to it.
        weights[weights < np.float32(params.min_p)] = 0.0
    top_k = params.top_k if 0 < params.top_k < row.size else 0
    if not top_k and params.top_p >= 1.0:
        return _every_id(row.size), weights.astype(np.float64)
    if top_k:
        token_ids = heaviest(weights, top_k)
        kept = weights[token_ids].astype(np.float64)
        return _nucleus(token_ids, kept, params.top_p * kept.sum())
    total = weights.sum(dtype=np.float64)
    token_ids = heaviest(weights, min(_FIRST_LOOK, row.size))
    kept = weights[token_ids].astype(np.float64)
    if kept.sum() < params.top_p * total:
        token_ids = heaviest(weights, row.size)
        kept = weights[token_ids].astype(np.float64)
    return _nucleus(token_ids, kept, params.top_p * total)


def _deviation(row: Row) -> float:
    """The standard deviation of all possible tokens' logits (Tang et al., "Top-nσ: Not All Logits Are You Need")."""
    return float(row[row > -np.inf].std(dtype=np.float64))


def heaviest(weights: Row, count: int) -> npt.NDArray[np.int64]:
    """The `count` heaviest tokens, heaviest first, ties by id."""
    candidates = _every_id(weights.size)
    if count < weights.size:
        candidates = _at_least(weights, candidates, count)
    # One integer for each token: in the high bits the float's bits, mapped so that they sort in descending order, in
    # the low bits the id. Sorting these is many times faster than a stable sort of the floats, in the same order.
    bits = (weights[candidates] + np.float32(0.0)).view(np.uint32)
    bits ^= np.where(bits >> 31, np.uint32(0), np.uint32(0x7FFFFFFF))
    keys = bits.astype(np.uint64) << np.uint64(32) | candidates.astype(np.uint64)
    keys.sort()
    return (keys[:count] & np.uint64(0xFFFFFFFF)).astype(np.int64)


@functools.lru_cache(maxsize=8)
def _every_id(size: int) -> npt.NDArray[np.int64]:
    ids = np.arange(size, dtype=np.int64)
    ids.flags.writeable = False
    return ids


def _at_least(weights: Row, token_ids: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Those of `token_ids` that weigh at least as much as the `count`-th heaviest: ties at the edge are all in."""
    columns = weights.size // _FOLD
    if count <= columns:
        # `count` columns have a maximum of at least this value, so `count` tokens have: no lighter one is among them.
        folded = weights[: columns * _FOLD].reshape(_FOLD, columns).max(axis=0)
        token_ids = np.flatnonzero(weights >= np.partition(folded, columns - count)[columns - count])
    kept = weights[token_ids]
    heavy: npt.NDArray[np.int64] = token_ids[kept >= np.partition(kept, kept.size - count)[kept.size - count]]
    return heavy


def _nucleus(
    token_ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], mass: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The smallest prefix that reaches `mass` (Holtzman et al., "The Curious Case of Neural Text Degeneration")."""
    keep = int(np.searchsorted(np.cumsum(weights), mass, side="left")) + 1
    return token_ids[:keep], weights[:keep]


def _draw(token_ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], number: float) -> int:
    """Inverse transform: the first token whose cumulated weight exceeds `number` of the total."""
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, number * cumulated[-1], side="right"))
    if index == weights.size:
        # Rounding made `number * total` equal the total: the last token with any weight takes it.
        index = int(np.flatnonzero(weights)[-1])
    return int(token_ids[index])


def token_logprobs(logits: Row, token_id: int, top: int) -> TokenLogprobs:
    """Log-softmax of the logits at the drawn token and at the `top` best possible ones (best first, ties by id)."""
    peak = logits.max()
    norm = peak + np.log(np.exp(logits - peak).sum(dtype=np.float64))
    rank = int((logits > logits[token_id]).sum()) + 1
    best = heaviest(logits, min(top, logits.size)) if top else np.empty(0, dtype=np.int64)
    return TokenLogprobs(
        token_id,
        float(logits[token_id] - norm),
        rank,
        tuple((int(likely), float(logits[likely] - norm)) for likely in best if logits[likely] > -np.inf),
    )
