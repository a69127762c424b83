"""Specifications of what to load, as frozen values. Importing this module is cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from baton.errors import ConfigError
from baton.model_formats.adapters import DEFAULT_MAX_RANK


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A model directory with the same tokens as another model, which drafts for it."""

    model_dir: Path
    num_tokens: int
    """The most tokens that it drafts for one request in one step."""
    quantization: Literal["int8", "int4"] | None = None


LEAST_BLOCKS = 8
"""A node with fewer KV blocks is refused."""
_LEAST_BLOCKS_BESIDE = 4
"""So many scratch blocks a draft model keeps, however large they are."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The size of a KV cache, in blocks, in bytes or as what a GPU has left (one of them is set), and what it holds."""

    num_blocks: int | None = None
    cache_bytes: int | None = None
    dtype: str = "auto"
    """auto: the model's dtype; int8 or fp8: 8 bits for each number."""
    block_bytes_beside: int = 0
    """Bytes of a block in the cache of a draft model, which are part of `cache_bytes`."""
    num_blocks_beside: int = 0
    """How many such blocks more the draft model has."""
    is_of_all_stages: bool = False
    """Whether all stages together have `cache_bytes`, since they share a host's memory; otherwise each has as many."""
    step_rows: int = 0
    """Rows of the largest step, where the cache has what a GPU has left beside it and the weights; 0: it has another
    size."""
    gpu_sharers: int = 1
    """How many nodes have the GPU in common, each an equal part of it."""

    def of_larger_blocks(self, factor: int) -> CacheSpec:
        """The same size for blocks of so many times as many tokens, those of the draft model among them.

        The larger blocks are, the fewer requests are so close to the end of theirs that drafts reach beyond it: so
        the draft model needs fewer blocks for them.
        """
        count = self.num_blocks_beside
        num_blocks_beside = max(min(count, _LEAST_BLOCKS_BESIDE), -(-count // factor))
        return replace(self, block_bytes_beside=factor * self.block_bytes_beside, num_blocks_beside=num_blocks_beside)

    def with_room(self, rooms: Sequence[int], block_bytes: Sequence[int], probe_blocks: int) -> CacheSpec:
        """The size in bytes of a cache that has what GPUs have left; any other stays as it is.

        `rooms`, `block_bytes`: the bytes that each stage has for it, and those of its part of a block. There are
        `probe_blocks` blocks more. Raises ConfigError for too little.
        """
        if not self.step_rows:
            return self
        # All stages have equally many blocks, and count those of the stage with the largest.
        blocks = min(room // size for room, size in zip(rooms, block_bytes, strict=True)) - probe_blocks
        if blocks < LEAST_BLOCKS:
            least = LEAST_BLOCKS + probe_blocks
            missing = max(least * size - room for room, size in zip(rooms, block_bytes, strict=True))
            raise ConfigError(
                f"beside the weights and a step of {self.step_rows} tokens a GPU has {min(rooms)} bytes left for the "
                f"KV cache, which needs {missing} more: give the node a GPU with more free memory (--device), end what "
                "uses this one, or lower --max-num-batched-tokens"
            )
        return replace(self, cache_bytes=blocks * max(block_bytes), step_rows=0)

    def blocks(self, block_bytes: int) -> int:
        """The number of blocks; raises ConfigError for fewer than two (the first one is the null block)."""
        if sum((self.num_blocks is not None, self.cache_bytes is not None, self.step_rows > 0)) != 1:
            raise ConfigError("set exactly one of the number of KV blocks, the bytes for them, and the rows of a step")
        if self.step_rows:
            raise ConfigError("only on a GPU a KV cache has what is left of its memory: give its size")
        block_bytes += self.block_bytes_beside
        cache_bytes = max(0, (self.cache_bytes or 0) - self.num_blocks_beside * self.block_bytes_beside)
        blocks = self.num_blocks if self.num_blocks is not None else cache_bytes // block_bytes
        if blocks < 2:
            raise ConfigError(f"{blocks} KV blocks of {block_bytes} bytes are too few; make room for at least 2")
        return blocks


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """What is made of the weights of a checkpoint while they are loaded."""

    dtype: str = "auto"
    """auto, float32 or bfloat16; auto takes bfloat16 where the device computes it natively."""
    quantization: Literal["int8", "int4"] | None = None
    """Quantise plain weights; None: they stay plain."""
    dequantize: bool = False
    """Make quantised weights plain. Otherwise they are for operations that pack them as they are."""
    in_parts: bool = False
    """Leave all weights in their files until they are packed: for a rank, which packs some of each."""
    image_part_alone: bool = False
    """Load what encodes images alone, of a model that takes them."""


@dataclass(frozen=True, slots=True)
class TorchSpec:
    """A transformers model directory on this machine."""

    model_dir: Path
    dtype: str = "auto"
    """auto, float32 or bfloat16; auto takes bfloat16 where the CPU computes it natively."""
    block_size: int = 16
    """Tokens in a block; a model that keeps large states gets more (`larger_for_states`)."""
    num_blocks: int | None = None
    """Size of the KV cache in blocks. Exactly one of `num_blocks`, `cache_bytes` and `step_rows` must be set."""
    cache_bytes: int | None = None
    """Size of the KV cache in bytes."""
    step_rows: int = 0
    """Rows of the largest step, for a KV cache that has what a GPU has left beside it; instead of its size."""
    gpu_sharers: int = 1
    """How many nodes have the GPU in common, each an equal part of it."""
    cache_dtype: str = "auto"
    """auto, the dtype of the model; or int8 or fp8, 8 bits for each number."""
    host_cache_bytes: int = 0
    """Size of the host tier in bytes."""
    num_threads: int = 1
    name: str = ""
    """The model's name for clients; the directory's name when empty."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:N; auto takes the first GPU where there is one."""
    quantization: Literal["int8", "int4"] | None = None
    """Quantise plain weights while they are loaded; None: they stay plain."""
    dequantize: bool = False
    """Make quantised weights plain while they are loaded."""
    tensor_parallel: int = 1
    """How many ranks compute the model together, each its own columns and heads; they share `num_threads`."""
    pipeline_parallel: int = 1
    """How many stages compute the model one behind the other, each its own layers on as many ranks as
    `tensor_parallel` says."""
    max_lora_rank: int = DEFAULT_MAX_RANK
    """The highest rank of an adapter that may be loaded."""
    allow_unverified: bool = False
    """Load a model although its logits differ from those of transformers in the check at start."""
    draft: DraftSpec | None = None
    """The model that drafts; its cache is part of `cache_bytes`, or comes beside `num_blocks` blocks."""

    @property
    def is_divided(self) -> bool:
        """Whether several processes compute the model."""
        return self.tensor_parallel * self.pipeline_parallel > 1

    @property
    def weights(self) -> WeightSpec:
        """What is made of the weights."""
        return WeightSpec(self.dtype, self.quantization, self.dequantize, self.is_divided)

    @property
    def cache(self) -> CacheSpec:
        """The size of the KV cache."""
        return CacheSpec(
            self.num_blocks,
            self.cache_bytes,
            self.cache_dtype,
            step_rows=self.step_rows,
            gpu_sharers=self.gpu_sharers,
        )


def check_hosts(hosts: int, pipeline_parallel: int) -> None:
    """Raise ConfigError for stages in which several hosts can't compute a model. One stage stands for as many as there
    are hosts. The ranks of a stage are on one host, whose memory they share."""
    if pipeline_parallel not in (1, hosts):
        raise ConfigError(
            f"{hosts} hosts compute a model in as many stages, one each, and not in {pipeline_parallel}: leave --pp out"
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a simulated step takes, in seconds."""

    per_step: float = 0.0
    per_prefill_token: float = 0.0
    per_decode_seq: float = 0.0
    per_copied_block: float = 0.0
    """For each block that is copied from or to the host tier."""


@dataclass(frozen=True, slots=True)
class SimulatedSpec:
    """A model without weights: tokens and KV bytes are hashes of the history."""

    name: str = "simulated"
    block_size: int = 16
    num_blocks: int = 1024
    num_host_blocks: int = 0
    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 8
    dtype: str = "float32"
    vocab_size: int = 32000
    max_model_len: int = 32768
    eos_token_ids: frozenset[int] = frozenset()
    step_time: StepTime = StepTime()
    max_lora_rank: int = DEFAULT_MAX_RANK
    """The highest rank of an adapter that may be loaded."""
    sleep: Callable[[float], None] | None = None
    """Called with each step's simulated seconds; None: steps take no time."""


RunnerSpec = TorchSpec | SimulatedSpec
