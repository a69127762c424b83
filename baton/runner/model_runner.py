"""Executes steps on a transformers model: the torch implementation of `ModelRunner`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import AdapterHost, ModelInfo, RefusedAdapters, RemotePart
from baton.errors import InvalidRequest
from baton.messages.node_report import RankReport
from baton.model_formats.adapters import DEFAULT_MAX_RANK
from baton.model_formats.encoder_decoders import EncoderDecoder
from baton.runner.adapters.in_parts import AdaptersInParts, HostedAdapters
from baton.runner.blocks.host_blocks import host_blocks_in
from baton.runner.execution.draft_model import NO_DRAFTS, DraftModel, Drafts
from baton.runner.execution.encoded_rows import EncodedInputs, EncodedRows
from baton.runner.execution.input_batch import flatten, with_given_rows, with_grid_positions, with_sources
from baton.runner.execution.pooling import TextQueries
from baton.runner.execution.prompt_logprobs import take_prompt_logprobs
from baton.runner.execution.request_table import RequestState, RequestTable
from baton.runner.execution.sampler import HostSampler, Sampled, Sampler, SamplingState
from baton.runner.execution.step_results import PooledShare, StepResults, StepRows
from baton.runner.execution.token_masks import TokenMasks
from baton.runner.execution.verification import sample_and_verify
from baton.runner.model.decoder import NO_ROWS, HiddenAndLogits
from baton.runner.model.transformer import Transformer
from baton.runner.ranks.rank_leader import RankLeader

_log = logging.getLogger(__name__)

_LARGEST_EXPONENT = 12
"""After faults one after the other a draft model rests for 2 to the power of at most this number of steps."""


class Aligner(Protocol):
    """Finds out when the tokens of a transcript are spoken."""

    def token_rows(self, state: RequestState, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Where each token is spoken: the index of a row of the encoder, [T].

        `queries` [T, heads, size] are those of `HiddenAndLogits`; the keys of the request are in its blocks. Raises
        ArithmeticError.
        """
        ...


