"""Log-probabilities of a prompt's own tokens: which rows of a step have the logits for them, and what is kept of those.

The logits at one token of a prompt give the log-probability of the next one. Each row is a function of the tokens
before it alone, and is reduced alone, so the result does not depend on the chunks in which a prompt is computed. What
is kept of a row is a few numbers, not its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, EngineFault
from baton.messages.sampling import TokenLogprobs
from baton.runner.execution.request_table import RequestState, Scheduled
from baton.runner.execution.sampler import token_logprobs
from baton.values import value


@value(frozen=True, slots=True)
class PromptChunk:
    """The share of one request in a step, as far as log-probabilities of its prompt follow from it."""

    state: RequestState
    start: int
    """Its first token."""
    first_row: int
    """Its first row in the step."""
    count: int
    """How many of its rows are before a token of the prompt; the last token of a prompt is before the output."""
    is_last: bool
    """Whether the prompt is computed to its end after the step."""

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of the step whose logits are wanted."""
        return np.arange(self.first_row, self.first_row + self.count)

    def keep(self, positions: Sequence[TokenLogprobs]) -> None:
        """Keep the log-probabilities of this chunk's tokens, in place of earlier ones if the prompt is computed again.

        Raises EngineFault if a part of the prompt before it was not computed by this runner.
        """
        kept, start = self.state.prompt_logprobs, self.start
        if len(kept) < start:
            raise EngineFault(f"{start} tokens of the prompt were not computed here, so they have no log-probabilities")
        kept[start:] = positions


def chunks_of(scheduled: Sequence[Scheduled]) -> list[PromptChunk]:
    """The chunks of prompts whose log-probabilities are wanted; of a request that has output they were given before."""
    if all(share.state.sampling_params.prompt_logprobs is None for share in scheduled):
        return []
    chunks, first_row = [], 0
    for share in scheduled:
        state = share.state
        if state.sampling_params.prompt_logprobs is not None and not state.num_output_tokens:
            end = min(share.stop, state.num_prompt_tokens - 1)
            chunks.append(PromptChunk(state, share.start, first_row, end - share.start, share.samples))
        first_row += share.count
    return chunks


def take_prompt_logprobs(
    chunks: Sequence[PromptChunk], logits: npt.NDArray[np.float32]
) -> tuple[dict[str, Sequence[TokenLogprobs]], dict[str, BatonError]]:
    """Log-probabilities of the prompts that end in this step, by request id, and the errors of requests that failed.

    `logits`: float32 [rows of all chunks, vocabulary].
    """
    taken: dict[str, Sequence[TokenLogprobs]] = {}
    faults: dict[str, BatonError] = {}
    row = 0
    for chunk in chunks:
        own = logits[row : row + chunk.count]
        row += chunk.count
        state = chunk.state
        try:
            if not np.isfinite(own).all():
                raise EngineFault("the model produced non-finite logits")
            chunk.keep(_reduced(state, chunk.start, own))
        except EngineFault as fault:
            faults[state.request_id] = fault
        else:
            if chunk.is_last:
                taken[state.request_id] = tuple(state.prompt_logprobs)
                state.prompt_logprobs.clear()
    return taken, faults


def _reduced(state: RequestState, start: int, logits: npt.NDArray[np.float32]) -> list[TokenLogprobs]:
    top = state.sampling_params.prompt_logprobs or 0
    following = state.token_ids[start + 1 : start + 1 + len(logits)].tolist()
    return [token_logprobs(row, token_id, top) for row, token_id in zip(logits, following, strict=True)]
