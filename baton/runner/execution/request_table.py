"""A runner's state of each request, kept from the scheduler's outputs, and each request's share of a step.

Needs only numpy, since the simulated runner uses it, too.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.batch import CachedRequestData, ForkedRequestData, NewRequestData, SchedulerOutput
from baton.engine.runner import KVLayout
from baton.messages.pooling import Pooling, PoolingParams
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.spans import Span, has_rows, source_spans, text_pieces
from baton.model_formats.encoder_decoders import EncoderDecoder
from baton.runner.execution.encoded_rows import EncodedRows
from baton.runner.execution.pooling import Pooler, TextQueries
from baton.runner.execution.sampler import has_penalties
from baton.runner.execution.token_counts import TokenCounts
from baton.runner.execution.token_rules import TokenRules, has_rules
from baton.values import value


@dataclass(frozen=True, slots=True)
class Grid:
    """An image's tokens in a prompt: `rows` times `columns` of them from `start` on, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """The place behind the last one."""
        return self.start + self.rows * self.columns


class GridPositions:
    """Rotary positions in three dimensions (M-RoPE, arXiv 2409.12191): time, row and column of one sequence's tokens.

    A text token has one number in all dimensions. An image's tokens share the time of its first one, and text goes on
    behind the largest number of the image, so a token's position differs from its place by an offset.
    """

    def __init__(self, grids: Sequence[Grid]) -> None:
        """`grids`: in their order; they don't overlap."""
        pieces, end, offset = [], 0, 0
        for grid in grids:
            pieces.append(_text_positions(end, grid.start, offset))
            first = grid.start + offset
            rows = np.repeat(np.arange(grid.rows), grid.columns)
            columns = np.tile(np.arange(grid.columns), grid.rows)
            pieces.append(np.stack([np.zeros_like(rows), rows, columns]) + first)
            end = grid.stop
            offset += max(grid.rows, grid.columns) - grid.rows * grid.columns
        self._known = np.concatenate([np.zeros((3, 0), dtype=np.int64), *pieces], axis=1)
        self._offset = offset

    def rows(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions of the tokens [start, stop): int64 [3, stop - start]."""
        known = self._known[:, start:stop]
        text = _text_positions(max(start, self._known.shape[1]), stop, self._offset)
        return np.concatenate([known, text], axis=1) if text.shape[1] else known


def _text_positions(start: int, stop: int, offset: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, max(start, stop), dtype=np.int64) + offset, (3, max(0, stop - start)))


_ROOM = 256
"""Output tokens for which a request's buffer has space at first."""


class RequestState:
    """One request in the runner: its tokens, its blocks, and how far it is computed."""

    __slots__ = (
        "_blocks",
        "_counts",
        "_num_blocks",
        "_tokens",
        "adapter",
        "grid_positions",
        "highest_block",
        "lowest_block",
        "matcher",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "pooler",
        "prompt_logprobs",
        "request_id",
        "root_id",
        "rules",
        "sampling_params",
        "spans",
    )

    def __init__(self, data: NewRequestData) -> None:
        self.request_id = data.request_id
        self.root_id = data.root_id or data.request_id
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(data.output_token_ids)
        self._tokens = np.empty(self.num_tokens + _ROOM, dtype=np.int64)
        self._tokens[: self.num_prompt_tokens] = data.prompt_token_ids
        self._tokens[self.num_prompt_tokens : self.num_tokens] = data.output_token_ids
        self._counts: TokenCounts | None = None
        self.sampling_params: SamplingParams = data.sampling_params
        self.rules = TokenRules(self.sampling_params) if has_rules(self.sampling_params) else None
        self.prompt_logprobs: list[TokenLogprobs] = []
        """If wanted, those of the prompt's computed tokens from the second one on, until they are given out."""
        self.matcher = data.matcher
        self.adapter = data.adapter
        self.spans = data.spans
        self.pooler = None if data.pooling is None else _pooler_of(data.pooling)
        """What makes the vector that is wanted of the prompt; None: tokens are sampled."""
        grids = [Grid(span.start, span.length // span.columns, span.columns) for span in data.spans if span.columns]
        self.grid_positions = GridPositions(grids) if grids else None
        self.num_computed_tokens = data.num_computed_tokens
        self._blocks = np.empty(0, dtype=np.int32)
        self._num_blocks = 0
        self.set_blocks(data.block_ids)

    def fork(self, data: ForkedRequestData) -> RequestState:
        """A new request that has this one's first tokens and parameters, and its own blocks."""
        fork = copy.copy(self)
        fork.request_id = data.request_id
        fork._tokens = self._tokens.copy()
        fork._counts = None
        fork.num_tokens = data.num_shared_tokens
        fork.append_token(data.last_token_id)
        fork.num_computed_tokens = data.num_computed_tokens
        fork._blocks = np.empty(0, dtype=np.int32)
        fork.set_blocks(data.block_ids)
        return fork

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Prompt and output, int64 [tokens]; a view that is valid until the next token is appended."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def counts(self) -> TokenCounts | None:
        """How often each token occurs, counted at first use and then kept up to date; None without penalties.

        The placeholders in spans are no tokens.
        """
        if self._counts is None and has_penalties(self.sampling_params):
            text, num_prompt_tokens = self.token_ids, self.num_prompt_tokens
            if self.spans:
                pieces = text_pieces(self.spans, 0, num_prompt_tokens)
                prompt = [text[start:stop] for start, stop in pieces]
                text = np.concatenate([*prompt, text[num_prompt_tokens:]])
                num_prompt_tokens = sum(piece.size for piece in prompt)
            self._counts = TokenCounts(text, num_prompt_tokens)
        return self._counts

    def append_token(self, token_id: int) -> None:
        """Append an output token."""
        if self.num_tokens == self._tokens.size:
            grown = np.empty(2 * self._tokens.size, dtype=np.int64)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self._counts is not None:
            self._counts.add(token_id)

    def share(self, count: int, drafts: Sequence[int] = ()) -> Scheduled:
        """This request's share of a step: the next `count` tokens, of which the last ones are drafts."""
        return Scheduled(self, self.num_computed_tokens, count, drafts)

    def set_drafts(self, drafts: Sequence[int]) -> None:
        """Write drafts behind the tokens, where a step reads them. The next tokens that are appended replace them."""
        stop = self.num_tokens + len(drafts)
        if stop > self._tokens.size:
            self._tokens = np.resize(self._tokens, max(stop, 2 * self._tokens.size))
        self._tokens[self.num_tokens : stop] = drafts

    def rows(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens [start, stop) and, where they go further, the drafts behind them."""
        return self._tokens[start:stop]

    def replace_last_token(self, token_id: int) -> None:
        """Replace the sampled token, as for a beam that continues with another one."""
        if self._counts is not None:
            self._counts.take_back(int(self._tokens[self.num_tokens - 1]))
            self._counts.add(token_id)
        self._tokens[self.num_tokens - 1] = token_id

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Int32 [blocks]: for each block of its tokens one of every group of layers, in their order."""
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


def _pooler_of(params: PoolingParams) -> Pooler:
    return TextQueries(params) if params.kind is Pooling.ALIGN else Pooler(params)


@value(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step: `count` tokens from `start` on, the last ones drafts."""

    state: RequestState
    start: int
    count: int
    drafts: Sequence[int] = ()

    @property
    def stop(self) -> int:
        """How many tokens, drafts included, are computed after the step."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the step computes the request's last token, so that a token is sampled or its vector is complete."""
        return self.stop == self.state.num_tokens + len(self.drafts)

    @property
    def num_sampled_rows(self) -> int:
        """How many of its rows give logits: the last token's, and each draft's."""
        return 1 + len(self.drafts) if self.samples else 0


class RequestTable:
    """All requests that the runner knows, updated from the scheduler's outputs."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        vocab_size: int,
        max_model_len: int,
        adapters: Container[str],
        row_width: int = 0,
        encoded: EncodedRows | None = None,
        source: EncoderDecoder | None = None,
    ) -> None:
        """`adapters`: digests of the adapters that are loaded now. `row_width`: see `ModelInfo`. `encoded`: the rows of
        encoded inputs. `source`: of a model with an encoder and a decoder, whose input begins each prompt.
        """
        self._source = source
        self._row_width = row_width
        self._encoded = encoded if encoded is not None else EncodedRows()
        self._adapters = adapters
        self._layout = layout
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def update(self, output: SchedulerOutput) -> None:
        """Take over what a step says of its requests: new and ended ones, forks, blocks."""
        forks = self._forks(output.scheduled_forked_reqs)
        for request_id in output.finished_req_ids:
            self._states.pop(request_id, None)
        self._states.update(forks)
        for new in output.scheduled_new_reqs:
            self._states[new.request_id] = RequestState(new)
        for cached in output.scheduled_cached_reqs:
            self._refresh(cached)

    def begin(
        self, counts: Iterable[tuple[str, int]], drafted: Mapping[str, Sequence[int]]
    ) -> tuple[list[Scheduled], dict[str, str]]:
        """Begin to compute the next tokens of requests, drafts included, of a step that `update` has taken over.

        Returns the shares, and by request id why requests can't be computed.
        """
        scheduled, failed = [], {}
        for request_id, count in counts:
            state = self._states.get(request_id)
            drafts: Sequence[int] = ()
            if drafted and state is not None and request_id in drafted:
                drafts = self._possible(drafted[request_id])
                count -= len(drafted[request_id]) - len(drafts)
                state.set_drafts(drafts)
            reason = (
                "the runner does not know this request" if state is None else self._fault(state, count, len(drafts))
            )
            if reason is not None or state is None:
                failed[request_id] = reason or ""
            elif count:
                scheduled.append(state.share(count, drafts))
                state.num_computed_tokens += count
        return scheduled, failed

    def commit(self, scheduled: Iterable[Scheduled], sampled: Container[str]) -> None:
        """Settle how far the requests of a computed step are, in which those of `sampled` were appended tokens."""
        for share in scheduled:
            if share.state.request_id in sampled:
                # The last token that was sampled is not computed yet, and neither is any draft that it replaced.
                share.state.num_computed_tokens = share.state.num_tokens - 1

    def _possible(self, drafts: Sequence[int]) -> Sequence[int]:
        """The drafts before the first one that is no token of the model: no such token is ever sampled."""
        wrong = (index for index, token_id in enumerate(drafts) if not 0 <= token_id < self._vocab_size)
        return drafts[: next(wrong, len(drafts))]

    def _forks(self, forked: Iterable[ForkedRequestData]) -> dict[str, RequestState]:
        parents = ((data, self._states.get(data.parent_id)) for data in forked)
        return {
            data.request_id: parent.fork(data)
            for data, parent in parents
            if parent is not None and data.num_shared_tokens <= parent.num_tokens
        }

    def _refresh(self, cached: CachedRequestData) -> None:
        state = self._states.get(cached.request_id)
        if state is None:
            return
        if cached.resumed:
            state.set_blocks(cached.new_block_ids)
        else:
            state.append_blocks(cached.new_block_ids)
        state.num_computed_tokens = cached.num_computed_tokens
        if cached.last_token_id is not None:
            state.replace_last_token(cached.last_token_id)

    def _fault(self, state: RequestState, count: int, num_drafts: int) -> str | None:
        """Why a share would read or write out of bounds, or None; checked so that only its own request fails."""
        start, stop = state.num_computed_tokens, state.num_computed_tokens + count
        if count < 0 or start < 0 or stop > state.num_tokens + num_drafts:
            return f"{count} tokens scheduled from {start} on, but the request has {state.num_tokens}"
        if stop > self._max_model_len:
            return f"position {stop - 1} is beyond the model's {self._max_model_len} tokens"
        if self._source is not None and (reason := _wrong_source(self._source, state, stop)):
            return reason
        size = state.block_table.size
        if stop > size // len(self._layout.groups) * self._layout.block_size:
            return f"{size} blocks don't hold {stop} tokens"
        if state.adapter and state.adapter not in self._adapters:
            return f"the adapter {state.adapter:.12} is not loaded"
        if state.lowest_block < 0 or state.highest_block >= self._num_blocks:
            return "a block id is out of range"
        if state.spans and start < state.spans[-1].stop and (reason := self._missing_rows(state.spans, start, stop)):
            return reason
        tokens = state.rows(start, stop)
        # A single token needs no minimum and maximum, which saves time in decode steps.
        lowest, highest = (tokens[0], tokens[0]) if count == 1 else (tokens.min(initial=0), tokens.max(initial=0))
        return None if 0 <= lowest <= highest < self._vocab_size else "a token id is out of range"

    def _missing_rows(self, spans: Sequence[Span], start: int, stop: int) -> str:
        """Why the rows of the positions [start, stop) can't be used; empty if they can."""
        for span in spans:
            if not span.overlaps(start, stop):
                continue
            if span.is_encoded and not self._encoded.has(span):
                return f"the rows of input {span.digest:.12} are not here"
            if not span.is_encoded and not has_rows(span, self._row_width):
                return f"the rows of a span are not {self._row_width} numbers for each of its positions"
        return ""


def _wrong_source(source: EncoderDecoder, state: RequestState, stop: int) -> str:
    """Why a prompt for an encoder and a decoder can't be computed up to a position; empty if it can."""
    spans = state.spans
    num_rows = 0 if not spans else source.most_rows if source.source == "speech" else spans[0].length
    if not 0 < num_rows <= source.most_rows or tuple(spans) != source_spans(spans[0].digest, num_rows):
        return "its prompt does not begin with an input of the encoder"
    if state.num_prompt_tokens <= spans[-1].stop:
        return "its prompt has no token for the decoder"
    if stop > spans[-1].stop + source.most_tokens:
        return f"position {stop - 1} is beyond the decoder's {source.most_tokens} tokens"
    return ""
