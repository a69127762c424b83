"""The plan of one step while the scheduler decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.batch import BlockCopy, CachedRequestData, ForkedRequestData, NewRequestData, SchedulerOutput
from baton.engine.decode_set import NO_DECODES, DecodeGroup
from baton.engine.kv_cache.host_tier import NO_COPIES, StepCopies
from baton.engine.request import Request

_MAX_PROMPT_LOGITS = 128
"""The most tokens of prompts with log-probabilities in one step: each has a row of logits as wide as the vocabulary, so
that 2,048 of them would take a GB."""


class StepPlan:
    """Collects what a step computes, and tracks how much of its token budgets is left.

    The only token that a stream lacks counts in `token_budget` alone, all others in both.
    """

    def __init__(self, step: int, token_budget: int, prompt_budget: int, chunk_limit: int = 0) -> None:
        self.step = step
        self.token_budget = token_budget
        self._prompt_budget = prompt_budget
        self._chunk_limit = chunk_limit
        self.decodes = NO_DECODES
        """Scheduled requests that decode one token in every step."""
        self.requests: list[Request] = []
        """The other scheduled requests, in the order in which the runner computes them, behind the decodes."""
        self.num_computed_tokens: list[int] = []
        """The computed tokens of each of `requests` after this step. The request's own count may then be larger, since
        it includes later steps that are already decided."""
        self.preempted_req_ids: set[str] = set()
        self.swapped_out: list[Request] = []
        """Preempted requests whose KV this step copies to the host tier."""
        self.blocks_to_copy: list[BlockCopy] = []
        self.drafts: dict[str, Sequence[int]] = {}
        """The drafts that the step computes behind the last tokens of requests, by request id."""
        self.num_drafts_wanted: Mapping[str, int] = {}
        """How many tokens behind this step's the draft model is to draft, by request id."""
        self.num_spare_tokens = 0
        """How many tokens of prompts the draft model may compute."""
        self.computes_ahead = False
        """Whether the draft model has tokens left to compute of requests whose KV is on its way."""
        self._loading: list[NewRequestData] = []
        self._new: list[NewRequestData] = []
        self._known: list[CachedRequestData] = []
        self._forks: list[ForkedRequestData] = []
        self._num_tokens: dict[str, int] = {}
        self._total = 0
        self._num_prefill_tokens = 0
        self._num_prompt_logits = 0
        self._num_context_tokens = 0

    @property
    def is_empty(self) -> bool:
        return not self.requests and not self.decodes.count

    def chunk_size(self, request: Request, num_tokens: int, budget: int) -> int:
        """How many of the `num_tokens` tokens that a request lacks to compute in this step; 0: none fits.

        `budget`: how many tokens of the step's budget the request may use.
        """
        limit, budget = self._chunk_limit, min(budget, self.room_for(request, num_tokens))
        if request.computes_prompt_logprobs:
            # At least one, so that no such request waits for all others.
            budget = min(budget, max(1, _MAX_PROMPT_LOGITS - self._num_prompt_logits))
        return max(0, min(num_tokens, budget, limit or num_tokens))

    def room_for(self, request: Request, num_tokens: int) -> int:
        """The most tokens that the step may compute of a request that lacks `num_tokens` of them."""
        return self.token_budget if _is_of_stream(request, num_tokens) else self.prompt_room

    @property
    def prompt_room(self) -> int:
        """How many further tokens of prompts the step may compute."""
        return min(self.token_budget, self._prompt_budget)

    def spare_chunk_size(self, most: int) -> int:
        """How many of at most `most` tokens of prompts the draft model may compute in what is left of the budget."""
        return max(0, min(most, self.prompt_room, self._chunk_limit or most))

    def add_decodes(self, decodes: DecodeGroup, num_context_tokens: int) -> None:
        """Compute one token of each of these requests, which the runner knows.

        `num_context_tokens`: how many tokens all of them together have computed before.
        """
        self.decodes = decodes
        self._num_context_tokens += num_context_tokens
        self._total += decodes.count
        self.token_budget -= decodes.count

    def note_growth(self, request: Request, num_computed_tokens: int, new_block_ids: Sequence[int]) -> None:
        """Tell the runner the new blocks of a decoding request. `num_computed_tokens`: when the step begins."""
        self._known.append(CachedRequestData(request.request_id, new_block_ids, num_computed_tokens))

    def add_new(self, request: Request, num_tokens: int, block_ids: Sequence[int]) -> None:
        """Compute `num_tokens` of a request that the runner has not seen."""
        self._new.append(_new_data(request, block_ids))
        self._advance(request, num_tokens)

    def add_loading(self, request: Request, block_ids: Sequence[int]) -> None:
        """Let the draft model compute the tokens of a request whose KV is on its way to these blocks."""
        self._loading.append(_new_data(request, block_ids))

    def add_known(
        self, request: Request, num_tokens: int, new_block_ids: Sequence[int], *, resumed: bool = False
    ) -> None:
        """Compute `num_tokens` of a request that the runner knows. `new_block_ids`: all its blocks when `resumed`."""
        of_beam = request.output_token_ids[-1] if request.beams is not None and request.output_token_ids else None
        self._known.append(
            CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens, resumed, of_beam)
        )
        self._advance(request, num_tokens)

    def add_drafted(
        self, request: Request, num_tokens: int, drafts: Sequence[int], new_block_ids: Sequence[int]
    ) -> None:
        """Compute the last `num_tokens` tokens of a request that the runner knows, and drafts behind them."""
        self._known.append(CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens))
        if drafts:
            self.drafts[request.request_id] = drafts
        self._num_context_tokens += request.num_computed_tokens
        self._take(request, num_tokens + len(drafts))

    def add_fork(self, request: Request, num_tokens: int, block_ids: Sequence[int]) -> None:
        """Compute `num_tokens` of a request that the runner has not seen, forked from a parent that it knows."""
        self._forks.append(
            ForkedRequestData(
                request.request_id,
                request.parent_id,
                request.num_tokens - 1,
                request.output_token_ids[-1],
                block_ids,
                request.num_computed_tokens,
            )
        )
        self._advance(request, num_tokens)

    def build(self, finished_req_ids: frozenset[str], copies: StepCopies = NO_COPIES) -> SchedulerOutput:
        """The step's decision for the runner."""
        return SchedulerOutput(
            step=self.step,
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=self._known,
            num_scheduled_tokens=self._all_num_tokens(),
            total_num_scheduled_tokens=self._total,
            scheduled_spec_decode_tokens=self.drafts,
            num_drafts_wanted=self.num_drafts_wanted,
            num_spare_tokens=self.num_spare_tokens,
            loading_reqs=self._loading,
            computes_ahead=self.computes_ahead,
            blocks_to_copy=self.blocks_to_copy,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=frozenset(self.preempted_req_ids) if self.preempted_req_ids else frozenset(),
            blocks_to_swap_out=copies.swap_out,
            blocks_to_swap_in=copies.swap_in,
            scheduled_forked_reqs=self._forks,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_context_tokens=self._num_context_tokens,
        )

    def _all_num_tokens(self) -> Mapping[str, int]:
        decodes = self.decodes.num_tokens
        if not self._num_tokens or not decodes:
            return decodes or self._num_tokens
        return {**decodes, **self._num_tokens}

    def _advance(self, request: Request, num_tokens: int) -> None:
        if _is_of_stream(request, request.num_tokens - request.num_computed_tokens):
            self._num_context_tokens += request.num_computed_tokens
        else:
            self._prompt_budget -= num_tokens
            self._num_prefill_tokens += num_tokens
            self._num_prompt_logits += num_tokens if request.computes_prompt_logprobs else 0
        self._take(request, num_tokens)

    def _take(self, request: Request, num_tokens: int) -> None:
        # Counted as computed from now on, so that a next step can be decided before this one's tokens are back.
        request.num_computed_tokens += num_tokens
        self.requests.append(request)
        self.num_computed_tokens.append(request.num_computed_tokens)
        self._num_tokens[request.request_id] = num_tokens
        self._total += num_tokens
        self.token_budget -= num_tokens


def _is_of_stream(request: Request, num_tokens: int) -> bool:
    """Whether all that a request lacks, `num_tokens` tokens, is the one that it generated last."""
    return num_tokens == 1 and bool(request.output_token_ids)


def _new_data(request: Request, block_ids: Sequence[int]) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=tuple(request.output_token_ids),
        sampling_params=request.sampling_params,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
        matcher=request.matchers[0] if request.matchers else None,
        adapter=request.adapter,
        spans=request.spans,
        pooling=request.pooling,
        root_id=request.root_id,
    )
