"""Loads a model directory: alone or divided among ranks and stages, on this machine's kernels or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from baton.engine.runner import ModelInfo, RunnerLost
from baton.errors import ConfigError
from baton.messages.capabilities import Capability
from baton.messages.node_report import ComputePath
from baton.messages.pooling import ModelPooling
from baton.messages.request_limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from baton.model_formats.adapters import DEFAULT_MAX_RANK
from baton.model_formats.images.encoded import ImageLimits
from baton.runner.against_transformers import TransformersLogits, UnverifiedModel
from baton.runner.backends.device import resolve_device
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.compute_paths import compute_paths
from baton.runner.draft_loading import LoadedDraftModel
from baton.runner.images.image_encoder import ImageEncoder
from baton.runner.images.image_inputs import ImageInputs
from baton.runner.images.pixels import ImageProcessor
from baton.runner.load_steps import named_errors, settle
from baton.runner.model import attention, layers
from baton.runner.model.pooling_files import read_pooling
from baton.runner.model.quantization.quantize import Quantization
from baton.runner.model.stage import Stage
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.model_runner import TorchModelRunner
from baton.runner.numerics import numerics_of
from baton.runner.pipelined_runner import PipelinedModelRunner
from baton.runner.ranks.rank import FirstRank, StartRanks
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.ranks.rank_leader import PipelinedTransformer
from baton.runner.ranks.rank_spec import RankSpec
from baton.runner.remote_stages.leading_stage import LeadingStage
from baton.runner.remote_stages.stage_leader import StageLeader
from baton.runner.remote_stages.stage_spec import StageSpec
from baton.runner.remote_stages.stages_here import StartStages, start_stages_here
from baton.runner.self_check import why_not_bit_exact
from baton.runner.spec import CacheSpec, DraftSpec, check_hosts
from baton.runner.torch_threads import elementwise_threads

_log = logging.getLogger(__name__)


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
    pipeline_parallel: int = 1,
    max_lora_rank: int = DEFAULT_MAX_RANK,
    allow_unverified: bool = False,
    start_ranks: StartRanks = RankGroup,
    stages: StageLeader | None = None,
    start_stages: StartStages = start_stages_here,
) -> TorchModelRunner:
    """Load a model directory with a cache of `num_blocks` blocks or `cache_bytes` bytes (exactly one of them).

    `cache_dtype` is auto, int8 or fp8; `device` is auto, cpu, cuda or cuda:N. `num_threads` is set for the whole
    process. `operations` replaces the machine's kernels (tests). `quantization`, `dequantize`, `draft`,
    `tensor_parallel`, `pipeline_parallel` and `allow_unverified`: see TorchSpec. `start_ranks` starts the ranks behind
    the first on a CPU, and `start_stages` the stages before the last on GPUs. `stages`: those of other hosts, which the
    runner ends, as it does if this raises. Raises ConfigError.
    """
    with _named_errors(model_dir), ExitStack() as on_failure:
        if stages is not None:
            on_failure.callback(stages.close)
            check_hosts(stages.stage.count, tensor_parallel, pipeline_parallel)
            pipeline_parallel = stages.stage.count
        where = resolve_device(device)
        own_caches = stages is not None or (where.type != "cpu" and pipeline_parallel > 1)
        if tensor_parallel > 1 and where.type != "cpu":
            # Parts of cuBLAS's products by columns have other bits than the whole ones (decision 43).
            raise ConfigError(
                "on a GPU --tp would give other tokens than one rank, since products by columns have other bits there; "
                "leave it out, and divide the model in stages (--pp)"
            )
        torch.set_num_threads(elementwise_threads(num_threads))
        attention.register()
        layers.register()
        whole = choose_operations(num_threads, where) if operations is None else operations
        in_parts = tensor_parallel * pipeline_parallel > 1
        loaded = load_model_for(whole, model_dir, dtype, where, quantization, dequantize=dequantize, in_parts=in_parts)
        if allow_unverified:
            verified_by = TransformersLogits.not_asked()
        else:
            # A rank would keep weights of which it packs a part.
            verified_by = TransformersLogits.of(loaded, cache_dtype=cache_dtype, keeps_weights=not in_parts)
        drafting = LoadedDraftModel.load(draft, loaded, whole, block_size, num_threads) if draft is not None else None
        cache = CacheSpec(num_blocks, cache_bytes, cache_dtype)
        if drafting is not None:
            bytes_beside = drafting.transformer.layout.block_bytes
            cache = replace(cache, block_bytes_beside=bytes_beside, num_blocks_beside=drafting.num_scratch_blocks)
        leader: FirstRank | StageLeader | None = None
        leading: PipelinedTransformer | None = None
        if own_caches:
            Stage(0, pipeline_parallel).layers(loaded.config.num_hidden_layers)
            if stages is None:
                stages = start_stages(model_dir, pipeline_parallel, num_threads, where)
                on_failure.callback(stages.close)
            stage_spec = StageSpec(
                index=0,
                count=pipeline_parallel,
                fingerprint=loaded.fingerprint,
                dtype=loaded.dtype,
                block_size=block_size,
                cache=cache,
                host_cache_bytes=host_cache_bytes,
                torch_threads=elementwise_threads(num_threads),
                quantization=quantization,
                dequantize=dequantize,
            )
            stages.load(stage_spec)
            with verified_by.blaming_the_architecture(loaded.architecture):
                leading = LeadingStage(loaded, whole, block_size, cache, num_threads, stages)
            stages.wait_until_ready(leading.layout.num_layers)
            leader = stages
        elif tensor_parallel * pipeline_parallel > 1:
            spec = RankSpec(
                model_dir=str(model_dir),
                dtype=loaded.dtype,
                block_size=block_size,
                cache=cache,
                num_threads=num_threads,
                tensor_parallel=tensor_parallel,
                pipeline_parallel=pipeline_parallel,
                quantization=quantization,
                dequantize=dequantize,
            )
            leader = first_rank = _start_first_rank(spec, loaded, start_ranks)
            on_failure.callback(first_rank.close)
            torch.set_num_threads(elementwise_threads(spec.least_threads))
            with verified_by.blaming_the_architecture(loaded.architecture):
                leading = first_rank.transformer(loaded)
        with verified_by.blaming_the_architecture(loaded.architecture):
            transformer = leading or Transformer(loaded, whole, block_size, cache, num_threads)
        images = _image_inputs(loaded, whole) if transformer.row_width else None
        info = _model_info(loaded, transformer, whole, name or model_dir.resolve().name, takes_adapters=leader is None)
        info = _verified(info, verified_by, transformer, model_dir)
        if isinstance(leader, StageLeader):
            leader.check_numerics(info.numerics)
        if images is not None:
            numerics = f"{info.numerics}/{images.numerics}"
            info = replace(info, numerics=numerics, capabilities=info.capabilities | {Capability.IMAGE})
        if leader is not None:
            info = replace(info, compute_paths=(*info.compute_paths, leader.path))
        draft_model = None
        if drafting is not None:
            info = replace(info, compute_paths=(*info.compute_paths, drafting.path(transformer)))
            draft_model = drafting.start(transformer, info)
        if leading is not None and leader is not None and pipeline_parallel > 1:
            runner: TorchModelRunner = PipelinedModelRunner(
                info, leading, host_cache_bytes, draft_model, leader, images
            )
        else:
            runner = TorchModelRunner(info, transformer, host_cache_bytes, draft_model, leader, images, max_lora_rank)
        on_failure.pop_all()
        return runner


def _verified(info: ModelInfo, verified_by: TransformersLogits, transformer: Transformer, model_dir: Path) -> ModelInfo:
    """Say whether a model's logits were found to be those of transformers. Raises UnverifiedModel if they differ."""
    if why_unverified := verified_by.why_not_compared(transformer):
        _log.warning("serves %s, whose logits are %s", model_dir, why_unverified)
    elif why_not := verified_by.why_not_those_of(transformer):
        raise UnverifiedModel(
            f"{model_dir} can't be served: {why_not}; choose another model, or serve this one with --allow-unverified"
        )
    return replace(info, is_verified=not why_unverified, why_unverified=why_unverified)


