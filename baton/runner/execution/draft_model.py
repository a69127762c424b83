"""Drafts from a smaller model with the same tokens, whose keys and values lie in a cache beside the model's own.

A block of the draft model's cache has the number of the model's block with the same tokens, so whatever allocates,
shares and frees the model's blocks does it for both; a copied block is computed again. Only which blocks the draft
model has computed is kept here: for each block a digest of all tokens up to its end. Blocks whose KV came from another
node or the host tier, or was computed for a request without drafts, have another digest, and are computed when they are
first needed.

A drafted token is drawn from the draft model's logits with the parameters and the random number of the token that it
guesses. Random numbers belong to positions (philox.py), so where the two models agree so do the draws, at any
temperature.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.batch import SchedulerOutput
from baton.engine.runner import KVLayout
from baton.engine.scheduler_config import LongSequences
from baton.messages.sampling import SamplingParams
from baton.runner.execution.input_batch import NEVER_LONG, FlatBatch, Rows, flatten_rows
from baton.runner.execution.request_table import RequestState
from baton.runner.execution.sampler import SamplingState, has_penalties, sample
from baton.runner.execution.token_counts import TokenCounts

MAX_ROWS_BEHIND = 64
"""The most known tokens of a request that are computed together with its first draft. More are computed before, as far
as the step has room."""

_NEVER = np.float32(-1e30)
"""The logit of a token that the draft model does not have; finite, as sampling demands."""
_EMPTY = 0
"""The digest of a block whose tokens the draft model has not computed."""


class DraftTransformer(Protocol):
    """What computes the draft model (transformer.py); its cache has one group of layers."""

    layout: KVLayout
    row_quantum: int
    long_sequences: LongSequences | None

    def compute(self, batch: FlatBatch) -> npt.NDArray[np.float32]: ...


class Drafts(NamedTuple):
    """The drafts of one step."""

    token_ids: Mapping[str, Sequence[int]]
    """By request id; nothing as long as a request's known tokens are being computed."""
    round_seconds: float
    """The mean duration of a round, which drafts one token of each request; 0 without rounds."""
    computes_ahead: bool
    """Whether tokens of expected requests are left to compute."""


NO_DRAFTS = Drafts({}, 0.0, False)


@dataclass(slots=True)
class _Followed:
    """What is kept of a request between its steps."""

    params: SamplingParams
    """The request's sampling parameters without log-probabilities, which drafts don't need."""
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    """For each of its full blocks, the digest of all tokens up to its end."""
    num_computed: int = 0
    """How many tokens were computed, with those in a last block that is not full."""
    counts: TokenCounts | None = None
    """How often each token occurs in the known tokens and, during a draft, in the drafted ones; None without penalties.
    A copy, since the request's own tokens depend on its own counts."""
    num_counted: int = 0


@dataclass(slots=True)
class _Drafting:
    """One request while its tokens are drafted."""

    state: RequestState
    params: SamplingParams
    block_table: npt.NDArray[np.int32]
    """The draft model's: the request's blocks, and behind them scratch blocks."""
    most: int
    """The most tokens to draft."""
    start: int
    """The number of tokens that are computed."""
    counts: TokenCounts | None
    stops: frozenset[int]
    """The tokens at which the output may stop."""
    long_from: int
    """The first position with the angles of long sequences. It stays while the request is drafted: a draft model never
    starts over, since its tokens are guesses."""
    drafts: list[int] = field(default_factory=list)

    @property
    def rows(self) -> Rows:
        """The rows of the next round: all tokens that are not computed, of which the last one gives logits."""
        stop = self.state.num_tokens + len(self.drafts)
        return Rows(self.state.rows(self.start, stop), self.start, 1, self.block_table, long_from=self.long_from)


