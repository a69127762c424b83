"""What computes the convolutions and recurrences of layers that keep a state, as model/attention.py does attention.

A `ProbeStates` only looks at shapes while a model is loaded; the `PagedStates` compute over the states in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch.nn import functional

from baton.engine.runner import STATE_BYTES, KVLayout, LayerState
from baton.errors import ConfigError
from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.backends.ranks.ranks import Ranks
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall, StateStep, StateView
from baton.runner.parts import Shard, columns_of_ranks

DELTA_RULE_NORM_EPS = 1e-6
"""By which layers with a delta rule norm queries and keys."""


class UnsupportedState(ConfigError):
    """The model keeps states in a way that the cache has no room for."""


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """The weights of a causal convolution of each column."""

    weight: torch.Tensor
    """[W, K]"""
    bias: torch.Tensor | None
    """[W], or None."""
    activation: Literal["silu"] | None
    width: int
    """Columns of the whole layer, of which a rank may have some."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRows:
    """The rows that a linear recurrence takes; see `RecurrenceCall`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    scale: float
    norm_eps: float | None
    num_heads: int
    """H of the whole layer, of which a rank may have some."""
    has_delta_rule: bool = True
    skip: torch.Tensor | None = None
    rates: torch.Tensor | None = None

    @property
    def decays(self) -> torch.Tensor:
        """The decay with its rates: float32 [T, H], or [T, H, DK]."""
        return self.decay if self.rates is None else self.decay[..., None] * self.rates.T


class RecordedRecurrence(NamedTuple):
    """The rows of a recurrence in a program, as `RecurrentRows` has them."""

    query: Rows
    key: Rows
    value: Rows
    decay: Rows
    beta: Rows | None

    def of_heads(self, own: range, own_groups: range, heads: int, groups: int) -> RecordedRecurrence:
        """The columns of some of all heads, and of some of all groups."""

        def columns(rows: Rows, part: range, count: int) -> Rows:
            width = rows.width // count
            return rows.columns(part.start * width, part.stop * width)

        query, key = (columns(rows, own_groups, groups) for rows in (self.query, self.key))
        value, decay = (columns(rows, own, heads) for rows in (self.value, self.decay))
        return RecordedRecurrence(
            query, key, value, decay, None if self.beta is None else columns(self.beta, own, heads)
        )


class KeepStates(Protocol):
    """Computes what one layer asks for of its state: at most one convolution and one recurrence in a step."""

    def convolve(self, layer: int, rows: torch.Tensor, by: Convolution) -> torch.Tensor:
        """Convolve rows [T, W] to [T, W]."""
        ...

    def recur(self, layer: int, rows: RecurrentRows) -> torch.Tensor:
        """The outputs [T, H, DV] of a recurrence over rows."""
        ...


class HasStates(Protocol):
    """What computes a model's layers (model/attention.py), as far as layers that keep a state ask it."""

    @property
    def states(self) -> KeepStates: ...


