"""Derives from a node's configuration which runner it loads, what drafts beside it, and the limits of its scheduler."""

from __future__ import annotations

import time
from pathlib import Path

from baton.config import NodeConfig
from baton.config.setting import settings_for
from baton.engine.runner import ModelRunner
from baton.engine.scheduler_config import SchedulerConfig
from baton.errors import ConfigError
from baton.messages.node_model import Capability
from baton.messages.speculation import SpeculationConfig
from baton.runner import DraftSpec, RunnerSpec, SimulatedSpec, StepTime, TorchSpec
from baton.runner.blocks.host_blocks import host_blocks_in
from baton.runner.spec import LEAST_BLOCKS
from baton.text.tokenizer import Tokenizer


def config_of_encoder(config: NodeConfig) -> NodeConfig:
    """The configuration of an encode node, without what it says of the decoder. Raises ConfigError.

    The settings of a cluster are for all its nodes, so these are no mistakes.
    """
    if config.runner != "torch":
        raise ConfigError("the simulated runner has no encoder: leave --role encode out")
    if not config.num_encoder_rows:
        raise ConfigError("an encode node keeps rows: give --num-encoder-rows at least those of one input")
    if config.hosts > 1:
        raise ConfigError("an encode node is one process: leave --hosts out")
    of_decoder = {"tp": 1, "pp": 1, "host_cache_memory": 0, "preemption_mode": "recompute", "speculative_config": ""}
    return config.model_copy(update=of_decoder)


def with_defaults_of_device(config: NodeConfig) -> NodeConfig:
    """The configuration with the device that computes in place of `auto`, and with the defaults of a GPU if it is one.

    Raises ConfigError for a device that is unknown or can't be used.
    """
    if config.runner != "torch":
        return config
    # torch takes seconds to import.
    from baton.runner.backends.device import resolve_device

    device = resolve_device(config.device)
    config = config.model_copy(update={"device": str(device)})
    return config.on_gpu() if device.type == "cuda" else config


def encoder_spec(config: NodeConfig) -> TorchSpec:
    """The encoder that this configuration asks for."""
    spec = runner_spec(config)
    assert isinstance(spec, TorchSpec)
    return spec


