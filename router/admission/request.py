"""The request of a client that has passed every check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated

from pydantic import PlainSerializer

from baton.messages.generation import ReasoningBegin
from baton.messages.node_model import GENERATES, Capability
from baton.messages.request_spec import RequestSpec
from baton.values import value

_TokenIds = Annotated[Sequence[int], PlainSerializer(tuple, tuple[int, ...])]
"""Written as a tuple: any other sequence pydantic writes item by item in Python, which is four times as slow."""


@value(frozen=True, slots=True)
class ValidRequest(RequestSpec):
    """A request that has passed every check: what nodes compute, and what the router makes of it.

    Of a request without its prompt (`without_prompt`) spans have no rows, and contents no data.
    """

    prompt_token_ids: _TokenIds
    request_id: str = field(kw_only=True)
    model: str = field(kw_only=True)
    stop: Sequence[str] = ()
    num_returned: int = 1
    """Number of sequences that the client gets: the best ones of the `sampling_params.n` that are generated."""
    wants_logprobs: bool = False
    ttft_slo_ms: float | None = None
    """The longest time to first token that is acceptable, from the request's arrival at the router."""
    tpot_slo_ms: float | None = None
    """The longest mean time per output token after the first that is acceptable."""
    prompt_length: int = 0
    """Number of tokens of the prompt, if the prompt itself is missing; see `without_prompt`."""
    shown_tokens: _TokenIds = ()
    """Special tokens whose texts are part of the text."""
    context_tokens: _TokenIds = ()
    """The last few tokens of the prompt, if the text of the output depends on them; see `Tokenizer.context_of`."""
    is_parsed: bool = False
    """Whether a resumed stream begins with `KnownText`."""
    reasoning: ReasoningBegin = "none"
    """Whether the text may begin with reasoning, in which stop strings mean nothing."""
    keeps_stop: bool = False
    """Whether the text ends with the stop string, or the stop token's text, instead of before it."""
    adapter_name: str = ""
    """The name by which the client asked for the adapter; the name may have another adapter by now."""

    @property
    def shown_model(self) -> str:
        """The model as the client named it."""
        return self.adapter_name or self.model

    @property
    def embeds(self) -> bool:
        """Whether a vector is wanted of the prompt, and no output."""
        return self.pooling is not None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) or self.prompt_length

    @property
    def num_computed(self) -> int:
        """The number of sequences that nodes compute for it: beams, too, of which the client gets some."""
        return self.sampling_params.beam_width or self.sampling_params.n

    @property
    def most_output_tokens(self) -> int:
        """The most tokens that nodes generate for it."""
        return 0 if self.embeds else self.num_computed * self.sampling_params.max_tokens

    @property
    def num_row_bytes(self) -> int:
        """Bytes of the rows, and of what encoders make rows of, that it has in place of tokens."""
        if not self.spans:
            return 0
        return sum([len(span.rows) for span in self.spans]) + sum([len(content.data) for content in self.contents])

    @property
    def needs(self) -> frozenset[Capability]:
        """What the nodes of the request must be able to do."""
        needed = GENERATES if self.pooling is None else frozenset((self.pooling.needs,))
        if self.contents:
            needed = self.contents[0].kind.needs | (frozenset() if self.pooling is None else needed)
        elif self.spans:
            needed |= {Capability.PROMPT_EMBEDS}
        return needed | {Capability.LORA} if self.adapter else needed

    def without_prompt(self) -> ValidRequest:
        """The same request without its prompt: enough to continue a running attempt, but not to begin one."""
        spans = tuple([span.without_rows() for span in self.spans])
        contents = tuple([content.without_data() for content in self.contents])
        return replace(self, prompt_token_ids=(), prompt_length=self.num_prompt_tokens, spans=spans, contents=contents)
