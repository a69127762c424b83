"""Loads a model directory: alone or divided among ranks and stages, on this machine's kernels or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from baton.engine.runner import KVLayout, LayerState, ModelInfo
from baton.errors import ConfigError
from baton.messages.node_model import Capability
from baton.messages.node_report import ComputePath
from baton.runner.against_transformers import TransformersLogits, UnverifiedModel
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.cuda.device_sampler import NUMERICS, sampler_on
from baton.runner.backends.device import resolve_device
from baton.runner.backends.operations import Operations
from baton.runner.compute_paths import compute_paths, sampler_path
from baton.runner.execution.draft_model import DraftModel
from baton.runner.execution.sampler import HostSampler
from baton.runner.images import ImageInputs
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.checkpoint import configs_of_layers
from baton.runner.model.pooling_files import read_pooling
from baton.runner.model.stage import ONE_STAGE
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.model_runner import TorchModelRunner
from baton.runner.parts import divided
from baton.runner.pipelined_runner import PipelinedModelRunner
from baton.runner.ranks.rank import FirstRank, LeadingTransformer, StartRanks, divided_operations
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.ranks.rank_leader import RankLeader
from baton.runner.self_check import why_not_bit_exact
from baton.runner.shared_by_loaders import model_info, named_errors, prepared_operations, settle
from baton.runner.spec import CacheSpec, DraftSpec, TorchSpec, WeightSpec, check_hosts
from baton.runner.stage_spec import StageSpec
from baton.runner.stages.leading_stage import LeadingStage
from baton.runner.stages.stage_leader import StageLeader
from baton.runner.stages.stages_here import StartStages, start_stages_here
from baton.runner.torch_threads import elementwise_threads

_log = logging.getLogger(__name__)

_MAX_DRAFTING = 64
"""The most requests whose drafts may all reach beyond their blocks in one step."""


def load_runner(
    spec: TorchSpec,
    *,
    operations: Operations | None = None,
    start_ranks: StartRanks = RankGroup,
    stages: StageLeader | None = None,
    start_stages: StartStages = start_stages_here,
    make_runner: Callable[..., TorchModelRunner] = TorchModelRunner,
) -> TorchModelRunner:
    """Load a decoder, alone or divided as the specification says. Raises ConfigError.

    `operations` replaces the machine's kernels (tests). `start_ranks` starts the ranks of the last stage behind the
    first, and `start_stages` the stages before the last. `stages`: those of other hosts, which the runner ends, as it
    does if this raises. `make_runner`: the class of the runner of a model that is not divided in stages.
    """
    with named_errors(spec.model_dir), ExitStack() as on_failure:
        if stages is not None:
            on_failure.callback(stages.close)
            check_hosts(stages.stage.count, spec.pipeline_parallel)
            spec = replace(spec, pipeline_parallel=stages.stage.count)
        device = resolve_device(spec.device)
        if spec.tensor_parallel > 1 and device.type != "cpu":
            # Parts of cuBLAS's products by columns have other bits than the whole ones (decision 43).
            raise ConfigError(
                "on a GPU --tp would give other tokens than one rank, since products by columns have other bits there; "
                "leave it out, and divide the model in stages (--pp)"
            )
        loading = _Loading.begun(spec, prepared_operations(spec, device, operations), device)
        model = loading.model
        on_one_cpu = stages is None and device.type == "cpu"
        first_rank: FirstRank | None = None
        transformer: Transformer
        with loading.verified_by.blaming_the_architecture(model.architecture):
            if not spec.is_divided:
                transformer = Transformer(model, loading.operations, spec.block_size, loading.cache, spec.num_threads)
            else:
                stage_spec = loading.stage_spec(on_one_cpu)
                # A machine without kernels for parts is refused here, before any process is started.
                operations = divided_operations(stage_spec.num_threads) if on_one_cpu else loading.operations
                if stages is None and spec.pipeline_parallel > 1:
                    stages = start_stages(spec, device)
                    on_failure.callback(stages.close)
                if spec.tensor_parallel > 1:
                    first_rank = FirstRank(stage_spec, stages or ONE_STAGE, start_ranks)
                    on_failure.callback(first_rank.close)
                transformer = loading.leading(operations, stage_spec, stages, first_rank)
        paths = () if stages is None else (stages.path,)
        if on_one_cpu and spec.is_divided:
            paths = (path_of_ranks(spec),)
        runner = loading.runner(transformer, stages or first_rank, paths, make_runner)
        on_failure.pop_all()
        return runner


@dataclass(frozen=True, slots=True)
class _Loading:
    """A decoder that is in memory, and not ready to compute yet."""

    spec: TorchSpec
    operations: Operations
    model: LoadedModel
    verified_by: TransformersLogits
    drafting: LoadedDraftModel | None
    cache: CacheSpec
    """The size of the cache, the share of the model that drafts included."""

    @classmethod
    def begun(cls, spec: TorchSpec, operations: Operations, device: torch.device) -> _Loading:
        """Load the model, and the one that drafts for it. Raises ConfigError."""
        model = load_model_for(operations, spec.model_dir, spec.weights, device)
        if spec.allow_unverified:
            verified_by = TransformersLogits.not_asked()
        else:
            # A rank would keep weights of which it packs a part.
            verified_by = TransformersLogits.of(model, cache_dtype=spec.cache_dtype, keeps_weights=not spec.is_divided)
        drafting, cache = None, spec.cache
        if spec.draft is not None:
            drafting = LoadedDraftModel.load(spec.draft, model, operations, spec)
            cache = drafting.beside(cache)
        return cls(spec, operations, model, verified_by, drafting, cache)

    def stage_spec(self, on_one_cpu: bool) -> StageSpec:
        """What the last stage loads, which leads. Raises ConfigError for heads or layers that can't be divided so.

        `on_one_cpu`: all stages share the threads and the memory of this host.
        """
        spec, config = self.spec, self.model.config
        num_threads = divided(spec.num_threads, spec.pipeline_parallel)[-1] if on_one_cpu else spec.num_threads
        least_threads = divided(num_threads, spec.tensor_parallel)[-1]
        stage_spec = StageSpec(
            model_dir=str(spec.model_dir),
            fingerprint=self.model.fingerprint,
            dtype=self.model.dtype,
            block_size=spec.block_size,
            cache=replace(self.cache, is_of_all_stages=on_one_cpu),
            num_threads=num_threads,
            torch_threads=elementwise_threads(least_threads),
            tensor_parallel=spec.tensor_parallel,
            index=spec.pipeline_parallel - 1,
            count=spec.pipeline_parallel,
            host_cache_bytes=spec.host_cache_bytes,
            quantization=spec.quantization,
            dequantize=spec.dequantize,
        )
        for layer in configs_of_layers(config):
            # A model without attention has no heads to divide.
            num_heads = getattr(layer, "num_attention_heads", spec.tensor_parallel)
            num_kv_heads = getattr(layer, "num_key_value_heads", None) or num_heads
            stage_spec.check_divides(config.num_hidden_layers, num_heads, num_kv_heads)
        return stage_spec

    def leading(
        self, operations: Operations, spec: StageSpec, stages: StageLeader | None, first_rank: FirstRank | None
    ) -> LeadingTransformer:
        """The last stage's part of the model, while all ranks and stages load theirs."""
        torch.set_num_threads(spec.torch_threads)
        if stages is None:
            return LeadingTransformer(self.model, operations, spec, ONE_STAGE, first_rank)
        stages.load(spec, first_rank)
        leading = LeadingStage(self.model, operations, spec, stages, first_rank)
        stages.wait_until_ready(leading.entries_of_stages)
        return leading

    def runner(
        self,
        transformer: Transformer,
        leader: RankLeader | None,
        paths: Sequence[ComputePath],
        make_runner: Callable[..., TorchModelRunner],
    ) -> TorchModelRunner:
        """Check what the transformer computes, and make its runner. Raises ConfigError.

        `paths`: what computes beside this process.
        """
        spec = self.spec
        images = self._images() if transformer.row_width else None
        info = self._verified(self._info(transformer), transformer)
        if isinstance(leader, StageLeader):
            leader.check_numerics(info.numerics)
        if images is not None:
            numerics = f"{info.numerics}/{images.numerics}"
            info = replace(
                info,
                numerics=numerics,
                row_numerics=images.row_numerics(self.model, self.operations),
                capabilities=info.capabilities | {Capability.IMAGE},
            )
        info = replace(info, compute_paths=(*info.compute_paths, *paths))
        has_vocabulary = transformer.num_logits == info.vocab_size
        sampler = sampler_on(transformer.device, info.vocab_size) if has_vocabulary else HostSampler()
        if transformer.device.type != "cpu":
            info = replace(info, compute_paths=(*info.compute_paths, sampler_path(sampler)))
        if sampler.is_on_device:
            info = replace(info, numerics=f"{info.numerics}/{NUMERICS}")
        draft_model = None
        if self.drafting is not None:
            info = replace(info, compute_paths=(*info.compute_paths, self.drafting.path(transformer)))
            draft_model = self.drafting.start(transformer, info)
        if isinstance(transformer, LeadingStage) and leader is not None:
            return PipelinedModelRunner(
                info, transformer, spec.host_cache_bytes, draft_model, leader, images, spec.max_lora_rank, sampler
            )
        rest = leader, images, spec.max_lora_rank
        return make_runner(info, transformer, spec.host_cache_bytes, draft_model, *rest, sampler=sampler)

    def _images(self) -> ImageInputs | None:
        """What makes rows of images; None for a model that takes none. Raises ConfigError."""
        return None if self.model.image_part is None else ImageInputs.of(self.model, self.operations)

    def _verified(self, info: ModelInfo, transformer: Transformer) -> ModelInfo:
        """Say whether the model's logits are those of transformers. Raises UnverifiedModel if they differ."""
        model_dir = self.spec.model_dir
        if why_unverified := self.verified_by.why_not_compared(transformer):
            _log.warning("serves %s, whose logits are %s", model_dir, why_unverified)
        elif why_not := self.verified_by.why_not_those_of(transformer):
            raise UnverifiedModel(
                f"{model_dir} can't be served: {why_not}; choose another model, or serve this one with "
                "--allow-unverified"
            )
        return replace(info, is_verified=not why_unverified, why_unverified=why_unverified)

    def _info(self, transformer: Transformer) -> ModelInfo:
        model, operations = self.model, self.operations
        why_not_exact, why_no_adapters = self._settled(transformer)
        info = model_info(self.spec, model, operations, transformer.layout, transformer.max_model_len, why_not_exact)
        pooling = read_pooling(model.checkpoint.directory)
        capabilities = pooling.capabilities
        if transformer.row_width:
            capabilities |= {Capability.PROMPT_EMBEDS}
        else:
            _log.info("prompts can't have embeddings: %s", transformer.why_no_given_rows)
        paths = compute_paths(operations, transformer, model.weights, model.dtype)
        if states := states_path(transformer.layout):
            paths = (*paths, states)
        if model.left_out:
            runs = f"left out, the text alone is served: {', '.join(model.left_out)}"
            paths = (*paths, ComputePath("other parts", runs))
        if why_no_adapters:
            _log.warning("%s takes no adapters: %s", info.name, why_no_adapters)
            paths = (*paths, ComputePath("adapters", "refused", why_no_adapters))
        else:
            capabilities |= {Capability.LORA}
        return replace(
            info,
            embedding_size=transformer.embedding_size,
            row_width=transformer.row_width,
            long_sequences=transformer.long_sequences,
            capabilities=capabilities,
            pooling=pooling,
            compute_paths=paths,
        )

    def _settled(self, transformer: Transformer) -> tuple[str | None, str]:
        """Choose torch's rows per call: with adapters bit-exact, too, if any number does that.

        Returns why the model's steps are not bit-exact (None: they are), and why it takes no adapters although they
        are (empty if there is no such reason).
        """
        why_not = partial(why_not_bit_exact, self.model, transformer)
        settled = partial(settle, self.operations, transformer.set_rows_per_call)
        reason = settled(lambda: why_not() or transformer.why_adapters_not_bit_exact())
        if reason is None or why_not() is not None:
            return reason, ""
        # Only adapters fail with the most rows: nobody has loaded one, and fewer rows take less time.
        return settled(why_not), reason


