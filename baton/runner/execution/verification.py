"""Samples the tokens of a step and verifies drafts by them (speculative decoding with unchanged tokens).

A draft is a guess of the token at one output position. The step has computed the logits at the last known token and at
each draft behind it, so the token of every position can be sampled exactly as without drafts: from its own logits, with
the request's tokens, penalties, grammar and random number as of that position. A draft stands if it is the token that
was sampled in its place; the first one that is not ends the walk. So drafts decide how many tokens a step yields and
never which ones. Leviathan, Kalman and Matias ("Fast Inference from Transformers via Speculative Decoding", ICML 2023)
keep the distribution of the tokens; here random numbers belong to positions (philox.py), which keeps the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from baton.runner.execution.request_table import RequestState, Scheduled
from baton.runner.execution.sampler import Sampled

SampleRows = Callable[[Any, Sequence[RequestState]], Sequence[Sampled]]
"""Draws one token for each row of logits [rows, vocabulary], numpy's or a device's, from the state of the row's request
as it is now."""


def sample_and_verify(logits: Any, samplers: Sequence[Scheduled], sample: SampleRows) -> list[list[Sampled]]:
    """Sample each request's next token, and further ones as long as its drafts are right; append them to its state.

    `logits` has the rows of all `samplers` one after another: `num_sampled_rows` each. Returns one list for each of
    them. A list that ends with an error has nothing else in it: an error behind a right draft is left to the next
    step, which computes that position again, so that no token before it is lost.
    """
    if not any(share.drafts for share in samplers):
        return [[result] for result in _append(sample(logits, [share.state for share in samplers]), samplers)]
    first_rows = list(accumulate((share.num_sampled_rows for share in samplers), initial=0))
    results: list[list[Sampled]] = [[] for _ in samplers]
    walking = list(range(len(samplers)))
    while walking:
        depth = len(results[walking[0]])
        shares = [samplers[index] for index in walking]
        rows = logits[[first_rows[index] + depth for index in walking]]
        drawn = _append(sample(rows, [share.state for share in shares]), shares)
        for index, result in zip(walking, drawn, strict=True):
            if result.error is None or not depth:
                results[index].append(result)
        walking = [
            index
            for index, share, result in zip(walking, shares, drawn, strict=True)
            if result.error is None and depth < len(share.drafts) and share.drafts[depth] == result.token_id
        ]
    return results


def _append(results: Sequence[Sampled], shares: Sequence[Scheduled]) -> Sequence[Sampled]:
    for result, share in zip(results, shares, strict=True):
        if result.error is None:
            share.state.append_token(result.token_id)
    return results
