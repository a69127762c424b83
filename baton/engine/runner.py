"""What the engine asks of a runner, and how a runner's KV memory looks from outside. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.messages.node_report import ComputePath


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
    embedding_size: int = 0
    """Numbers in an embedding."""
    compute_paths: tuple[ComputePath, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer keeps of a token: a key of `key_dim` and a value of `value_dim` numbers for each head."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def token_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def __str__(self) -> str:
        return f"{self.num_kv_heads}x({self.key_dim}+{self.value_dim})"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV is kept together, for as long as one of their queries may look at it."""

    layers: tuple[int, ...]
    """Their indices, in order."""
    window: int | None = None
    """Keys that a query sees at most, itself included; None: all of them."""

    def __str__(self) -> str:
        return f"{self.window or 'all'}@{','.join(map(str, self.layers))}"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block: what both sides of a hand-off must agree on.

    The cache is one piece of memory, block-major. A block holds `block_size` tokens of one group of layers. These
    follow each other in it, each with its keys [num_kv_heads, block_size, key_dim] and then its values [num_kv_heads,
    block_size, value_dim]. All blocks have one size, so any group can have any of them.
    """

    block_size: int
    layers: tuple[LayerGeometry, ...]
    dtype: str
    groups: tuple[LayerGroup, ...] = ()
    """Every layer is in one of them. Left out: one group, all layers of which see everything."""

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(tuple(range(len(self.layers)))),))
        if sorted(layer for group in self.groups for layer in group.layers) != list(range(len(self.layers))):
            raise ValueError(f"groups {[str(group) for group in self.groups]} don't have each layer once")

    @classmethod
    def uniform(cls, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVLayout:
        """All layers alike, keys as wide as values."""
        return cls(block_size, (LayerGeometry(num_kv_heads, head_dim, head_dim),) * num_layers, dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the groups."""
        return tuple(group.window for group in self.groups)

    @property
    def block_elements(self) -> int:
        return self.block_size * max(
            sum(self.layers[layer].token_elements for layer in group.layers) for group in self.groups
        )

    @property
    def block_bytes(self) -> int:
        return self.block_elements * {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def geometry(self) -> str:
        """The layers in order, equal neighbours counted: `24*2x(64+64)`. Equal texts mean equal blocks.

        Groups follow when there are several: `2*2x(64+64) in all@1 512@0`.
        """
        runs = [(geometry, len(list(run))) for geometry, run in groupby(self.layers)]
        layers = ",".join(f"{count}*{geometry}" for geometry, count in runs)
        return layers if len(self.groups) == 1 else f"{layers} in {' '.join(map(str, self.groups))}"


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
    """One model with its KV cache. Called from one thread at a time.

    A step may name requests whose last token it has drawn itself: nobody tells it. One that it failed is failed again.
    """

    @property
    def model(self) -> ModelInfo: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def memory(self) -> KVMemory: ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier, which a step's swaps name, the null block included; 0: there is none."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A failure of one request is reported in `failed`, never raised."""
        ...


class StepExecutor(Protocol):
    """Lets steps run while their owner does something else. Called from one thread."""

    def submit(self, execute: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        """Have a step executed after all that were submitted before it; returns what waits for its result.

        That raises what the step raised.
        """
        ...

    def close(self) -> None:
        """Wait for what was submitted; idempotent. Nothing may be submitted any more."""
        ...


class LazyExecutor:
    """A `StepExecutor` without a thread: a step runs when its result is asked for, as late as it may."""

    def submit(self, execute: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        return execute

    def close(self) -> None:
        return
