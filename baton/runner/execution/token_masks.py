"""The token masks of a step's requests with a grammar: one row of bits each, in a buffer that is reused.

Masks that take long share a budget of time (`MaskBudget`, decision 54).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, EngineFault, InvalidRequest
from baton.runner.execution.request_table import RequestState

COSTLY_S = 0.0005
"""A grammar is costly if a token takes more CPU time than this, in the mean."""
SHARE = 0.1
"""The share of the time that masks of costly grammars may take beside other requests."""
BURST_S = 0.1
"""What they may take at once: an ordinary grammar may be costly while its automaton is built."""
ALONE_S = 0.5
"""What they may take in a step that computes one request alone."""


class MaskBudget:
    """The time that masks of costly grammars may take of a node's steps, so that no request stops all others.

    Masks of ordinary grammars take 0.02 to 0.4 ms of CPU time. A stranger's grammar may take a thousand times as long,
    also from some token on only. Then the step of all requests waits for it, n times for n sequences, and for those of
    as many requests as the stranger sends. So costly grammars, and they alone, have a budget, all together: once it is
    used up, a request with such a grammar ends. A request that is computed alone keeps nobody waiting, except for who
    comes next: that one waits for a step, so only a step's masks are bounded then, and the budget is as it was.

    Belongs to one thread at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_beside = BURST_S
        self._left_alone = ALONE_S
        self._paid_at = clock()
        self.is_shared = False
        """Whether the step computes several requests."""

    def begin_step(self, is_shared: bool) -> None:
        """Add what the time since the last step earned."""
        now = self._clock()
        self._left_beside = min(BURST_S, self._left_beside + SHARE * (now - self._paid_at))
        self._left_alone = ALONE_S
        self._paid_at = now
        self.is_shared = is_shared

    def permits(self, mean_seconds: float) -> bool:
        """Whether a mask may be filled of a grammar whose tokens take this CPU time in the mean."""
        left = self._left_beside if self.is_shared else self._left_alone
        return left > 0 or mean_seconds <= COSTLY_S

    def spend(self, seconds: float, mean_seconds: float) -> None:
        """Count the CPU time of a mask. Of a single one that takes very long, no more than a burst is held against
        those after it."""
        if mean_seconds <= COSTLY_S:
            return
        if self.is_shared:
            self._left_beside = max(-BURST_S, self._left_beside - seconds)
        else:
            self._left_alone -= seconds


Masks = dict[str, npt.NDArray[np.int32]]

_LEAST_BESIDE = 8
"""Fewer masks take no longer than handing them to a second thread, within the variation of a step."""

_TOO_COSTLY_BESIDE = (
    "takes {:.1f} ms of work for a token, too much beside the other requests that this node computes: make it simpler"
)
_TOO_COSTLY_ALONE = (
    "takes {:.1f} ms of work for a token, too much for the sequences of this request: make it simpler, or ask for fewer"
)


class TokenMasks:
    """Fills masks from the requests' matchers. Requests without a grammar cost nothing."""

    def __init__(self, vocab_size: int, least_beside: int = _LEAST_BESIDE, budget: MaskBudget | None = None) -> None:
        """`least_beside`: the least number of masks for which another thread pays."""
        self._budget = budget or MaskBudget()
        self._least_beside = least_beside
        self._rows = np.zeros((0, -(-vocab_size // 32)), dtype=np.int32)
        self._filled: tuple[Masks, dict[str, BatonError]] | None = None
        """What was filled beside the step and `fill` has not returned."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-masks")
        """Starts when it is first needed, and ends with this object."""

    @contextmanager
    def filling(self, samplers: Iterable[RequestState], roots: Iterable[str]) -> Iterator[None]:
        """While the block computes a step, fill the masks that the next call of `fill` returns, for the same requests.

        `roots`: the submitted requests of all that the step computes, also of those that sample nothing in it.
        The block must not change them. Matchers and the model's kernels compute without the interpreter's lock.
        """
        self._filled = None
        constrained = [state for state in samplers if state.sampling_params.has_grammar]
        if constrained:
            self._budget.begin_step(is_shared=len(set(roots)) > 1)
        if len(constrained) < self._least_beside:
            yield
            return
        filling = self._thread.submit(self._fill, constrained)
        try:
            yield
        finally:
            # Nobody may use the matchers until the thread is done with them. An error of the block is raised first.
            filling.exception()
        self._filled = filling.result()

    def fill(self, samplers: Iterable[RequestState]) -> tuple[Masks, dict[str, BatonError]]:
        """The masks by request id, valid until the next call; and the errors of requests that could not get one."""
        filled, self._filled = self._filled, None
        if filled is not None:
            return filled
        constrained = [state for state in samplers if state.sampling_params.has_grammar]
        return self._fill(constrained) if constrained else ({}, {})

    def _fill(self, constrained: Sequence[RequestState]) -> tuple[Masks, dict[str, BatonError]]:
        if len(constrained) > len(self._rows):
            self._rows = np.zeros((len(constrained), self._rows.shape[1]), dtype=np.int32)
        masks: Masks = {}
        faults: dict[str, BatonError] = {}
        for row, state in zip(self._rows, constrained, strict=False):
            try:
                self._fill_one(state, row)
            except BatonError as fault:
                faults[state.request_id] = fault
            else:
                masks[state.request_id] = row
        return masks, faults

    def _fill_one(self, state: RequestState, row: npt.NDArray[np.int32]) -> None:
        matcher, kind = state.matcher, state.sampling_params.constraint_kind or ""
        if matcher is None:
            raise EngineFault(f"{kind}: the request has no compiled grammar")
        if not self._budget.permits(matcher.mean_seconds):
            reason = _TOO_COSTLY_BESIDE if self._budget.is_shared else _TOO_COSTLY_ALONE
            raise InvalidRequest(kind, reason.format(matcher.mean_seconds * 1e3))
        try:
            # Usually this is one token, the one that was sampled last.
            matcher.advance(state.token_ids[state.num_prompt_tokens + matcher.num_tokens :].tolist())
            matcher.fill(row)
        finally:
            self._budget.spend(matcher.take_seconds(), matcher.mean_seconds)
