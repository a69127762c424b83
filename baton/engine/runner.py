"""The interface between the engine and a model runner, and the layout of a runner's KV memory. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.scheduler_config import LongSequences
from baton.errors import AdapterRefused, BatonError
from baton.messages.node_model import GENERATES, Capability
from baton.messages.node_report import ComputePath, RankReport
from baton.messages.pooling import NO_POOLING_FILES, ModelPooling
from baton.messages.spans import EncoderContent
from baton.model_formats.adapters import AdapterInfo


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a loaded model, as its node publishes them."""

    name: str
    fingerprint: str
    """Hash over configuration, weights' identity and tokenizer: equal fingerprints mean equal models."""
    model_type: str
    """The `model_type` of its config.json."""
    dtype: str
    """float32 or bfloat16."""
    numerics: str
    """Names the kernels that compute the model: nodes with equal numerics and model produce equal bits."""
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    bit_exact: bool
    bit_exact_reason: str = ""
    """Why the model is not bit-exact; empty if it is."""
    is_verified: bool = False
    """Whether its logits were those of transformers in a check at start."""
    why_unverified: str = "models of this kind are not compared with transformers"
    """Empty if it is verified."""
    embedding_size: int = 0
    """Numbers in an embedding; 0: the model gives none."""
    pooling: ModelPooling = NO_POOLING_FILES
    compute_paths: tuple[ComputePath, ...] = ()
    weight_bytes: int = 0
    """Bytes of the weights in memory, quantised ones as they are packed."""
    table_bytes: int = 0
    """How many of `weight_bytes` are of tables of which a step reads a few rows."""
    row_width: int = 0
    """Numbers in a row that may be given in place of a token; 0: none may be."""
    row_numerics: str = ""
    """Names what decides the rows of its encoder, beside its files and the dtype; empty: it has none."""
    most_source_rows: int = 0
    """The most positions that an input of the encoder takes, with which every prompt begins; 0: the model has no
    encoder beside its decoder."""
    long_sequences: LongSequences | None = None
    """Which sequences have the rotary angles of long ones; None: those of all are the same."""
    capabilities: frozenset[Capability] = GENERATES
    """What the model can be asked to do on this node."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """The KV of one token in one layer: for each head a key of `key_dim` and a value of `value_dim` numbers."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    """Whether a value is the first numbers of its key, as of latents; then keys alone are in the cache."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of a head's key and of its value, as far as they are in the cache."""
        return (self.key_dim,) if self.values_in_keys else (self.key_dim, self.value_dim)

    @property
    def token_elements(self) -> int:
        return self.num_kv_heads * sum(self.widths)

    def __str__(self) -> str:
        return f"{self.num_kv_heads}x({self.key_dim}{'>' if self.values_in_keys else '+'}{self.value_dim})"


