"""Executes steps on a transformers model: the torch implementation of `ModelRunner`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import PROBE_BLOCKS, KVLayout, KVMemory, ModelInfo, RunnerLost
from baton.errors import ConfigError, InvalidRequest
from baton.messages.sampling import TokenLogprobs
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.device import resolve_device
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.backends.ranks.shard import Shard
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.blocks.host_blocks import host_blocks_in
from baton.runner.compute_paths import compute_paths
from baton.runner.draft_loading import LoadedDraftModel
from baton.runner.execution.draft_model import NO_DRAFTS, DraftModel, Drafts
from baton.runner.execution.embedding import embedding_of
from baton.runner.execution.input_batch import RequestState, RequestTable, Scheduled, flatten
from baton.runner.execution.prompt_logprobs import chunks_of, take_prompt_logprobs
from baton.runner.execution.sampler import Sampled, SamplingState, sample
from baton.runner.execution.token_masks import TokenMasks
from baton.runner.execution.verification import sample_and_verify
from baton.runner.model import attention, layers
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.quantization.quantize import Quantization
from baton.runner.model.quantization.stored_weight import UnusableWeight
from baton.runner.model.transformer import Transformer, elementwise_threads
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.ranks.first_rank import FirstRank, StartRanks
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.self_check import why_not_bit_exact
from baton.runner.spec import CacheSpec, DraftSpec

_log = logging.getLogger(__name__)

_LARGEST_EXPONENT = 12
"""After faults one after the other a draft model rests for 2 to the power of at most this number of steps."""


class TorchModelRunner:
    """One model with its KV cache on one device of this machine. Called from one thread."""

    def __init__(
        self,
        model: ModelInfo,
        transformer: Transformer,
        host_cache_bytes: int = 0,
        draft_model: DraftModel | None = None,
        first_rank: FirstRank | None = None,
    ) -> None:
        """`first_rank`: of a model that several ranks compute; the runner ends them."""
        self._model = model
        self._drafter = draft_model
        self._first_rank = first_rank
        self._num_draft_faults = 0
        """Faults of the draft model one after the other."""
        self._num_steps_without_drafts = 0
        """After a fault, how many steps go by before the draft model is asked again."""
        self._transformer = transformer
        cache = transformer.kv_cache
        self._memory = KVMemory(
            base_address=cache.data_ptr(),
            num_blocks=transformer.num_blocks,
            block_bytes=transformer.layout.block_bytes,
            kind="DRAM" if cache.device.type == "cpu" else "VRAM",
            device_id=cache.device.index or 0,
            owner=transformer.kv_memory,
            num_probe_blocks=PROBE_BLOCKS,
            layout=transformer.layout,
        )
        self._host = transformer.host_blocks(host_blocks_in(host_cache_bytes, transformer.layout.block_bytes))
        self._masks = TokenMasks(model.vocab_size)
        self._requests = RequestTable(transformer.layout, transformer.num_blocks, model.vocab_size, model.max_model_len)

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def layout(self) -> KVLayout:
        return self._transformer.layout

    @property
    def memory(self) -> KVMemory:
        return self._memory

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def rank_pids(self) -> Sequence[int]:
        return () if self._first_rank is None else self._first_rank.followers.pids

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason, from any thread, once one of the other ranks is lost."""
        if self._first_rank is not None:
            self._first_rank.followers.on_lost(callback)

    def close(self) -> None:
        """End the processes that compute beside this one; idempotent. No step may be computed afterwards."""
        if self._first_rank is not None:
            self._first_rank.close()

    @property
    def num_requests(self) -> int:
        """Requests that the runner has not forgotten."""
        return len(self._requests)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A failure of one request is reported in `failed`, never raised."""
        started = time.perf_counter()
        num_copied = self._host.execute(scheduler_output)
        copied = time.perf_counter()
        copy_seconds = copied - started if num_copied else 0.0
        scheduled, failed = self._requests.update(scheduler_output)
        if self._drafter is not None:
            self._drafter.update(scheduler_output)
        if scheduler_output.blocks_to_copy:
            self._transformer.copy_blocks(
                [copy.source for copy in scheduler_output.blocks_to_copy],
                [copy.destination for copy in scheduler_output.blocks_to_copy],
            )
        if not scheduled:
            drafts = self._draft(scheduler_output, ())
            return ModelRunnerOutput({}, failed=failed, computes_ahead=drafts.computes_ahead, copy_seconds=copy_seconds)
        batch = flatten(scheduled, self.layout, self._transformer.row_quantum)
        samplers = [share for share in scheduled if share.samples]
        embeddings: dict[str, bytes] = {}
        chunks = chunks_of(scheduled)
        rows = np.concatenate([batch.logits_rows, *(chunk.rows for chunk in chunks)]) if chunks else None
        num_sampled = batch.logits_rows.size
        with self._masks.filling(share.state for share in samplers):
            if any(share.state.embeds for share in samplers):
                computed = self._transformer.compute_with_hidden(batch, rows)
                logits, of_prompts = computed.logits[:num_sampled], computed.logits[num_sampled:]
                logits, samplers = _take_embeddings(computed.hidden[:num_sampled], logits, samplers, embeddings, failed)
            else:
                logits = self._transformer.compute(batch, rows)
                logits, of_prompts = logits[:num_sampled], logits[num_sampled:]
        prompt_logprobs, faults = take_prompt_logprobs(chunks, of_prompts)
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        invalid = set()
        for share, results in zip(samplers, sample_and_verify(logits, samplers, self._sample), strict=True):
            request_id, first = share.state.request_id, results[0]
            if (error := first.error or faults.get(request_id)) is not None:
                failed[request_id] = str(error)
                if isinstance(error, InvalidRequest):
                    invalid.add(request_id)
                continue
            tokens[request_id] = [result.token_id for result in results]
            if first.logprobs is not None:
                logprobs[request_id] = [result.logprobs for result in results if result.logprobs is not None]
        failed |= {request_id: str(fault) for request_id, fault in faults.items() if request_id not in failed}
        self._requests.commit(scheduled, tokens)
        compute_seconds = time.perf_counter() - copied
        drafts = self._draft(scheduler_output, [share.state for share in samplers if share.state.request_id in tokens])
        return ModelRunnerOutput(
            tokens,
            logprobs,
            failed,
            invalid,
            embeddings,
            prompt_logprobs,
            draft_token_ids=drafts.token_ids,
            computes_ahead=drafts.computes_ahead,
            draft_seconds=drafts.round_seconds,
            copy_seconds=copy_seconds,
            compute_seconds=compute_seconds,
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

    def _sample(self, logits: npt.NDArray[np.float32], states: Sequence[RequestState]) -> list[Sampled]:
        masks, unmasked = self._masks.fill(states)
        results = sample(
            logits,
            [
                SamplingState(
                    state.sampling_params,
                    state.token_ids,
                    state.num_prompt_tokens,
                    self._model.eos_token_ids,
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


def _take_embeddings(
    hidden: npt.NDArray[np.float32],
    logits: npt.NDArray[np.float32],
    samplers: Sequence[Scheduled],
    embeddings: dict[str, bytes],
    failed: dict[str, str],
) -> tuple[npt.NDArray[np.float32], list[Scheduled]]:
    """Embed the prompts of the requests that ask for it. `hidden` and `logits`: of the rows that sample.

    Adds the embeddings to `embeddings` and failures to `failed`; returns the logits and shares of the others.
    """
    owners = [share for share in samplers for _ in range(share.num_sampled_rows)]
    others = [row for row, share in enumerate(owners) if not share.state.embeds]
    for share, row in zip(owners, hidden, strict=True):
        if share.state.embeds:
            try:
                embeddings[share.state.request_id] = embedding_of(row)
            except ArithmeticError as error:
                failed[share.state.request_id] = str(error)
    return logits[others], [share for share in samplers if not share.state.embeds]


def load_runner(
    model_dir: Path,
    *,
    dtype: str = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    cache_bytes: int | None = None,
    cache_dtype: str = "auto",
    host_cache_bytes: int = 0,
    num_threads: int = 1,
    name: str = "",
    device: str = "cpu",
    operations: Operations | None = None,
    quantization: Quantization | None = None,
    dequantize: bool = False,
    draft: DraftSpec | None = None,
    tensor_parallel: int = 1,
    start_ranks: StartRanks = RankGroup,
) -> TorchModelRunner:
    """Load a model directory with a cache of `num_blocks` blocks or `cache_bytes` bytes (exactly one of them).

    `cache_dtype` is auto, int8 or fp8; `device` is auto, cpu, cuda or cuda:N. `num_threads` is set for the whole
    process. `operations` replaces the machine's kernels (tests). `quantization`, `dequantize`, `draft` and
    `tensor_parallel`: see TorchSpec; `start_ranks` starts the ranks behind the first. Raises ConfigError.
    """
    where = resolve_device(device)
    if tensor_parallel > 1 and where.type != "cpu":
        raise ConfigError("a model on a GPU can't be divided among ranks so far; leave --tp out, or use --device cpu")
    torch.set_num_threads(elementwise_threads(num_threads))
    attention.register()
    layers.register()
    whole = choose_operations(num_threads, where) if operations is None else operations
    loaded = load_model_for(whole, model_dir, dtype, where, quantization, dequantize=dequantize)
    drafting = LoadedDraftModel.load(draft, loaded, whole, block_size, num_threads) if draft is not None else None
    cache = CacheSpec(num_blocks, cache_bytes, cache_dtype)
    if drafting is not None:
        bytes_beside = drafting.transformer.layout.block_bytes
        cache = replace(cache, block_bytes_beside=bytes_beside, num_blocks_beside=drafting.num_scratch_blocks)
    with _named_errors(model_dir), ExitStack() as on_failure:
        first_rank = None
        if tensor_parallel > 1:
            spec = RankSpec(
                model_dir=str(model_dir),
                dtype=loaded.dtype,
                block_size=block_size,
                cache=cache,
                num_threads=num_threads,
                size=tensor_parallel,
                quantization=quantization,
                dequantize=dequantize,
            )
            first_rank = _start_first_rank(spec, loaded, start_ranks)
            on_failure.callback(first_rank.close)
            torch.set_num_threads(elementwise_threads(spec.least_threads))
            transformer: Transformer = first_rank.transformer(loaded)
        else:
            transformer = Transformer(loaded, whole, block_size, cache, num_threads)
        info = _model_info(loaded, transformer, whole, name or model_dir.resolve().name)
        if first_rank is not None:
            info = replace(info, compute_paths=(*info.compute_paths, first_rank.path))
        draft_model = None
        if drafting is not None:
            info = replace(info, compute_paths=(*info.compute_paths, drafting.path(transformer)))
            draft_model = drafting.start(transformer, info)
        runner = TorchModelRunner(info, transformer, host_cache_bytes, draft_model, first_rank)
        on_failure.pop_all()
        return runner


def _start_first_rank(spec: RankSpec, loaded: LoadedModel, start_ranks: StartRanks) -> FirstRank:
    """Start the other ranks. Raises ConfigError for heads that can't be divided among so many."""
    num_heads = loaded.config.num_attention_heads
    Shard(0, spec.size).heads(num_heads, getattr(loaded.config, "num_key_value_heads", None) or num_heads)
    return FirstRank(spec, start_ranks)


