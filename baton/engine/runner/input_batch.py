"""What a runner remembers of each request, and how a step's requests become flat rows.

Pure Python and numpy: the simulated runner keeps its requests the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from baton.engine.request import SamplingParams

NO_SLOT = -1
"""The slot of a padding row: nothing is stored."""


class RequestState:
    """One request as the runner knows it: its tokens, its blocks, how far it is computed."""

    __slots__ = (
        "_blocks",
        "_num_blocks",
        "highest_block",
        "lowest_block",
        "num_computed_tokens",
        "num_prompt_tokens",
        "request_id",
        "sampling_params",
        "token_ids",
    )

    def __init__(self, data: NewRequestData) -> None:
        self.request_id = data.request_id
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.token_ids = [*data.prompt_token_ids, *data.output_token_ids]
        self.sampling_params: SamplingParams = data.sampling_params
        self.num_computed_tokens = data.num_computed_tokens
        self._blocks = np.empty(0, dtype=np.int32)
        self._num_blocks = 0
        self.set_blocks(data.block_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        return self._blocks[: self._num_blocks]

    def set_blocks(self, block_ids: Sequence[int]) -> None:
        """Replace the block table."""
        self._num_blocks = 0
        self.lowest_block, self.highest_block = 0, 0
        self.append_blocks(block_ids)

    def append_blocks(self, block_ids: Sequence[int]) -> None:
        """Extend the block table."""
        if not block_ids:
            return
        self.lowest_block = min(self.lowest_block, *block_ids)
        self.highest_block = max(self.highest_block, *block_ids)
        needed = self._num_blocks + len(block_ids)
        if needed > self._blocks.size:
            grown = np.empty(max(needed, 2 * self._blocks.size, 8), dtype=np.int32)
            grown[: self._num_blocks] = self.block_table
            self._blocks = grown
        self._blocks[self._num_blocks : needed] = block_ids
        self._num_blocks = needed

    def slots(self, start: int, stop: int, block_size: int) -> npt.NDArray[np.int64]:
        """Cache slots (block * block_size + offset) of token positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int64)
        return self._blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step: `count` tokens from its `num_computed_tokens` on."""

    state: RequestState
    count: int

    @property
    def stop(self) -> int:
        """How many tokens are computed once the step is done."""
        return self.state.num_computed_tokens + self.count

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last token, so that a new one is drawn."""
        return self.stop == len(self.state.token_ids)


class RequestTable:
    """Every request the runner knows, kept in step with the scheduler."""

    def __init__(self, block_size: int, num_blocks: int, vocab_size: int, max_model_len: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def update(self, output: SchedulerOutput) -> tuple[list[Scheduled], dict[str, str]]:
        """Take over what the scheduler changed; returns the step's shares and the requests that can't be computed."""
        for request_id in output.finished_req_ids:
            self._states.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._states[new.request_id] = RequestState(new)
        for cached in output.scheduled_cached_reqs:
            self._refresh(cached)
        scheduled, failed = [], {}
        for request_id, count in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            reason = "the runner does not know this request" if state is None else self._fault(state, count)
            if reason is not None or state is None:
                failed[request_id] = reason or ""
            elif count:
                scheduled.append(Scheduled(state, count))
        return scheduled, failed

    def commit(self, scheduled: Iterable[Scheduled], sampled: dict[str, int]) -> None:
        """The step is computed: advance every request in it and append what it drew."""
        for share in scheduled:
            share.state.num_computed_tokens = share.stop
            token_id = sampled.get(share.state.request_id)
            if token_id is not None:
                share.state.token_ids.append(token_id)

    def _refresh(self, cached: CachedRequestData) -> None:
        state = self._states.get(cached.request_id)
        if state is None:
            return
        if cached.resumed:
            state.set_blocks(cached.new_block_ids)
        else:
            state.append_blocks(cached.new_block_ids)
        state.num_computed_tokens = cached.num_computed_tokens

    def _fault(self, state: RequestState, count: int) -> str | None:
        """Why a share would read or write out of bounds: one request's fault must not become everybody's."""
        start, stop = state.num_computed_tokens, state.num_computed_tokens + count
        if count < 0 or start < 0 or stop > len(state.token_ids):
            return f"{count} tokens scheduled from {start} on, but the request has {len(state.token_ids)}"
        if stop > self._max_model_len:
            return f"position {stop - 1} is beyond the model's {self._max_model_len} tokens"
        table = state.block_table
        if stop > table.size * self._block_size:
            return f"{table.size} blocks don't hold {stop} tokens"
        if state.lowest_block < 0 or state.highest_block >= self._num_blocks:
            return "a block id is out of range"
        tokens = state.token_ids[start:stop]
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            return "a token id is out of range"
        return None


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A step's requests as rows, padding at the end; int64 unless said otherwise.

    token_ids, positions and slots [padded], query_start int32 [B + 1], sample_start int32 [B + 1] (the same, counting
    only rows that sample), seq_lens int32 [B], block_tables int32
    [B, W], logits_rows [samplers].
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    sample_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logits_rows: npt.NDArray[np.int64]


def flatten(scheduled: Sequence[Scheduled], block_size: int, row_quantum: int) -> FlatBatch:
    """Lay the shares of a step side by side and pad to a multiple of `row_quantum` rows."""
    num_rows = sum(share.count for share in scheduled)
    padded = -(-num_rows // row_quantum) * row_quantum
    token_ids = np.zeros(padded, dtype=np.int64)
    positions = np.zeros(padded, dtype=np.int64)
    slots = np.full(padded, NO_SLOT, dtype=np.int64)
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int32)
    seq_lens = np.empty(len(scheduled), dtype=np.int32)
    widths = [-(-share.stop // block_size) for share in scheduled]
    block_tables = np.zeros((len(scheduled), max(widths, default=0)), dtype=np.int32)
    row = 0
    for index, share in enumerate(scheduled):
        state, start, stop = share.state, share.state.num_computed_tokens, share.stop
        end = row + share.count
        token_ids[row:end] = state.token_ids[start:stop]
        positions[row:end] = np.arange(start, stop)
        slots[row:end] = state.slots(start, stop, block_size)
        block_tables[index, : widths[index]] = state.block_table[: widths[index]]
        query_start[index + 1] = end
        seq_lens[index] = stop
        row = end
    sampling = np.fromiter((share.samples for share in scheduled), dtype=bool, count=len(scheduled))
    sample_start = np.zeros_like(query_start)
    np.cumsum(sampling, out=sample_start[1:])
    logits_rows = query_start[1:][sampling].astype(np.int64) - 1
    return FlatBatch(token_ids, positions, slots, query_start, sample_start, seq_lens, block_tables, logits_rows)