def _image_inputs(loaded: LoadedModel, operations: Operations) -> ImageInputs | None:
    """What makes rows of images; None for a model that takes none. Raises ConfigError."""
    if loaded.image_part is None:
        return None
    processor = ImageProcessor(loaded.checkpoint.directory)
    return ImageInputs(processor, ImageEncoder(loaded, operations), ImageLimits(MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS))


def _start_first_rank(spec: RankSpec, loaded: LoadedModel, start_ranks: StartRanks) -> FirstRank:
    """Start the other ranks. Raises ConfigError for heads or layers that can't be divided among so many."""
    config = loaded.config
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    spec.check_divides(config.num_hidden_layers, config.num_attention_heads, num_kv_heads)
    return FirstRank(spec, start_ranks)


@contextmanager
def _named_errors(model_dir: Path) -> Iterator[None]:
    """Raise what can go wrong while a loaded model is prepared as a ConfigError that names its directory."""
    try:
        with named_errors(model_dir):
            yield
    except RunnerLost as error:
        raise ConfigError(f"{model_dir} can't be divided among ranks: {error}") from error


def _capabilities(transformer: Transformer, pooling: ModelPooling) -> frozenset[Capability]:
    """What a model can be asked to do."""
    if not transformer.row_width:
        _log.info("prompts can't have embeddings: %s", transformer.why_no_given_rows)
        return pooling.capabilities
    return pooling.capabilities | {Capability.PROMPT_EMBEDS}