def state_views(
    memory: torch.Tensor, layout: KVLayout, shard: Shard
) -> tuple[dict[int, StateView], dict[int, StateView]]:
    """The views of convolutions and of recurrences, by layer of the layout, of a flat block-major cache; those of a
    shard's columns and heads."""
    if not layout.keeps_states:
        return {}, {}
    numbers, block_bytes = memory.view(torch.float32), layout.block_bytes
    rows: dict[int, StateView] = {}
    recurrences: dict[int, StateView] = {}
    for group in layout.groups:
        offset = 0
        for index in group.layers:
            state = layout.layers[index]
            if not isinstance(state, LayerState):
                break
            num_blocks = numbers.numel() * STATE_BYTES // block_bytes
            view = StateView(numbers, num_blocks, block_bytes // STATE_BYTES, offset, (), layout.block_size)
            if state.rows:
                columns = shard.columns(state.width)
                shape, stride = (state.rows, len(columns)), state.width
                rows[index] = replace(view, offset=offset + columns.start, shape=shape, row_stride=stride)
            if state.heads:
                heads = shard.kv_heads(state.heads)
                size = state.key_dim * state.value_dim
                at = offset + state.num_row_numbers + heads.start * size
                recurrences[index] = replace(view, offset=at, shape=(len(heads), state.key_dim, state.value_dim))
            offset += state.num_bytes // STATE_BYTES
    return rows, recurrences


def groups_of(layout: KVLayout, layers: Sequence[int], entries: Container[int]) -> dict[int, int]:
    """The group of each of the model's layers `layers`, of which the layers `entries` of the layout are meant."""
    groups = enumerate(layout.groups)
    return {layers[entry]: index for index, group in groups for entry in group.layers if entry in entries}


class PagedStates:
    """Computes over the states in the cache."""

    def __init__(
        self,
        operations: Operations,
        memory: torch.Tensor,
        layout: KVLayout,
        layers: Sequence[int],
        step: Callable[[], StepLayout | None],
    ) -> None:
        """`memory`: the cache, flat. `layers`: the model's layer of each in `layout`. `step`: the step that is being
        computed, or None between steps."""
        self._operations, self._layout_of_step = operations, step
        rows, recurrences = state_views(memory, layout, operations.ranks.shard)
        self._rows = {layers[entry]: view for entry, view in rows.items()}
        self._recurrences = {layers[entry]: view for entry, view in recurrences.items()}
        self._groups = groups_of(layout, layers, rows.keys() | recurrences.keys())

    def convolve(self, layer: int, rows: torch.Tensor, by: Convolution) -> torch.Tensor:
        bias = None if by.bias is None else by.bias.float()
        return self._operations.convolve(
            ConvolutionCall(
                dense(rows), by.weight.float().contiguous(), bias, by.activation, self._rows[layer], self._step(layer)
            )
        )

    def recur(self, layer: int, rows: RecurrentRows) -> torch.Tensor:
        return self._operations.recur(
            RecurrenceCall(
                dense(rows.query),
                dense(rows.key),
                dense(rows.value),
                rows.decay.contiguous(),
                None if rows.beta is None else rows.beta.contiguous(),
                rows.scale,
                rows.norm_eps,
                self._recurrences[layer],
                self._step(layer),
                rows.has_delta_rule,
                rows.skip,
                None if rows.rates is None else rows.rates.contiguous(),
            )
        )

    def record_convolution(self, program: Program, layer: int, rows: Rows, by: Convolution, *, into: str) -> Rows:
        """Append to a program what `convolve` does; the weight is float32. Each rank has columns of its own."""
        view, group, shard = self._rows[layer], self._groups[layer], self._operations.ranks.shard
        if shard.size == 1:
            return program.convolve(rows, by.weight, by.bias, by.activation, view, group, into=into)
        parts = columns_of_ranks(rows.width, shard.size)
        first, end = parts[shard.rank].start, parts[shard.rank].stop
        weight, bias = by.weight[first:end], None if by.bias is None else by.bias[first:end]
        own = program.convolve(rows.columns(first, end), weight, bias, by.activation, view, group, into=f"own {into}")
        return program.gathered(own, into=into, parts=parts)

    def record_recurrence(
        self,
        program: Program,
        layer: int,
        rows: RecordedRecurrence,
        scale: float,
        norm_eps: float | None,
        *,
        has_delta_rule: bool = True,
        skip: torch.Tensor | None = None,
        rates: torch.Tensor | None = None,
        into: str,
    ) -> Rows:
        """Append to a program what `recur` does. Each rank has heads of its own."""
        shard, state = self._operations.ranks.shard, self._recurrences[layer]
        _, key_dim, value_dim = state.shape
        heads, groups = rows.value.width // value_dim, rows.query.width // key_dim
        if shard.size > 1:
            own, own_groups = shard.kv_heads(heads), shard.kv_heads(groups)
            rows = rows.of_heads(own, own_groups, heads, groups)
            skip = None if skip is None else skip[own.start : own.stop].contiguous()
            rates = None if rates is None else rates[:, own.start : own.stop].contiguous()
        out = program.recur(
            *rows,
            scale=scale,
            norm_eps=norm_eps,
            state=state,
            group=self._groups[layer],
            has_delta_rule=has_delta_rule,
            skip=skip,
            rates=rates,
            into=into if shard.size == 1 else f"own {into}",
        )
        return program.gathered(out, into=into)

    def _step(self, layer: int) -> StateStep:
        layout = self._layout_of_step()
        if layout is None:
            raise RuntimeError("a state was asked for outside of a step")
        kept = layout.seq_lens if layout.kept_lens is None else layout.kept_lens
        return StateStep(layout.query_start, layout.seq_lens, kept, layout.block_tables[self._groups[layer]])


class HasPagedStates(Protocol):
    """What computes a model's layers over the cache, as far as layers that keep a state ask it."""

    @property
    def states(self) -> PagedStates: ...


def dense(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...] itself if each row is contiguous, as the kernels need it; otherwise a contiguous copy."""
    return x if x[:1].is_contiguous() else x.contiguous()


@dataclass(slots=True)
class ProbeStates:
    """Computes nothing but shapes, and records what each layer keeps.

    Raises UnsupportedState for a layer that asks twice for a convolution or for a recurrence.
    """

    layers: dict[int, LayerState] = field(default_factory=dict)

    def convolve(self, layer: int, rows: torch.Tensor, by: Convolution) -> torch.Tensor:
        state = self.layers.get(layer, LayerState())
        if state.rows:
            raise UnsupportedState(f"its layer {layer} computes two convolutions, and the cache has room for one state")
        if by.weight.shape[1] < 2:
            raise UnsupportedState(f"its layer {layer} has a convolution of one tap, which keeps no state")
        self.layers[layer] = replace(state, rows=by.weight.shape[1] - 1, width=by.width)
        return torch.zeros_like(rows)

    def recur(self, layer: int, rows: RecurrentRows) -> torch.Tensor:
        state = self.layers.get(layer, LayerState())
        if state.heads:
            raise UnsupportedState(f"its layer {layer} computes two recurrences, and the cache has room for one state")
        dims = {"key_dim": rows.key.shape[2], "value_dim": rows.value.shape[2]}
        if 0 in (rows.num_heads, *dims.values()):
            raise UnsupportedState(f"its layer {layer} has a recurrence without numbers ({dims})")
        self.layers[layer] = replace(state, heads=rows.num_heads, **dims)
        return torch.zeros_like(rows.value)


class EchoStates:
    """Computes each row as the first one of a sequence: for comparing two modules."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, ...]] = []
        """What layers have asked with, each time: rows times the weight, or the rows of a recurrence."""

    def convolve(self, layer: int, rows: torch.Tensor, by: Convolution) -> torch.Tensor:
        # A factor of rows may as well be one of the weight.
        taps = rows.float()[..., None] * by.weight.float()
        self.seen.append((taps, *(() if by.bias is None else (by.bias,))))
        out = rows.float() * by.weight[:, -1].float()
        out = out if by.bias is None else out + by.bias.float()
        return (functional.silu(out) if by.activation else out).to(rows.dtype)

    def recur(self, layer: int, rows: RecurrentRows) -> torch.Tensor:
        given = [part for part in (rows.beta, rows.skip) if part is not None]
        how = [torch.tensor([number]) for number in (rows.norm_eps or 0.0, float(rows.has_delta_rule))]
        self.seen.append((rows.query * rows.scale, rows.key, rows.value, rows.decays, *how, *given))
        value = rows.value.float()
        alike = (rows.query.float() * rows.key.float()).sum(-1, keepdim=True) * rows.scale
        alike = alike.repeat_interleave(value.shape[1] // alike.shape[1], dim=1)
        out = alike * value if rows.beta is None else alike * value * rows.beta[..., None]
        out = out if rows.skip is None else out + value * rows.skip[:, None]
        return out.to(rows.value.dtype)


class StatesOfOwnParts:
    """Takes this rank's columns and heads out of all, and gathers what all ranks computed."""

    def __init__(self, keep: KeepStates, ranks: Ranks) -> None:
        self._keep = keep
        self._ranks = ranks

    def convolve(self, layer: int, rows: torch.Tensor, by: Convolution) -> torch.Tensor:
        shard = self._ranks.shard
        parts = columns_of_ranks(rows.shape[1], shard.size)
        own = slice(parts[shard.rank].start, parts[shard.rank].stop)
        bias = None if by.bias is None else by.bias[own]
        computed = self._keep.convolve(layer, rows[:, own], replace(by, weight=by.weight[own], bias=bias))
        return self._ranks.gather(computed.contiguous(), [len(part) for part in parts])

    def recur(self, layer: int, rows: RecurrentRows) -> torch.Tensor:
        shard, heads, groups = self._ranks.shard, rows.value.shape[1], rows.query.shape[1]
        if heads % shard.size or (groups % shard.size and shard.size % groups):
            raise UnsupportedState(f"its layer {layer} has {heads} heads of states, which can't be divided among ranks")
        own, own_groups = (slice(part.start, part.stop) for part in map(shard.kv_heads, (heads, groups)))
        part = replace(
            rows,
            query=rows.query[:, own_groups],
            key=rows.key[:, own_groups],
            value=rows.value[:, own],
            decay=rows.decay[:, own],
            beta=None if rows.beta is None else rows.beta[:, own],
            skip=None if rows.skip is None else rows.skip[own],
            rates=None if rows.rates is None else rows.rates[:, own],
        )
        computed = self._keep.recur(layer, part).flatten(1)
        every = self._ranks.gather(computed, [computed.shape[1]] * shard.size)
        return every.view(every.shape[0], heads, -1)