STATE_BYTES = 4
"""Bytes of a number of a state: float32, whatever the dtype of rows and of keys."""
STATE_WINDOW = 2
"""The window of layers that keep a state: a row needs the state behind the token before it, and leaves that behind its
own. So a state is dropped, found again, swapped and handed over as keys of such a window are."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer without attention keeps of a sequence, in place of keys: a state of fixed size (float32).

    A block has the state behind the last token of its stripe that was computed. First come the rows that a convolution
    looks back at, oldest first [rows, width], then what a recurrence has summed up [heads, key_dim, value_dim]; one of
    the two may be missing.
    """

    rows: int = 0
    width: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def num_row_numbers(self) -> int:
        """Numbers of the rows, behind which the recurrence has its own."""
        return self.rows * self.width

    @property
    def num_bytes(self) -> int:
        """Size of the state, whatever the number of tokens of a block."""
        return STATE_BYTES * (self.num_row_numbers + self.heads * self.key_dim * self.value_dim)

    def __str__(self) -> str:
        parts = [f"{self.rows}x{self.width}"] if self.rows else []
        parts += [f"{self.heads}x{self.key_dim}x{self.value_dim}"] if self.heads else []
        return f"state({'+'.join(parts)})"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same attention window; their KV shares blocks, which are freed when the window has passed.

    Layers that keep a state are in groups of their own.
    """

    layers: tuple[int, ...]
    """The indices of the layers, in order."""
    window: int | None = None
    """The most keys that a query attends to, its own included; None: all of them. STATE_WINDOW for states."""

    def __str__(self) -> str:
        return f"{self.window or 'all'}@{','.join(map(str, self.layers))}"


ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
SCALE_BYTES = 2
"""Bytes of the scale of a key, and of that of a value, in 8 bits."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one block. On both sides of a hand-off all but `block_size` must be equal.

    The cache is one contiguous piece of memory, block-major. A block holds `block_size` tokens of one group of layers.
    The layers follow each other in the block, each with its keys [num_kv_heads, block_size, key_dim] and then its
    values [num_kv_heads, block_size, value_dim], unless these are in the keys. In 8 bits a bfloat16 scale for each key
    and one for each such value follow, both [num_kv_heads, block_size]. A layer that keeps a state has that in their
    place. All blocks have the same size, so any group can use any block.
    """

    block_size: int
    layers: tuple[LayerGeometry | LayerState, ...]
    dtype: str
    """float32 or bfloat16, the model's dtype, or in 8 bits int8 or fp8 (e4m3fn)."""
    groups: tuple[LayerGroup, ...] = ()
    """The groups of layers; every layer is in exactly one. Default: one group without a window."""

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(tuple(range(len(self.layers)))),))
        if sorted(layer for group in self.groups for layer in group.layers) != list(range(len(self.layers))):
            raise ValueError(
                f"groups {[str(group) for group in self.groups]} must have each of the {len(self.layers)} layers once"
            )

    @classmethod
    def uniform(cls, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVLayout:
        """A layout whose layers are all equal, with keys as wide as values."""
        return cls(block_size, (LayerGeometry(num_kv_heads, head_dim, head_dim),) * num_layers, dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def part(self, layers: range) -> KVLayout:
        """The layout of a block in a memory that holds these layers only, which are numbered from 0 on there.

        It has the same groups in the same order; groups with none of these layers are empty.
        """
        groups = tuple(
            LayerGroup(tuple(layer - layers.start for layer in group.layers if layer in layers), group.window)
            for group in self.groups
        )
        return KVLayout(self.block_size, self.layers[layers.start : layers.stop], self.dtype, groups)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group; None for a group without one."""
        return tuple(group.window for group in self.groups)

    @property
    def keeps_states(self) -> bool:
        """Whether any layer keeps a state, so that a sequence can go on only where its states are."""
        return any(isinstance(layer, LayerState) for layer in self.layers)

    @property
    def has_scales(self) -> bool:
        """Whether keys and values are in 8 bits, with scales."""
        return ELEMENT_BYTES[self.dtype] == 1

    def layer_elements(self, layer: int) -> int:
        """How many elements of a block a layer takes."""
        geometry = self.layers[layer]
        if isinstance(geometry, LayerState):
            return geometry.num_bytes // ELEMENT_BYTES[self.dtype]
        scales = geometry.num_kv_heads * len(geometry.widths) * SCALE_BYTES if self.has_scales else 0
        return self.block_size * (geometry.token_elements + scales)

    @property
    def block_elements(self) -> int:
        most = max(sum(self.layer_elements(layer) for layer in group.layers) for group in self.groups)
        # Every block of states begins at a whole number of float32.
        numbers = STATE_BYTES // ELEMENT_BYTES[self.dtype]
        return most + -most % numbers if self.keeps_states else most

    @property
    def block_bytes(self) -> int:
        return self.block_elements * ELEMENT_BYTES[self.dtype]

    @property
    def geometry(self) -> str:
        """The layers in order, equal neighbours counted: `24*2x(64+64)`. Equal texts mean equal blocks
        of a token.

        Groups follow when there are several: `2*2x(64+64) in all@1 512@0`.
        """
        runs = [(geometry, len(list(run))) for geometry, run in groupby(self.layers)]
        layers = ",".join(f"{count}*{geometry}" for geometry, count in runs)
        return layers if len(self.groups) == 1 else f"{layers} in {' '.join(map(str, self.groups))}"

    @property
    def exchange_shape(self) -> str:
        """What must be equal for nodes of other numerics to read each other's blocks: the dtype and the geometry, and
        where states are kept, which are there at the ends of blocks alone, the size of blocks.
        """
        shape = f"{self.dtype} {self.geometry}"
        return f"{shape} by {self.block_size}" if self.keeps_states else shape


PROBE_BLOCKS = 4
"""Number of probe blocks behind a runner's cache: on a reader, so many peers can be probed at once."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The memory of a runner's KV cache. `owner` keeps the memory alive as long as this value is referenced.

    Behind the blocks of the cache lie probe blocks, in the same piece of memory. No pool hands them out and no step
    touches them: two nodes move known bytes between them before they exchange the KV of requests.
    """

    base_address: int
    num_blocks: int
    """Number of blocks of the cache."""
    block_bytes: int
    kind: str
    """DRAM or VRAM."""
    device_id: int
    owner: Any
    num_probe_blocks: int = 0
    """Number of probe blocks; their ids follow those of the cache."""
    layout: KVLayout | None = None
    """The shape of a block of all layers. None: unknown, so blocks can only be moved whole."""
    layers: range | None = None
    """The layers that this memory holds of each block; None: all of them. The memory of a node whose stages have
    memories of their own is in several parts, each with the same number of blocks."""

    @property
    def num_all_blocks(self) -> int:
        """Number of blocks, those of the cache and probe blocks."""
        return self.num_blocks + self.num_probe_blocks

    @property
    def num_bytes(self) -> int:
        """Size of the whole memory, probe blocks included."""
        return self.num_all_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class RemotePart:
    """A part of a runner's KV cache in another process, which holds some layers of each block."""

    layers: range
    socket: Any
    """The connected stream socket over which its blocks are moved."""


class RunnerLost(BatonError):
    """The runner can't compute this step nor any later one: the engine ends, and its requests go on at other nodes."""


class AdapterHost(Protocol):
    """The adapters of a runner's model."""

    def check(self, directory: Path) -> AdapterInfo:
        """Read the adapter in a directory and check whether it fits the model; nothing is loaded.

        Called from any thread, also while a step is executed. Raises AdapterRefused.
        """
        ...

    def load(self, directory: Path, digest: str) -> None:
        """Read the adapter in a directory, so that later steps may name it; no effect if it is loaded.

        Called from any thread, also while a step is executed. Each process of a model checks everything before it takes
        memory. Raises AdapterRefused if the files are unsound, are not those of this digest, or don't fit the model;
        then no process has the adapter.
        """
        ...

    def unload(self, digest: str) -> None:
        """Free an adapter's memory; no effect if it is not loaded.

        Called from the thread that executes steps, between two of them. No later step may name the adapter.
        """
        ...


class RefusedAdapters:
    """The `AdapterHost` of a model that takes none."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def check(self, directory: Path) -> AdapterInfo:
        """Raises AdapterRefused."""
        raise AdapterRefused(f"{directory}: {self._reason}")

    def load(self, directory: Path, digest: str) -> None:
        """Raises AdapterRefused."""
        self.check(directory)

    def unload(self, digest: str) -> None:
        """No adapter is ever loaded."""


class RowEncoder(Protocol):
    """Makes rows of the inputs of a runner's encoder (images, speech, texts), and keeps them for steps."""

    def encode(self, content: EncoderContent, num_rows: int) -> None:
        """Make the rows of an input, of which a prompt has so many, and keep them until `release`.

        Called beside steps, from one thread at a time. Raises InvalidRequest for one that can't be used.
        """
        ...

    def bytes_of(self, digest: str) -> memoryview | None:
        """The bytes of the rows of an input, float32 [rows, width], little-endian; None if it has none.

        Called from any thread.
        """
        ...

    def keep(self, digest: str, num_rows: int, rows: bytes) -> None:
        """Keep the rows of an input that another node's runner of this model made, as `encode` does.

        Called beside steps. Raises ValueError if these bytes are not so many rows.
        """
        ...

    def release(self, digests: Sequence[str] | None) -> None:
        """Give back the memory of the rows of inputs, of which no step names any more. Unknown ones are skipped.

        None: of all, also of one that is being encoded. Rows that are kept or encoded from then on stay.
        Called from any thread.
        """
        ...


class ModelRunner(Protocol):
    """Computes the steps of one model with its KV cache. Called from one thread at a time.

    The runner remembers the tokens that it sampled: a later step that names a request does not repeat its last token.
    A request that the runner has failed fails again in each later step that names it. Steps may name only adapters that
    are loaded.

    With drafts (`scheduled_spec_decode_tokens`) the runner samples at a request's last token and at each draft, as it
    would without drafts, up to the first token that differs from the draft there. The KV of the other drafts is void:
    later steps compute their positions again.
    """

    @property
    def model(self) -> ModelInfo: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def memory(self) -> KVMemory: ...

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        """The other parts of the KV cache, in the order of their layers; empty where `memory` is all of it."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Number of host tier blocks, to which a step's swaps refer, the null block included; 0: no host tier."""
        ...

    @property
    def adapters(self) -> AdapterHost: ...

    @property
    def encoder(self) -> RowEncoder: ...

    def expect(self, scheduler_output: SchedulerOutput) -> None:
        """Take note of a step that was decided, and will be executed behind those that were expected before it.

        Called from any thread. A runner may begin the step while the one before it is executed.
        """
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A failure of one request is reported in `failed`, never raised. Raises RunnerLost."""
        ...

    def rank_reports(self) -> Sequence[RankReport]:
        """Reports on the processes that compute the model, this one first; empty where it computes alone."""
        ...

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason, from any thread, once something that computes beside this process is lost.

        No step can be computed then. It replaces the callback that was given before.
        """
        ...

    def close(self) -> None:
        """End whatever computes beside this process; idempotent. No step may be computed afterwards."""
        ...


class OneProcessRunner:
    """The part of a ModelRunner that is the same for all that compute in their own process alone, a step at a time."""

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        return ()

    def rank_reports(self) -> Sequence[RankReport]:
        return ()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Nothing computes beside this process."""

    def close(self) -> None:
        """Nothing computes beside this process."""

    def expect(self, scheduler_output: SchedulerOutput) -> None:
        """Steps are begun when they are executed."""


class StepExecutor(Protocol):
    """Executes steps in the background. Called from one thread."""

    def submit(self, execute: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        """Queue a step behind all that were submitted before it; returns a function that waits for its result.

        That function raises the exception that the step raised.
        """
        ...

    def close(self) -> None:
        """Wait for all submitted steps; idempotent. `submit` must not be called afterwards."""
        ...


class LazyExecutor:
    """A `StepExecutor` without a thread: a step is executed when its result is asked for."""

    def submit(self, execute: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        return execute

    def close(self) -> None:
        return
