"""What the engine asks of a runner, and how a runner's KV memory looks from outside. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from baton.engine.outputs import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is, as its node publishes it."""

    name: str
    fingerprint: str
    """Hash over configuration, weights' identity and tokenizer: equal fingerprints mean equal models."""
    architecture: str
    dtype: str
    """float32 or bfloat16."""
    numerics: str
    """Names the kernels that compute it: nodes with equal numerics and model produce equal bits."""
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    bit_exact: bool
    bit_exact_reason: str = ""
    """Why not, when it is not."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block: what both sides of a hand-off must agree on.

    The cache is one tensor, block-major: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        width = {"float32": 4, "bfloat16": 2}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * width


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Where a runner's cache lies. `owner` keeps the memory alive while somebody holds this value."""

    base_address: int
    num_blocks: int
    block_bytes: int
    kind: str
    """DRAM or VRAM."""
    device_id: int
    owner: Any

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class ModelRunner(Protocol):
    """One model with its KV cache. Called from one thread."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def memory(self) -> KVMemory: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A failure of one request is reported in `failed`, never raised."""
        ...