class _Exactness(NamedTuple):
    reason: str | None
    """Why a model's steps are not bit-exact; None: they are."""
    why_no_adapters: str
    """Why it takes no adapters although its steps are; empty if there is no such reason."""


def _settled(loaded: LoadedModel, transformer: Transformer, operations: Operations, takes_adapters: bool) -> _Exactness:
    """Choose torch's rows per call: with adapters bit-exact, too, if any number does that."""
    why_not = partial(why_not_bit_exact, loaded, transformer)
    if not takes_adapters:
        return _Exactness(settle(operations, transformer.set_rows_per_call, why_not), "")
    reason = settle(
        operations, transformer.set_rows_per_call, lambda: why_not() or transformer.why_adapters_not_bit_exact()
    )
    if reason is None or why_not() is not None:
        return _Exactness(reason, "")
    # Only adapters fail with the most rows: nobody has loaded one, and fewer rows take less time.
    return _Exactness(settle(operations, transformer.set_rows_per_call, why_not), reason)


def _model_info(
    loaded: LoadedModel, transformer: Transformer, operations: Operations, name: str, takes_adapters: bool
) -> ModelInfo:
    config = loaded.config
    reason, why_no_adapters = _settled(loaded, transformer, operations, takes_adapters)
    pooling = read_pooling(loaded.checkpoint.directory)
    capabilities = _capabilities(transformer, pooling)
    paths = compute_paths(operations, transformer, loaded.weights, loaded.dtype)
    if why_no_adapters:
        _log.warning("%s takes no adapters: %s", name, why_no_adapters)
        paths = (*paths, ComputePath("adapters", "refused", why_no_adapters))
    elif takes_adapters:
        capabilities |= {Capability.LORA}
    return ModelInfo(
        name=name,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        dtype=loaded.dtype,
        numerics=numerics_of(loaded.weights.treatment, operations, transformer.layout),
        vocab_size=config.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.checkpoint.eos_token_ids,
        bit_exact=reason is None,
        bit_exact_reason=reason or "",
        embedding_size=transformer.embedding_size,
        row_width=transformer.row_width,
        long_sequences=transformer.long_sequences,
        capabilities=capabilities,
        pooling=pooling,
        compute_paths=paths,
        weight_bytes=loaded.weights.num_bytes,
    )