def runner_spec(config: NodeConfig) -> RunnerSpec:
    """The runner that this configuration asks for. Raises ConfigError for a draft model with other tokens."""
    if config.runner == "torch":
        return TorchSpec(
            model_dir=config.model,
            dtype=config.dtype,
            block_size=config.block_size,
            cache_bytes=int(config.kv_cache_memory) or None,
            step_rows=0 if config.kv_cache_memory else max(config.max_num_batched_tokens, config.max_num_seqs),
            gpu_sharers=config.gpu_sharers,
            cache_dtype=config.kv_cache_dtype,
            host_cache_bytes=int(config.host_cache_memory),
            num_threads=config.num_threads,
            name=config.served_model_name,
            device=config.device,
            quantization=None if config.quantization == "off" else config.quantization,
            dequantize=config.dequantize,
            tensor_parallel=config.tp,
            pipeline_parallel=config.num_stages,
            max_lora_rank=config.max_lora_rank,
            allow_unverified=config.allow_unverified,
            draft=draft_spec(_speculation(config), config.model),
        )
    if config.tp > 1 or config.num_stages > 1:
        raise ConfigError("the simulated runner computes in one process: leave --tp, --pp and --hosts out")
    shape = SimulatedSpec()
    step_time = StepTime(
        per_step=config.simulated_step_ms / 1e3,
        per_prefill_token=config.simulated_prefill_token_ms / 1e3,
        per_decode_seq=config.simulated_decode_seq_ms / 1e3,
    )
    block_bytes = shape.num_layers * 2 * shape.num_kv_heads * config.block_size * shape.head_dim * 4
    return SimulatedSpec(
        name=config.model_name or shape.name,
        block_size=config.block_size,
        num_blocks=max(LEAST_BLOCKS, int(config.kv_cache_memory) // block_bytes),
        num_host_blocks=host_blocks_in(int(config.host_cache_memory), block_bytes),
        step_time=step_time,
        max_lora_rank=config.max_lora_rank,
        sleep=time.sleep,
    )


def scheduler_config(config: NodeConfig, runner: ModelRunner) -> SchedulerConfig:
    """The limits of a scheduler over this runner; raises ConfigError for limits that model or memory can't keep."""
    longest = runner.model.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model can have at most {longest} tokens")
    block_bytes = runner.layout.block_bytes
    if runner.remote_parts and (config.hosts > 1 or runner.memory.kind != "DRAM"):
        # Each part of the cache has a memory of that size, and as many blocks as the one with the largest.
        others = (runner.layout.part(part.layers).block_bytes for part in runner.remote_parts)
        block_bytes = max(runner.memory.block_bytes, *others)
    if runner.memory.num_blocks < LEAST_BLOCKS:
        raise ConfigError(
            f"kv_cache_memory {int(config.kv_cache_memory)} bytes holds {runner.memory.num_blocks} blocks of "
            f"{block_bytes} bytes; give it at least {LEAST_BLOCKS * block_bytes}"
        )
    if config.host_cache_memory and not runner.num_host_blocks:
        raise ConfigError(
            f"host_cache_memory {int(config.host_cache_memory)} bytes holds less than 2 blocks of "
            f"{block_bytes} bytes; give it more, or 0 for no host tier"
        )
    own = settings_for(SchedulerConfig, config) | {
        "max_model_len": config.max_model_len or longest,
        # More than the configuration says where the model keeps large states.
        "block_size": runner.layout.block_size,
    }
    if runner.model.most_source_rows:
        if Capability.TRANSCRIBE in runner.model.capabilities and own["max_model_len"] <= runner.model.most_source_rows:
            raise ConfigError(
                f"max_model_len is {own['max_model_len']}, but speech alone takes {runner.model.most_source_rows} "
                f"positions: give it up to {longest}"
            )
        # Nothing can be computed without room for one input.
        own["num_encoder_rows"] = max(own["num_encoder_rows"], runner.model.most_source_rows)
    elif Capability.IMAGE not in runner.model.capabilities:
        own["num_encoder_rows"] = 0
    if runner.model.pooling.is_encoder:
        # A text is computed by one step, and its blocks hold nothing that a later one could use.
        own |= {
            "enable_chunked_prefill": False,
            "enable_prefix_caching": False,
            "long_prefill_token_threshold": 0,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, own["max_model_len"]),
        }
    return SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        windows=runner.layout.windows,
        keeps_states=runner.layout.keeps_states,
        policy=config.scheduling_policy,
        num_host_blocks=runner.num_host_blocks,
        speculation=_speculation(config),
        long_sequences=runner.model.long_sequences,
        **own,
    )


def _speculation(config: NodeConfig) -> SpeculationConfig | None:
    return SpeculationConfig.from_json(config.speculative_config) if config.speculative_config else None


def draft_spec(speculation: SpeculationConfig | None, model: Path) -> DraftSpec | None:
    """What to load for drafts beside the model in a directory; None: no model drafts.

    Raises ConfigError if the two models don't have the same tokens.
    """
    if speculation is None or speculation.method != "draft_model":
        return None
    directory = Path(speculation.model)
    if (difference := _difference(Tokenizer.load(directory), Tokenizer.load(model))) is not None:
        raise ConfigError(
            f"the draft model in {directory} has other tokens than the model in {model} ({difference}); choose a draft "
            "model with the same tokenizer"
        )
    quantization = None if speculation.quantization == "off" else speculation.quantization
    return DraftSpec(directory, speculation.num_speculative_tokens, quantization)


def _difference(drafting: Tokenizer, own: Tokenizer) -> str | None:
    """The first token id that two tokenizers have different texts for; None: they have the same tokens."""
    theirs, ours = drafting.tokens(), own.tokens()
    if theirs == ours:
        return None
    first = min(id for id in theirs.keys() | ours.keys() if theirs.get(id) != ours.get(id))
    return f"token {first} is {theirs.get(first)!r:.40} there and {ours.get(first)!r:.40} here"