class DraftModel:
    """Drafts tokens of requests. Called from the runner's thread."""

    def __init__(
        self,
        transformer: DraftTransformer,
        *,
        num_blocks: int,
        num_scratch_blocks: int,
        num_groups: int,
        max_model_len: int,
        vocab_size: int,
        drafted_vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`transformer`: has `num_blocks` blocks, and scratch blocks behind them.

        `num_groups`: the groups of layers of the model for which tokens are drafted. The blocks are those of the first
        one, which has no window if any has none. `vocab_size` and `drafted_vocab_size`: the widths of the logits of the
        draft model and of that model; beyond the tokens that both have they may be padded differently.
        """
        self._transformer = transformer
        self._block_size = transformer.layout.block_size
        self._digests = np.full(num_blocks, _EMPTY, dtype=np.uint64)
        self._scratch = np.arange(num_blocks, num_blocks + num_scratch_blocks, dtype=np.int32)
        self._num_groups = num_groups
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._drafted_vocab_size = drafted_vocab_size
        self._eos_token_ids = eos_token_ids
        self._followed: dict[str, _Followed] = {}
        self._expected: dict[str, RequestState] = {}
        """Requests whose KV is on its way, and of which tokens are left to compute, in the order of their coming."""

    def update(self, output: SchedulerOutput) -> None:
        """Take in a step: requests that ended, lost their blocks or got others are forgotten, others expected.

        What full blocks hold stays known, whoever gets them next.
        """
        new = (data.request_id for data in output.scheduled_new_reqs)
        resumed = (data.request_id for data in output.scheduled_cached_reqs if data.resumed)
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids, *new, *resumed):
            self._followed.pop(request_id, None)
            self._expected.pop(request_id, None)
        for data in output.loading_reqs:
            self._expected[data.request_id] = RequestState(data)

    def forget_all(self) -> None:
        """Forget all requests and what blocks hold, after a fault."""
        self._followed.clear()
        self._expected.clear()
        self._digests.fill(_EMPTY)

    def draft(self, wanted: Sequence[tuple[RequestState, int]], num_spare_tokens: int) -> Drafts:
        """Draft up to so many tokens behind those of each request, whose last one the model has not computed yet.

        `num_spare_tokens`: how many tokens may be computed of requests that are far behind, which get no drafts until
        they have caught up, and then of expected ones.
        """
        drafting, behind = [], []
        for state, most in wanted:
            drafted = self._begin(state, most)
            if drafted is None:
                continue
            num_behind = state.num_tokens - drafted.start
            if num_behind > MAX_ROWS_BEHIND:
                count = min(num_behind - 1, num_spare_tokens)
                num_spare_tokens -= count
                self._compute_known(drafted, count)
            if state.num_tokens - drafted.start <= MAX_ROWS_BEHIND:
                drafting.append(drafted)
            else:
                behind.append(state.request_id)
        started = time.perf_counter()
        num_rounds = self._run_rounds(self._with_scratch(drafting))
        seconds = time.perf_counter() - started if num_rounds else 0.0
        for drafted in drafting:
            if drafted.counts is not None:
                for token_id in drafted.drafts:
                    drafted.counts.take_back(token_id)
        token_ids: dict[str, Sequence[int]] = {
            drafted.state.request_id: drafted.drafts for drafted in drafting if drafted.drafts
        }
        token_ids |= dict.fromkeys(behind, ())
        return Drafts(token_ids, seconds / max(1, num_rounds), self._compute_ahead(num_spare_tokens))

    def _compute_ahead(self, num_tokens: int) -> bool:
        """Compute up to so many tokens of the expected requests, the first ones first; returns whether any are left."""
        while self._expected and num_tokens:
            request_id, state = next(iter(self._expected.items()))
            drafted = self._begin(state, 1)
            left = state.num_tokens - 1 - drafted.start if drafted is not None else 0
            if drafted is not None:
                self._compute_known(drafted, min(left, num_tokens))
            if left <= num_tokens:
                del self._expected[request_id]
            num_tokens -= min(left, num_tokens)
        return bool(self._expected)

    def _begin(self, state: RequestState, most: int) -> _Drafting | None:
        """Find out what is computed of a request; None if its tokens can't be drafted."""
        most = min(most, self._max_model_len - state.num_tokens)
        if most <= 0 or int(state.token_ids.max()) >= self._vocab_size:
            return None
        table = np.ascontiguousarray(state.block_table[:: self._num_groups])
        followed = self._followed.get(state.request_id)
        if followed is None:
            followed = _Followed(replace(state.sampling_params, logprobs=None))
            self._extend_digests(followed, state)
            followed.num_computed = self._num_found(followed.digests, table)
            self._followed[state.request_id] = followed
        else:
            self._extend_digests(followed, state)
        self._count(followed, state)
        start = min(followed.num_computed, state.num_tokens - 1)
        stops = followed.params.stops(self._eos_token_ids)
        long, num_prompt_tokens = self._transformer.long_sequences, state.num_prompt_tokens
        long_from = NEVER_LONG if long is None else long.long_from(num_prompt_tokens, num_prompt_tokens)
        return _Drafting(state, followed.params, table, most, start, followed.counts, stops, long_from)

    def _count(self, followed: _Followed, state: RequestState) -> None:
        if not has_penalties(followed.params):
            return
        if followed.counts is None:
            followed.counts = TokenCounts(state.token_ids, state.num_prompt_tokens)
        else:
            for token_id in state.token_ids[followed.num_counted :].tolist():
                followed.counts.add(token_id)
        followed.num_counted = state.num_tokens

    def _extend_digests(self, followed: _Followed, state: RequestState) -> None:
        known, num_full = followed.digests.size, state.num_tokens // self._block_size
        if known == num_full:
            return
        size, token_ids = self._block_size, state.token_ids
        digests = np.empty(num_full, dtype=np.uint64)
        digests[:known] = followed.digests
        before = int(digests[known - 1]) if known else _EMPTY
        for block in range(known, num_full):
            tokens = token_ids[block * size : (block + 1) * size].tobytes()
            before = xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + tokens) or 1  # never that of no tokens
            digests[block] = before
        followed.digests = digests

    def _num_found(self, digests: npt.NDArray[np.uint64], table: npt.NDArray[np.int32]) -> int:
        """How many leading tokens of a request were computed for others that had its blocks."""
        same = self._digests[table[: digests.size]] == digests[: table.size]
        return self._block_size * (same.size if same.all() else int(same.argmin()))

    def _compute_known(self, drafted: _Drafting, count: int) -> None:
        """Compute the keys and values of `count` tokens of a request, without logits."""
        if count:
            token_ids = drafted.state.rows(drafted.start, drafted.start + count)
            self._compute([Rows(token_ids, drafted.start, 0, drafted.block_table, long_from=drafted.long_from)])
            self._note_computed(drafted, drafted.start + count)

    def _note_computed(self, drafted: _Drafting, stop: int) -> None:
        """Note that the request's tokens before `stop` are computed, as far as they lie in blocks of its own."""
        followed, size = self._followed[drafted.state.request_id], self._block_size
        table = drafted.state.block_table[:: self._num_groups]
        stop = min(stop, table.size * size)
        first, last = drafted.start // size, stop // size
        self._digests[table[first:last]] = followed.digests[first:last]
        # Drafts overwrite the slots behind `stop`, also in further blocks of the request.
        self._digests[table[last:]] = _EMPTY
        drafted.start = followed.num_computed = stop

    def _with_scratch(self, drafting: Sequence[_Drafting]) -> Sequence[_Drafting]:
        """Give requests scratch blocks behind their own; returns the requests for which there are enough."""
        placed, num_taken = [], 0
        for drafted in drafting:
            num_blocks = -(-(drafted.state.num_tokens + drafted.most - 1) // self._block_size)
            lacking = max(0, num_blocks - drafted.block_table.size)
            if num_taken + lacking > self._scratch.size:
                continue
            scratch = self._scratch[num_taken : num_taken + lacking]
            num_taken += lacking
            drafted.block_table = np.concatenate((drafted.block_table, scratch))
            placed.append(drafted)
        return placed

    def _run_rounds(self, drafting: Sequence[_Drafting]) -> int:
        """Draft one token of each request after another; returns how many rounds that took."""
        num_rounds = 0
        while drafting:
            logits = self._compute([drafted.rows for drafted in drafting])
            num_rounds += 1
            states = [
                SamplingState(
                    drafted.params,
                    drafted.state.rows(0, drafted.state.num_tokens + len(drafted.drafts)),
                    drafted.state.num_prompt_tokens,
                    self._eos_token_ids,
                    rules=drafted.state.rules,
                    counts=drafted.counts,
                )
                for drafted in drafting
            ]
            going_on = []
            for drafted, result in zip(drafting, sample(self._of_drafted_width(logits), states), strict=True):
                if not drafted.drafts:
                    self._note_computed(drafted, drafted.state.num_tokens)
                if result.error is not None:
                    continue
                drafted.start = drafted.state.num_tokens + len(drafted.drafts)
                drafted.drafts.append(result.token_id)
                drafted.state.set_drafts(drafted.drafts)
                if drafted.counts is not None:
                    drafted.counts.add(result.token_id)
                # What follows the end of an output is of no use, and what follows a foreign token is not known.
                is_last = result.token_id in drafted.stops or result.token_id >= self._vocab_size
                if len(drafted.drafts) < drafted.most and not is_last:
                    going_on.append(drafted)
            drafting = going_on
        return num_rounds

    def _of_drafted_width(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The logits [rows, drafted_vocab_size], to which the parameters of requests can be applied."""
        if self._vocab_size >= self._drafted_vocab_size:
            return np.ascontiguousarray(logits[:, : self._drafted_vocab_size])
        wide = np.full((logits.shape[0], self._drafted_vocab_size), _NEVER, dtype=np.float32)
        wide[:, : self._vocab_size] = logits
        return wide

    def _compute(self, rows: Sequence[Rows]) -> npt.NDArray[np.float32]:
        return self._transformer.compute(flatten_rows(rows, self._transformer.layout, self._transformer.row_quantum))
