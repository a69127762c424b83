"""What all models with a KV cache have in common: the cache's layout and memory, and the widths of rows in steps.

Layers are divided into groups that share KV blocks: layers with equal windows, in groups of about one size, and layers
that keep states in groups of their own. A layer of the model with keys and a state is two layers of the cache's layout,
and one with neither is none. Blocks of all groups have the same size, so that one pool serves all groups (as
in vLLM's hybrid KV cache manager). A group with fewer bytes than the largest one wastes a part of its blocks, and more
groups mean more blocks to manage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.runner import (
    ELEMENT_BYTES,
    PROBE_BLOCKS,
    STATE_WINDOW,
    KVLayout,
    KVMemory,
    LayerGeometry,
    LayerGroup,
    LayerState,
)
from baton.errors import ConfigError
from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.attention_work.dealing import Int32Array
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.shared_splits import find_in_groups
from baton.runner.backends.operations import Operations
from baton.runner.backends.ranks.ranks import Ranks
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.blocks.gathered_host_blocks import GatheredHostBlocks
from baton.runner.blocks.host_blocks import HostBlocks
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.gpu_limits import gib, room_for_cache
from baton.runner.gpu_memory import gpu_memory
from baton.runner.model.checkpoint import configs_of_layers
from baton.runner.model.stage import StageReport, entries_of_stages
from baton.runner.model.stored.layers import widths_of
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.weights import DTYPES, LoadedModel
from baton.runner.spec import CacheSpec
from baton.runner.torch_threads import elementwise_threads

_STATES_TO_KEYS = 4
"""How many times the memory of a block's keys its states may take before blocks get more tokens."""
_MOST_TOKENS_FOR_STATES = 512
"""A block gets no more tokens for the sake of its states."""
_VECTOR = 64
"""The most elements that one iteration of a torch elementwise kernel processes (AVX-512: two registers of bfloat16)."""