class TorchModelRunner:
    """One model with its KV cache on one device of this machine. Called from one thread."""

    def __init__(
        self,
        model: ModelInfo,
        transformer: Transformer,
        host_cache_bytes: int = 0,
        draft_model: DraftModel | None = None,
        leader: RankLeader | None = None,
        inputs: EncodedInputs | None = None,
        max_lora_rank: int = DEFAULT_MAX_RANK,
        source: EncoderDecoder | None = None,
        aligner: Aligner | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`leader`: of a model that several processes compute; the runner ends them. `inputs`: what encodes images or
        the inputs of an encoder, for a model that takes them. `source`: of a model with an encoder and a decoder.
        `aligner`: of one that aligns transcripts. `sampler`: None for the one in numpy.
        """
        self._aligner = aligner
        self._has_sources = source is not None
        self.model = model
        self._drafter = draft_model
        self._leader = leader
        self._num_draft_faults = 0
        """Faults of the draft model one after the other."""
        self._num_steps_without_drafts = 0
        """After a fault, how many steps go by before the draft model is asked again."""
        self._transformer = transformer
        self._sampler = HostSampler() if sampler is None else sampler
        self.layout = transformer.layout
        self.memory = transformer.memory
        self._host = transformer.host_blocks(host_blocks_in(host_cache_bytes, transformer.counted_block_bytes))
        self.num_host_blocks = self._host.num_blocks
        self._masks = TokenMasks(model.vocab_size)
        self._adapters = transformer.adapters
        self.adapters = self._host_adapters(max_lora_rank)
        self.encoder = EncodedRows(inputs, f"{model.name} has no encoder")
        self._requests = RequestTable(
            transformer.layout,
            transformer.num_blocks,
            model.vocab_size,
            model.max_model_len,
            self._adapters.slots,
            model.row_width,
            self.encoder,
            source,
        )

    def _host_adapters(self, max_lora_rank: int) -> AdapterHost:
        if self._has_sources:
            return RefusedAdapters("a model with an encoder and a decoder computes no adapters")
        own = self._adapters
        parts = AdaptersInParts(own) if self._leader is None else self._leader.adapters_of(own)
        return HostedAdapters(own, parts, max_lora_rank)

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        return () if self._leader is None else self._leader.remote_parts

    @property
    def adaptable_modules(self) -> Mapping[str, tuple[int, int]]:
        """Numbers of outputs and inputs of the modules that adapters may change, the embedding apart, by name."""
        return self._transformer.adaptable.modules

    def rank_reports(self) -> Sequence[RankReport]:
        return () if self._leader is None else self._leader.rank_reports()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason, from any thread, once one of the other ranks is lost."""
        if self._leader is not None:
            self._leader.followers.on_lost(callback)

    def close(self) -> None:
        """End the processes that compute beside this one; idempotent. No step may be computed afterwards."""
        if self._leader is not None:
            self._leader.close()

    @property
    def num_requests(self) -> int:
        """Requests that the runner has not forgotten."""
        return len(self._requests)

    def expect(self, scheduler_output: SchedulerOutput) -> None:
        """Steps are begun when they are executed."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A failure of one request is reported in `failed`, never raised."""
        step = self._begin(scheduler_output)
        rows = self._rows_of(step, scheduler_output.num_scheduled_tokens.items())
        if rows is not None:
            samplers = [share.state for share in rows.samplers]
            with self._masks.filling(samplers, (share.state.root_id for share in rows.scheduled)):
                if rows.wants_hidden:
                    computed = self._transformer.compute_with_hidden(rows.batch, rows.logits_rows, rows.num_logits)
                elif self._sampler.is_on_device and not rows.chunks:
                    there = self._transformer.compute_there(rows.batch, rows.logits_rows)
                    computed = HiddenAndLogits(NO_ROWS, NO_ROWS, there=there)
                else:
                    computed = HiddenAndLogits(NO_ROWS, self._transformer.compute(rows.batch, rows.logits_rows))
            self._take(step, rows, computed)
        return self._end(step)

    def _begin(self, scheduler_output: SchedulerOutput) -> StepResults:
        """Make the copies of a step, and take over its news of requests."""
        started = time.perf_counter()
        if self._leader is not None:
            self._leader.announce_copies(scheduler_output)
        num_copied = self._host.execute(scheduler_output)
        copied = time.perf_counter()
        self._requests.update(scheduler_output)
        if self._drafter is not None:
            self._drafter.update(scheduler_output)
        if scheduler_output.blocks_to_copy:
            self._transformer.copy_blocks(
                [copy.source for copy in scheduler_output.blocks_to_copy],
                [copy.destination for copy in scheduler_output.blocks_to_copy],
            )
        if self._leader is not None:
            # Once a step is over its blocks may be used otherwise, also if it copies only.
            self._leader.await_copies()
        return StepResults(scheduler_output, copied, copied - started if num_copied else 0.0)

    def _rows_of(self, step: StepResults, counts: Iterable[tuple[str, int]]) -> StepRows | None:
        """The next rows of a step's requests; None if there are none. Requests that can't be computed have failed."""
        scheduled, failed = self._requests.begin(counts, step.decided.scheduled_spec_decode_tokens)
        step.failed |= failed
        if not scheduled:
            return None
        transformer = self._transformer
        batch = flatten(
            scheduled, self.layout, transformer.row_quantum, self._adapters.slots, transformer.long_sequences
        )
        if any(share.state.spans for share in scheduled):
            batch = with_given_rows(batch, scheduled, self.model.dtype, self.model.row_width, self.encoder)
            batch = with_grid_positions(batch, scheduled)
            if self._has_sources:
                batch = with_sources(batch, scheduled)
        return StepRows.of(scheduled, batch)

    def _take(self, step: StepResults, rows: StepRows, computed: HiddenAndLogits) -> None:
        """Sample from what was computed of a step's rows."""
        logits: Any = (computed.logits if computed.there is None else computed.there)[rows.sampled]
        of_prompts = computed.logits[len(logits) :] if rows.chunks else computed.logits[:0]
        for pooled in rows.pooled:
            self._pool(pooled, computed, step)
        prompt_logprobs, faults = take_prompt_logprobs(rows.chunks, of_prompts)
        step.prompt_logprobs |= prompt_logprobs
        verified = sample_and_verify(logits, rows.samplers, self._sample)
        for share, results in zip(rows.samplers, verified, strict=True):
            request_id, first = share.state.request_id, results[0]
            if (error := first.error or faults.get(request_id)) is not None:
                step.failed[request_id] = error if isinstance(error, InvalidRequest) else str(error)
                continue
            step.tokens[request_id] = [result.token_id for result in results]
            step.sampled.append(share.state)
            if first.logprobs is not None:
                step.logprobs[request_id] = [result.logprobs for result in results if result.logprobs is not None]
        step.failed |= {request_id: str(fault) for request_id, fault in faults.items() if request_id not in step.failed}
        self._requests.commit(rows.scheduled, step.tokens)
        step.computed_at = time.perf_counter()

    def _pool(self, pooled: PooledShare, computed: HiddenAndLogits, step: StepResults) -> None:
        """Take a share's rows into its vector, and add the vector to the step's results once the prompt is computed."""
        request_id = pooled.share.state.request_id
        try:
            if isinstance(pooled.pooler, TextQueries):
                if (vector := self._aligned(pooled, pooled.pooler, computed)) is not None:
                    step.embeddings[request_id] = vector
                return
            rows = (computed.logits if pooled.of_logits else computed.hidden)[pooled.places]
            pooled.pooler.take(pooled.start, rows)
            if pooled.share.samples:
                step.embeddings[request_id] = pooled.pooler.vector(self.model.pooling.activation)
        except ArithmeticError as error:
            step.failed[request_id] = str(error)

    def _aligned(self, pooled: PooledShare, queries: TextQueries, computed: HiddenAndLogits) -> bytes | None:
        """Take the queries of a share; returns the rows at which its tokens are spoken once all are computed."""
        if self._aligner is None or computed.queries is None:
            raise ArithmeticError("the model has no heads that align")
        queries.take(pooled.start, computed.queries[pooled.places])
        if not pooled.share.samples:
            return None
        rows = self._aligner.token_rows(pooled.share.state, queries.queries)
        return rows.astype("<f4").tobytes()

    def _end(self, step: StepResults) -> ModelRunnerOutput:
        """Draft behind the sampled tokens of a step; returns its results."""
        drafts = self._draft(step.decided, step.sampled)
        return ModelRunnerOutput(
            step.tokens,
            step.logprobs,
            step.failed,
            step.embeddings,
            step.prompt_logprobs,
            draft_token_ids=drafts.token_ids,
            computes_ahead=drafts.computes_ahead,
            draft_seconds=drafts.round_seconds,
            copy_seconds=step.copy_seconds,
            compute_seconds=max(0.0, step.computed_at - step.began_at),
        )

    def _draft(self, scheduler_output: SchedulerOutput, sampled: Sequence[RequestState]) -> Drafts:
        """Draft what follows the tokens that were sampled, for the requests that want drafts."""
        drafter, wanted = self._drafter, scheduler_output.num_drafts_wanted
        if drafter is None:
            return NO_DRAFTS
        if self._num_steps_without_drafts:
            self._num_steps_without_drafts -= 1
            return NO_DRAFTS
        try:
            drafts = drafter.draft(
                [(state, wanted[state.request_id]) for state in sampled if state.request_id in wanted],
                scheduler_output.num_spare_tokens,
            )
        except Exception:
            # The step's tokens are right without drafts, and its requests must not fail for them.
            drafter.forget_all()
            self._num_draft_faults += 1
            self._num_steps_without_drafts = 2 ** min(self._num_draft_faults, _LARGEST_EXPONENT)
            _log.exception("the draft model failed, and drafts nothing for %d steps", self._num_steps_without_drafts)
            return NO_DRAFTS
        if drafts.token_ids:
            self._num_draft_faults = 0
        return drafts

    def _sample(self, logits: Any, states: Sequence[RequestState]) -> list[Sampled]:
        masks, unmasked = self._masks.fill(states)
        results = self._sampler.sample(
            logits,
            [
                SamplingState(
                    state.sampling_params,
                    state.token_ids,
                    state.num_prompt_tokens,
                    self.model.eos_token_ids,
                    masks.get(state.request_id) if masks else None,
                    state.rules,
                    state.counts,
                )
                for state in states
            ],
        )
        if not unmasked:
            return results
        return [
            result if error is None else Sampled(-1, error=error)
            for result, error in zip(results, (unmasked.get(state.request_id) for state in states), strict=True)
        ]