def states_path(layout: KVLayout) -> ComputePath | None:
    """What a sequence's states take, for operators; None for a model that keeps none."""
    if not layout.keeps_states:
        return None
    num_bytes = sum(layer.num_bytes for layer in layout.layers if isinstance(layer, LayerState))
    size = f"{num_bytes >> 20} MiB" if num_bytes >> 20 else f"{-(-num_bytes // 1024)} KiB"
    return ComputePath("states", f"{size} of a sequence in the KV cache, kept every {layout.block_size} tokens")


def path_of_ranks(spec: TorchSpec) -> ComputePath:
    """What computes a model that is divided among processes of one host's CPU, for operators."""
    shares = divided(spec.num_threads, spec.pipeline_parallel)
    threads = [num for share in shares for num in divided(share, spec.tensor_parallel)]
    stages = f" in {spec.pipeline_parallel} stages" if spec.pipeline_parallel > 1 else ""
    slow = f"they share {spec.num_threads} threads: give the node at least {len(threads)} (--threads)"
    return ComputePath(
        "ranks",
        f"{len(threads)} processes{stages} with {'+'.join(map(str, threads))} threads",
        slow if len(threads) > spec.num_threads else "",
    )


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A draft model whose cache is not allocated yet."""

    spec: DraftSpec
    loaded: LoadedModel
    transformer: Transformer

    @classmethod
    def load(cls, spec: DraftSpec, drafted_for: LoadedModel, operations: Operations, beside: TorchSpec) -> Self:
        """Load a model to draft for another one, on its device and with its dtype. Raises ConfigError."""
        how = WeightSpec(drafted_for.dtype, spec.quantization)
        loaded = load_model_for(operations, spec.model_dir, how, drafted_for.device)
        try:
            transformer = Transformer(loaded, operations, beside.block_size, None, beside.num_threads)
        except (UnusableWeight, UnsupportedAttention, KernelArgumentError) as error:
            raise ConfigError(f"the model in {spec.model_dir} can't draft: {error}") from error
        if transformer.layout.keeps_states:
            raise ConfigError(
                f"the model in {spec.model_dir} can't draft: its layers keep states, which can't be taken back behind "
                "a wrong draft; choose one with attention alone"
            )
        return cls(spec, loaded, transformer)

    def beside(self, cache: CacheSpec) -> CacheSpec:
        """The cache of the model that it drafts for, beside its own, with blocks of the configured size."""
        layout = self.transformer.layout
        # Scratch blocks are for drafts that reach beyond the blocks of their requests.
        num_scratch_blocks = _MAX_DRAFTING * -(-self.spec.num_tokens // layout.block_size)
        return replace(cache, block_bytes_beside=layout.block_bytes, num_blocks_beside=num_scratch_blocks)

    def start(self, drafted_for: Transformer, model: ModelInfo) -> DraftModel:
        """Allocate the cache, with a block for each of the other model's. Raises ConfigError.

        `drafted_for` and `model`: the other model, whose requests end with its own tokens.
        """
        layout, own_size = drafted_for.layout, self.transformer.layout.block_size
        num_scratch_blocks = self.beside(CacheSpec()).of_larger_blocks(layout.block_size // own_size).num_blocks_beside
        self.transformer.take_block_size(layout.block_size)
        self.transformer.allocate_cache(drafted_for.num_blocks + num_scratch_blocks)
        return DraftModel(
            self.transformer,
            num_blocks=drafted_for.num_blocks,
            num_scratch_blocks=num_scratch_blocks,
            num_groups=len(layout.groups),
            max_model_len=self.transformer.max_model_len,
            vocab_size=self.loaded.config.vocab_size,
            drafted_vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    def path(self, drafted_for: Transformer) -> ComputePath:
        """What drafts, for operators."""
        weights = self.loaded.weights
        name = self.spec.model_dir.resolve().name
        why_worse = (
            "no layer of the model attends to a whole text, so drafts see no more of it than the blocks that the "
            "model's windows or states have not passed"
            if drafted_for.layout.windows[0] is not None
            else ""
        )
        made_of = weights.description or self.loaded.dtype
        return ComputePath("drafts", f"{name}, {made_of}, {weights.num_bytes >> 20} MiB", why_worse)