class CachedModel:
    """A model on one device, whose products are Baton's operations, and its KV cache. Called from one thread."""

    layout: KVLayout
    """The layout of a block of the whole model."""
    cache_layout: KVLayout
    """The layout of a block in this cache."""
    cached_layers: range | None = None
    """The layers that this cache holds; None: all of them."""
    num_blocks: int
    kv_cache: torch.Tensor
    """Flat: [num_blocks * block_elements]."""
    kv_memory: torch.Tensor
    """The cache and the probe blocks behind it, flat."""

    def __init__(self, model: LoadedModel, operations: Operations, num_threads: int) -> None:
        self._operations = operations
        self.device = model.device
        self.dtype = DTYPES[model.dtype]
        """The dtype of the rows between layers."""
        # The widths are those of the whole model, since all stages compute the same rows.
        self.row_quantum = row_quantum(row_widths(model), num_threads)

    def _hold(self, memory: torch.Tensor) -> None:
        """Take memory for the cache, probe blocks included."""
        block_elements = self.cache_layout.block_elements
        self.num_blocks = memory.numel() // block_elements - PROBE_BLOCKS
        self.kv_memory, self.kv_cache = memory, memory[: self.num_blocks * block_elements]

    @property
    def memory(self) -> KVMemory:
        """The memory of the cache."""
        cache = self.kv_cache
        return KVMemory(
            base_address=cache.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.cache_layout.block_bytes,
            kind="DRAM" if cache.device.type == "cpu" else "VRAM",
            device_id=cache.device.index or 0,
            owner=self.kv_memory,
            num_probe_blocks=PROBE_BLOCKS,
            layout=self.layout,
            layers=self.cached_layers,
        )

    def _room_for_cache(self, cache: CacheSpec | None, try_step: Callable[[int], object] = lambda _rows: None) -> int:
        """The bytes for a cache that gets what is left of the GPU, behind the weights and a step; 0 for any other.

        `try_step`: computes a step of so many rows. Raises ConfigError if there is no memory for it.
        """
        memory = gpu_memory(self.device)
        if cache is None or not cache.step_rows or memory is None:
            return 0
        try:
            step = memory.peak_of(lambda: try_step(cache.step_rows))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.device} has {gib(memory.free)} free of {gib(memory.total)} beside the weights, which is too "
                f"little for a step of {cache.step_rows} tokens: lower --max-num-batched-tokens, or give the node a "
                "GPU with more free memory"
            ) from error
        return room_for_cache(memory.free, memory.total, memory.held, step, cache.gpu_sharers)

    def set_rows_per_call(self, rows: int) -> None:
        """Make torch's products take so many rows in one call, before anything is computed that counts."""
        assert isinstance(self._operations, TorchOperations)
        self._operations.rows_per_call = rows

    def clear_blocks(self, count: int) -> None:
        """Fill the first blocks of the cache with zeros, as they were at first."""
        self.kv_cache.view(self.num_blocks, -1)[:count].zero_()

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks within the cache."""
        with on_device(self.device), torch.inference_mode():
            blocks = self.kv_cache.view(self.num_blocks, -1)
            blocks[destinations] = blocks[sources]

    def host_blocks(self, num_blocks: int) -> HostBlocks:
        """A host tier of `num_blocks` blocks; raises ConfigError when there is no memory for it."""
        shape, on_gpu = (num_blocks, self.cache_layout.block_elements), self.device.type == "cuda"
        try:
            blocks = torch.empty(shape, dtype=self.kv_cache.dtype, pin_memory=on_gpu)
        except RuntimeError as error:
            size = num_blocks * self.cache_layout.block_bytes
            raise ConfigError(
                f"this machine has no memory for a host tier of {size} bytes; make the host tier smaller"
            ) from error
        make = GatheredHostBlocks if on_gpu else HostBlocks
        return make(self.kv_cache.view(self.num_blocks, -1), blocks)

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _sharing(self, batch: FlatBatch) -> list[Int32Array | None]:
        """Which sequences share leading blocks, for each group of layers; empty for operations that need not know."""
        if not isinstance(self._operations, CudaOperations):
            return []
        if not self._operations.attends_together:
            return [None] * len(self.layout.windows)
        return find_in_groups(
            batch.block_tables, batch.seq_lens, batch.query_start, self.layout.block_size, self.layout.windows
        )

    def _step_layout(self, batch: FlatBatch, sharing: Sequence[Int32Array | None] = ()) -> StepLayout:
        """What attention must know of a step, on the device. `sharing`: for each group of layers, for GPUs."""
        return StepLayout(
            query_start=self._tensor(batch.query_start),
            seq_lens=self._tensor(batch.seq_lens),
            block_tables=[self._tensor(tables) for tables in batch.block_tables],
            slots=[self._tensor(slots) for slots in batch.slots],
            sample_start=self._tensor(batch.sample_start),
            kept_lens=None if batch.kept_lens is None else self._tensor(batch.kept_lens),
            work=[StepWork(batch.query_start, batch.seq_lens, self.device, places) for places in sharing],
            sample_work=[StepWork(batch.sample_start, batch.seq_lens, self.device, places) for places in sharing],
        )


@contextmanager
def failing_as_unusable(*kinds: type[Exception]) -> Iterator[None]:
    """Raise what the first step of a model raises as UnusableWeight; `kinds`: what else than wrong numbers may be."""
    caught: tuple[type[Exception], ...] = (RuntimeError, ValueError, IndexError, ArithmeticError, *kinds)
    try:
        yield
    except caught as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UnusableWeight(f"a step with them fails with {type(error).__name__} ({reason:.200})") from error


_Model = TypeVar("_Model")
_Rest = ParamSpec("_Rest")
_Build: TypeAlias = Callable[Concatenate[_Model, LoadedModel, _Rest], None]


def on_device_of_model(build: _Build[_Model, _Rest]) -> _Build[_Model, _Rest]:
    """Let the constructor of a model run with the model's GPU as the thread's current one."""

    @wraps(build)
    def on_its_device(self: _Model, model: LoadedModel, /, *arguments: _Rest.args, **named: _Rest.kwargs) -> None:
        with on_device(model.device):
            build(self, model, *arguments, **named)

    return on_its_device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU this thread's current one: Triton's kernels and recorded graphs are started on that, whatever their
    tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_host(rows: torch.Tensor, copy: bool = False) -> npt.NDArray[np.float32]:
    """Rows in float32 in the host's memory; with `copy` not in that of the rows, wherever they are.

    On return a GPU has computed all that was started before, also where there are no rows: what a step wrote to the
    cache is then read on other streams, and by other processes.
    """
    if rows.device.type == "cuda" and rows.numel() == 0:
        torch.cuda.current_stream(rows.device).synchronize()  # a copy of nothing waits for nothing
    # A GPU copies into pinned memory without a detour; torch keeps such memory for later steps.
    host = torch.empty(rows.shape, pin_memory=True).copy_(rows) if rows.device.type == "cuda" else rows
    wide: npt.NDArray[np.float32] = host.to(torch.float32, copy=copy and host is rows).numpy()
    return wide


def row_quantum(widths: list[int], num_threads: int) -> int:
    """A step is padded to a multiple of this many rows, so that no real row is in the tail of an elementwise kernel.

    torch's vectorised functions (silu, gelu, tanh, cos) round differently in the scalar tail that follows the last full
    vector of a tensor, or of a thread's share of it. If rows x width is a multiple of the vector for every width, and
    splits evenly over the threads, there is no tail.
    """
    common = math.gcd(*widths)
    return _VECTOR // math.gcd(common, _VECTOR) * elementwise_threads(num_threads)


def row_widths(model: LoadedModel) -> list[int]:
    """Every row width that an elementwise function may be called with."""
    widths = {parameter.shape[-2] for parameter in model.module.parameters() if parameter.dim() >= 2}
    widths |= {parameter.shape[-1] for parameter in model.module.parameters()}
    widths |= widths_of(model.module)
    for layer in configs_of_layers(model.config):
        # A model without attention has no heads.
        num_heads = getattr(layer, "num_attention_heads", 1)
        widths.add(getattr(layer, "head_dim", None) or layer.hidden_size // num_heads)
    return list(widths)


def cache_memory(elements: int, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> torch.Tensor:
    """Zeros for a cache. Raises ConfigError when there is no memory for it."""
    size = elements * dtype.itemsize
    if device.type == "cpu":
        return ranks.cache_memory(size).view(dtype)
    try:
        return torch.zeros(elements, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has no memory for a KV cache of {size} bytes beside the weights; make the cache smaller"
        ) from error


def sized(cache: CacheSpec, reports: Sequence[StageReport], layout: KVLayout, block_size: int) -> CacheSpec:
    """The size of a cache with blocks of this layout, of `block_size` tokens in the settings: of one that has what the
    stages' GPUs have left in bytes. Raises ConfigError if they have too little.
    """
    cache = cache.of_larger_blocks(layout.block_size // block_size)
    stages = entries_of_stages(reports)
    parts = [layout.part(entries) for entries in stages] if len(stages) > 1 else [layout]
    return cache.with_room([each.cache_room for each in reports], [part.block_bytes for part in parts], PROBE_BLOCKS)


def layout_of(reports: Sequence[StageReport], block_size: int, dtype: str, cache: CacheSpec | None) -> KVLayout:
    """The layout of a block of the whole model; that of a model that drafts has one group of layers.

    `block_size`: tokens in a block, or twice as many several times where large states are kept.
    """
    found = [
        (entry, STATE_WINDOW if isinstance(entry, LayerState) else layer.window)
        for report in reports
        for _, layer in sorted(report.layers.items())
        for entry in layer.entries
    ]
    entries = tuple(entry for entry, _ in found)
    if cache is None:
        return KVLayout(block_size, entries, dtype)
    whole = larger_for_states(KVLayout(block_size, entries, dtype if cache.dtype == "auto" else cache.dtype))
    return replace(whole, groups=group_layers(whole, {index: window for index, (_, window) in enumerate(found)}))


def group_layers(layout: KVLayout, windows: Mapping[int, int | None]) -> tuple[LayerGroup, ...]:
    """The groups of a model, those without a window first and states last. `windows`: of each layer of the layout, by
    its index.

    The group size is the one of least cost, where a wasted layer costs as much as a group; of two sizes with equal cost
    the one that wastes less. Of layers that keep states, a group has as many as fit into the block of the others.
    """
    kinds: dict[_Kind, list[int]] = {}
    for layer, geometry in enumerate(layout.layers):
        window = windows[layer]
        kind = _Kind(isinstance(geometry, LayerState), window is not None, window or 0)
        kinds.setdefault(kind, []).append(layer)
    if len(kinds) == 1:
        return (LayerGroup(tuple(range(layout.num_layers)), windows[0]),)
    sizes = range(1, max(map(len, kinds.values())) + 1)
    divisions = [_divided(kinds, size, layout) for size in sizes]
    waste = [_wasted_layers(groups, layout) for groups in divisions]
    best = min(range(len(divisions)), key=lambda index: (waste[index] + len(divisions[index]), waste[index]))
    return tuple(divisions[best])


def larger_for_states(layout: KVLayout) -> KVLayout:
    """The layout with so many tokens in a block that the states behind them cost little beside the keys.

    The states of a model may take as much memory as the keys of thousands of tokens, and a block has those behind its
    last token: so blocks of 16 tokens would keep hardly anything else. Behind a cached prefix at most a block is
    computed again.
    """
    states = sum(layer.num_bytes for layer in layout.layers if isinstance(layer, LayerState))
    while states and 2 * layout.block_size <= _MOST_TOKENS_FOR_STATES:
        elements = sum(
            layout.layer_elements(index)
            for index, layer in enumerate(layout.layers)
            if isinstance(layer, LayerGeometry)
        )
        if states <= _STATES_TO_KEYS * elements * ELEMENT_BYTES[layout.dtype]:
            break
        layout = replace(layout, block_size=2 * layout.block_size)
    return layout


class _Kind(NamedTuple):
    """What the layers of a group have in common, in the order of groups."""

    keeps_state: bool
    has_window: bool
    window: int


def _divided(kinds: Mapping[_Kind, Sequence[int]], size: int, layout: KVLayout) -> list[LayerGroup]:
    """Groups of at most `size` layers of one kind, or of as many states as fit into a block of such groups."""
    groups: list[LayerGroup] = []
    for kind in sorted(kinds):
        layers, count = kinds[kind], size
        if kind.keeps_state and groups:
            room = max(sum(map(layout.layer_elements, group.layers)) for group in groups)
            num_groups = -(-len(layers) // max(1, room // max(map(layout.layer_elements, layers))))
            count = -(-len(layers) // num_groups)
        window = kind.window if kind.has_window else None
        groups += [LayerGroup(tuple(layers[at : at + count]), window) for at in range(0, len(layers), count)]
    return groups


def _wasted_layers(groups: Sequence[LayerGroup], layout: KVLayout) -> float:
    """The unused part of a block, added up over all groups, in layers of average size."""
    used = [sum(layout.layer_elements(layer) for layer in group.layers) for group in groups]
    return (max(used) * len(groups) - sum(used)) * layout.num_layers / sum(used)