@contextmanager
def _named_errors(model_dir: Path) -> Iterator[None]:
    """Raise what can go wrong while a loaded model is prepared as a ConfigError that names its directory."""
    try:
        yield
    except UnusableWeight as error:
        raise ConfigError(f"the weights in {model_dir} can't be used: {error}") from error
    except UnsupportedAttention as error:
        raise UnsupportedAttention(f"{model_dir} can't be served: {error}; choose another model") from error
    except RunnerLost as error:
        raise ConfigError(f"{model_dir} can't be divided among ranks: {error}") from error
    except KernelArgumentError as error:
        raise ConfigError(f"{model_dir} has a shape that Baton's kernels can't compute ({error})") from error


def _settle(loaded: LoadedModel, transformer: Transformer, operations: Operations) -> str | None:
    """Choose the smallest number of rows per call with which torch's products are bit-exact on this machine.

    Returns None, or why the model is not bit-exact.
    """
    if not isinstance(operations, TorchOperations):
        return why_not_bit_exact(loaded, transformer)
    reason: str | None = None
    for rows in operations.rows_to_try:
        operations.rows_per_call = rows
        reason = why_not_bit_exact(loaded, transformer)
        if reason is None:
            break
    return reason


def _model_info(loaded: LoadedModel, transformer: Transformer, operations: Operations, name: str) -> ModelInfo:
    config = loaded.config
    reason = _settle(loaded, transformer, operations)
    return ModelInfo(
        name=name,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        dtype=loaded.dtype,
        numerics=_numerics(loaded, operations, transformer),
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=loaded.checkpoint.eos_token_ids,
        bit_exact=reason is None,
        bit_exact_reason=reason or "",
        embedding_size=transformer.hidden_size,
        compute_paths=compute_paths(operations, transformer, loaded.weights, loaded.dtype),
        weight_bytes=loaded.weights.num_bytes,
    )


def _numerics(loaded: LoadedModel, operations: Operations, transformer: Transformer) -> str:
    """A name for everything that decides the bits, beside the files of the model."""
    numerics = f"{operations.numerics()}/torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    if loaded.weights.treatment:
        numerics += f"/{loaded.weights.treatment}"
    if transformer.layout.has_scales:
        # A stream must not move between decode nodes whose caches round differently.
        numerics += f"/kv-{transformer.layout.dtype}"
    return numerics
