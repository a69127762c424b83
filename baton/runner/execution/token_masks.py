"""The token masks of a step's requests with a grammar: one row of bits each, in a buffer that is reused."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, EngineFault
from baton.runner.execution.input_batch import RequestState

Masks = dict[str, npt.NDArray[np.int32]]


class TokenMasks:
    """Fills masks from the requests' matchers. Requests without a grammar cost nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._rows = np.zeros((0, -(-vocab_size // 32)), dtype=np.int32)

    def fill(self, samplers: Iterable[RequestState]) -> tuple[Masks, dict[str, BatonError]]:
        """The masks by request id, valid until the next call; and the errors of requests that could not get one."""
        constrained = [state for state in samplers if state.sampling_params.has_grammar]
        if not constrained:
            return {}, {}
        if len(constrained) > len(self._rows):
            self._rows = np.zeros((len(constrained), self._rows.shape[1]), dtype=np.int32)
        masks: Masks = {}
        faults: dict[str, BatonError] = {}
        for row, state in zip(self._rows, constrained, strict=False):
            try:
                _fill(state, row)
            except BatonError as fault:
                faults[state.request_id] = fault
            else:
                masks[state.request_id] = row
        return masks, faults


def _fill(state: RequestState, row: npt.NDArray[np.int32]) -> None:
    matcher = state.matcher
    if matcher is None:
        raise EngineFault(f"{state.sampling_params.constraint_kind}: the request has no compiled grammar")
    # Usually this is one token, the one that was sampled last.
    matcher.advance(state.token_ids[state.num_prompt_tokens + matcher.num_tokens :].tolist())
    matcher.fill(row)
