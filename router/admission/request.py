"""A request that passed every check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import PlainSerializer

from baton.messages.sampling import SamplingParams
from baton.values import value

_TokenIds = Annotated[Sequence[int], PlainSerializer(tuple, tuple[int, ...])]
"""Of a sequence, whatever its kind, pydantic would write one item after the other in Python: four times as slow."""


@value(frozen=True, slots=True)
class ValidRequest:
    """What the router serves. Its output is a function of this value alone."""

    request_id: str
    model: str
    prompt_token_ids: _TokenIds
    sampling_params: SamplingParams
    stop: Sequence[str] = ()
    priority: int = 0
    cache_salt: str = ""
    num_returned: int = 1
    """Sequences that the client gets, of the `sampling_params.n` that are generated; the best ones when it is fewer."""
    wants_logprobs: bool = False
    ttft_slo_ms: float | None = None
    """The longest that the first token may take, from the request's arrival at the router."""
    tpot_slo_ms: float | None = None
    """The longest mean time per output token after the first."""
    embeds: bool = False
    """Its prompt's embedding is wanted, and nothing generated."""
    prompt_length: int = 0
    """Tokens of a prompt that is not at hand, see `without_prompt`."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) or self.prompt_length

    def without_prompt(self) -> ValidRequest:
        """What is needed to go on with an attempt that runs, and not to begin one."""
        return replace(self, prompt_token_ids=(), prompt_length=self.num_prompt_tokens)
