"""What a stage of a model must know of the others (pipeline parallelism).

`StageModule` leaves a transformers module the layers of one stage, so that its own loop over the layers computes just
these. The loop still goes over all places. In those of other stages' layers are modules without weights, which hand the
hidden states on: the last one before this stage's layers replaces them by what was received of the stage before, and
the first one behind them keeps what this stage has computed. Layers may look at a token's embedding, too: those of
Zamba2 with the shared block, and those of Gemma 3n and 4, which have inputs of their own. Then the rows of the first
stage's embedding go through all stages beside the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from baton.engine.runner import LayerGeometry, LayerState
from baton.runner.model.attention import KINDS_WITHOUT_CACHE, UnsupportedAttention, require_windows
from baton.runner.model.fused.streams import apart, side_by_side
from baton.runner.model.layers import head_of
from baton.runner.model.probe_attention import ProbeAttention
from baton.runner.model.stored.layers import StoredEmbedding
from baton.runner.parts import Stage


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What a stage has found out of one of its layers."""

    entries: tuple[LayerGeometry | LayerState, ...]
    """What it has in the cache: keys, a state, keys and then a state, or nothing. Each is a layer of the layout."""
    window: int | None
    """How many keys its queries see; None: all, or it has none."""


class OutputWidths(NamedTuple):
    """The widths of what a stage computes of a step."""

    hidden: int
    logits: int


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage has found out of its part of the model."""

    layers: Mapping[int, LayerReport]
    missed_products: Sequence[str]
    """The products outside of Baton's kernels."""
    why_no_own_loop: str
    """Why transformers' loop over the layers runs; empty when Baton's loop replaces it."""
    why_not_fused: str
    """Why torch computes more than copies, so that rows have to be padded; empty when it does not."""
    embedding_size: int
    """The width of the head's input; 0: it can't be observed, or another stage has the head."""
    num_logits: int
    """The width of the head's output; 0: another stage has the head."""
    looks_at_embedding: bool = False
    """Whether its layers are given more of a token than the rows of the stage before."""
    row_width: int = 0
    """The width of rows that may be given in place of tokens; 0: another stage has the embedding."""
    why_no_given_rows: str = ""
    """Why none may be."""
    row_dtype: str = ""
    """The dtype of the rows behind its layers."""
    cache_room: int = 0
    """Bytes for its part of a KV cache that has what GPUs have left; 0 for a cache of another size."""
    adaptable: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Numbers of outputs and inputs of the modules that adapters may change, the embedding apart, by name."""
    adapter_shapes: Sequence[Sequence[int]] = field(default_factory=list)
    """The same numbers of all products that adapters may change, each once."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes | bytearray) -> StageReport:
        """The report that `to_json` wrote. Raises ValueError."""
        try:
            read = json.loads(text)
            layers = {
                int(index): LayerReport(tuple(map(_entry, layer["entries"])), layer["window"])
                for index, layer in read.pop("layers").items()
            }
            report = cls(layers=layers, **read)
            texts = (*report.missed_products, report.why_no_own_loop, report.why_not_fused, report.why_no_given_rows)
            texts += (report.row_dtype,)
            shapes = [*report.adaptable.values(), *report.adapter_shapes]
            numbers = (
                report.embedding_size,
                report.num_logits,
                report.row_width,
                report.cache_room,
                *(n for pair in shapes for n in pair),
            )
            if not all(len(pair) == 2 for pair in shapes):
                raise TypeError("a product has not the number of outputs and that of inputs")
            if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, int) for n in numbers):
                raise TypeError(f"{texts} are not texts, or {numbers} not numbers")
            if not isinstance(report.looks_at_embedding, bool):
                raise TypeError(f"{report.looks_at_embedding!r} is neither true nor false")
            return report
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no report of a stage ({error!r})") from error


class Adaptable(NamedTuple):
    """What adapters may change in all stages, the embedding apart."""

    modules: Mapping[str, tuple[int, int]]
    """Numbers of outputs and inputs, by the names of modules."""
    shapes: Set[tuple[int, int]]
    """The same numbers of all products, those that are computed in their place among them."""

    @classmethod
    def of(cls, reports: Sequence[StageReport]) -> Adaptable:
        named = [named for report in reports for named in report.adaptable.items()]
        shapes = [shape for report in reports for shape in report.adapter_shapes]
        return cls({name: (n, k) for name, (n, k) in named}, {(n, k) for n, k in shapes})


def _entry(fields: Mapping[str, Any]) -> LayerGeometry | LayerState:
    return LayerState(**fields) if "heads" in fields else LayerGeometry(**fields)


def layers_found(
    architecture: str, config: Any, own_layers: range, probe: ProbeAttention, readers: Set[int] = frozenset()
) -> dict[int, LayerReport]:
    """The reports of a stage's layers, which have computed a step with `probe`. `readers`: the layers that attend to
    what others have in the cache.

    Raises UnsupportedAttention if some have neither attention nor a state and should have, or tell their windows to
    masks alone.
    """
    found, kinds = probe.found(), getattr(config, "layer_types", None) or ()
    without = readers | {index for index, kind in enumerate(kinds) if kind in KINDS_WITHOUT_CACHE}
    if found.keys() - without != set(own_layers) - without:
        raise UnsupportedAttention(
            f"{architecture} has {len(own_layers)} layers, {len(found)} with attention or a state, and the others "
            f"are not of a type that has neither ({', '.join(sorted(KINDS_WITHOUT_CACHE))})"
        )
    require_windows(architecture, config, probe.windows)
    return {index: LayerReport(found.get(index, ()), probe.windows.get(index)) for index in own_layers}


def layers_of_entries(reports: Sequence[StageReport]) -> list[int]:
    """The model's layer of each layer of the layout, which has one for each entry."""
    return [index for report in reports for index in sorted(report.layers) for _ in report.layers[index].entries]


def entries_of_stages(reports: Sequence[StageReport]) -> list[range]:
    """The layers of the layout that each stage has. Raises UnsupportedAttention for a stage without any."""
    counts = [sum(len(layer.entries) for layer in report.layers.values()) for report in reports]
    if 0 in counts:
        raise UnsupportedAttention(
            f"none of the layers of stage {counts.index(0)} has attention or a state: use fewer stages (--pp)"
        )
    ends = list(accumulate(counts))
    return list(map(range, [0, *ends], ends))


def require_width(rows: torch.Tensor, width: int, architecture: str) -> None:
    """Raise UnsupportedAttention for rows [T, N] between layers of which the configuration says another width."""
    if rows.shape[1] != width:
        raise UnsupportedAttention(
            f"{architecture} has rows of {rows.shape[1]} numbers between its layers, not of {width}: they can't be "
            "handed from stage to stage"
        )


def require_one_dtype(reports: Sequence[StageReport], architecture: str) -> None:
    """Raise UnsupportedAttention for rows of several dtypes between layers.

    A stage can't see the rows before its layers, and takes them for such as are behind these.
    """
    found = sorted({report.row_dtype for report in reports})
    if len(found) > 1:
        raise UnsupportedAttention(
            f"{architecture} has rows of {' and '.join(found)} between its layers, which stages can't send: leave out "
            "--pp"
        )


def reports_to_json(reports: Sequence[StageReport]) -> bytes:
    """The reports of all stages, for `reports_from_json`."""
    return json.dumps([asdict(report) for report in reports]).encode()


def reports_from_json(text: bytes | bytearray) -> list[StageReport]:
    """The reports that `reports_to_json` wrote."""
    return [StageReport.from_json(json.dumps(report).encode()) for report in json.loads(text)]


def first_reason(reasons: Sequence[str]) -> str:
    """The first reason that there is, with the number of its stage if there are several stages."""
    first = next(((stage, reason) for stage, reason in enumerate(reasons) if reason), None)
    if first is None:
        return ""
    return first[1] if len(reasons) == 1 else f"stage {first[0]}: {first[1]}"


class Stages(Protocol):
    """One stage's view of all stages of a model. Each has a KV cache of its own layers."""

    @property
    def stage(self) -> Stage:
        """This stage."""
        ...

    def exchange(self, own: StageReport) -> list[StageReport]:
        """The reports of all stages in order, once all have called this. Raises RankLost."""
        ...


class Received(NamedTuple):
    """What a stage is given of a step besides its numbers."""

    rows: torch.Tensor
    """[T, W], behind the last layer of the stage before; of several streams side by side."""
    embedding: torch.Tensor | None
    """[T, N], which the first stage's embedding gave, or rows in its place; None: no stage looks at them."""

    @classmethod
    def of(cls, sent: torch.Tensor, width: int, dtype: torch.dtype) -> Received:
        """What the stage before has sent, of which `width` columns are rows; it may share their memory.

        `dtype`: of the embedding, whose rows are sent in that of the others.
        """
        return cls(sent[:, :width], sent[:, width:].to(dtype) if sent.shape[1] > width else None)

    def copy(self) -> Received:
        """The same in memory of its own."""
        contiguous = torch.contiguous_format
        embedding = None if self.embedding is None else self.embedding.clone(memory_format=contiguous)
        return Received(self.rows.clone(memory_format=contiguous), embedding)


def needs_more_than_rows(architecture: str) -> UnsupportedAttention:
    """What a model is refused with whose layers can't be divided in stages."""
    return UnsupportedAttention(
        f"layers of {architecture} need keys, values or other results of layers that are in another stage: use fewer "
        "stages (--pp), or leave out --pp"
    )


class OneStage:
    """The only stage of a model."""

    stage = Stage()

    def exchange(self, own: StageReport) -> list[StageReport]:
        return [own]


ONE_STAGE = OneStage()


class AsReturned(torch.Tensor):
    """The rows [1, T, hidden size] that a layer returns, alone or in a tuple, of which some loops take the first."""

    # Computed with, they are rows as any others.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor) if type(index) is int and index == 0 else super().__getitem__(index)

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((self[0], None))


def as_returned(hidden: torch.Tensor) -> torch.Tensor:
    """What stands for a layer returns these rows as; streams [S, 1, T, N], of which a loop takes single ones, as they
    are."""
    return hidden.as_subclass(AsReturned if hidden.ndim == 3 else torch.Tensor)


class OtherLayer(nn.Module):
    """Stands for a layer of another stage."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, str):  # by which the model's loop tells kinds of layers apart
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *_arguments: Any, **_keywords: Any) -> torch.Tensor:
        return as_returned(hidden)


class ReceivedRows(OtherLayer):
    """Stands for the layer before a stage's first one: it returns the rows of the stage before."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.rows = torch.empty(0)

    def forward(self, hidden: torch.Tensor, *_arguments: Any, **_keywords: Any) -> torch.Tensor:
        rows = self.rows.unsqueeze(0)
        return as_returned(rows if hidden.ndim == 3 else apart(rows, hidden.shape[0]))


class KeptRows(OtherLayer):
    """Stands for the layer behind a stage's last one: it keeps the rows for the stage behind."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.rows = torch.empty(0)

    def forward(self, hidden: torch.Tensor, *_arguments: Any, **_keywords: Any) -> torch.Tensor:
        self.rows = hidden[0] if hidden.ndim == 3 else side_by_side(hidden)[0]
        return as_returned(hidden)


class NoEmbedding(nn.Module):
    """Stands for the embedding in a stage behind the first: it gives the rows that were received, or else zeros."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: torch.Tensor
        """No rows, for modules that ask where the weight is."""
        self.register_buffer("weight", torch.empty(0, width, dtype=dtype), persistent=False)
        self.rows: torch.Tensor | None = None
        """[T, hidden size], of the next call."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[1, T] to [1, T, hidden size]"""
        if self.rows is not None:
            return self.rows.unsqueeze(0)
        return self.weight.new_zeros(*token_ids.shape, self.weight.shape[1])


class NoHead(nn.Module):
    """Stands for the head in a stage before the last: logits of no tokens, [..., hidden size] to [..., 0]."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: torch.Tensor
        """No rows, for models that ask for the dtype of the weight."""
        self.register_buffer("weight", torch.empty(0, width, dtype=dtype), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., :0]


class StageModule:
    """The part of a module that a stage computes; for the only stage the module as it is."""

    def __init__(self, module: Any, num_layers: int, stage: Stage, dtype: torch.dtype) -> None:
        """Take the layers of other stages, the embedding and the head out of the module, unless the stage has them.

        Raises UnsupportedAttention for a module whose layers can't be found, and ConfigError for too few layers.
        """
        self._received: ReceivedRows | None = None
        self._embedding: NoEmbedding | None = None
        self._kept: KeptRows | None = None
        self.own_layers = stage.layers(num_layers)
        self.embedding_width = 0
        """How wide the rows of the embedding are, for a model in several stages."""
        self.row_dtype = dtype
        """The dtype of the rows behind this stage's last layer in its last call, for a model in several stages."""
        if stage.count == 1:
            return
        layers = layers_of(module, num_layers)
        own, each = stage.layers(len(layers), _num_inseparable(module.config)), num_layers // len(layers)
        self.own_layers = range(own.start * each, own.stop * each)
        for index in range(len(layers)):
            if index not in own:
                layers[index] = OtherLayer(layers[index])
        layers[own.stop - 1].register_forward_hook(self._left_last_layer)
        self.embedding_width = width = _width_of(module.get_input_embeddings())
        before, behind = own.start - 1, own.stop
        if not stage.is_first:
            self._embedding = NoEmbedding(width, dtype)
            module.set_input_embeddings(self._embedding)
            self._received = layers[before] = ReceivedRows(layers[before])
            layers[before + 1].register_forward_pre_hook(_take_as_rows, with_kwargs=True)
        if not stage.is_last:
            if head_of(module) is not None:
                module.set_output_embeddings(NoHead(width, dtype))
            self._kept = layers[behind] = KeptRows(layers[behind])

    def _left_last_layer(self, _layer: nn.Module, _given: Any, out: Any) -> None:
        rows = out if isinstance(out, torch.Tensor) else out[0]
        self.row_dtype = rows.dtype

    def receive(self, received: Received) -> None:
        """Give a stage behind the first what is received, for the module's next call."""
        if self._received is not None and self._embedding is not None:
            self._received.rows, self._embedding.rows = received

    def take_kept(self) -> torch.Tensor | None:
        """The rows [T, W] of the module's last call for the stage behind; None in the last stage."""
        if self._kept is None:
            return None
        rows, self._kept.rows = self._kept.rows, torch.empty(0)
        return rows


def _take_as_rows(_layer: nn.Module, given: Any, named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let a layer be given what a stand-in returned as rows, which its parts may index."""

    def plain(value: Any) -> Any:
        return value.as_subclass(torch.Tensor) if isinstance(value, AsReturned) else value

    return tuple(map(plain, given)), {name: plain(value) for name, value in named.items()}


def _num_inseparable(config: Any) -> int:
    """How many layers at the end must be in one stage: those from the first on whose keys others read."""
    modes = list(getattr(config, "kv_sharing_modes", None) or ())
    return len(modes) - modes.index("store") if "reuse" in modes else 1


def _width_of(embedding: nn.Module) -> int:
    weight = embedding.stored if isinstance(embedding, StoredEmbedding) else embedding.weight
    return int(weight.shape[1])  # type: ignore[index]


def layers_of(module: nn.Module, num_layers: int) -> nn.ModuleList:
    """The same as `looped_parts_of`; raises UnsupportedAttention for a module without such a list."""
    layers = looped_parts_of(module, num_layers)
    if layers is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} has no list of its layers with attention each, so they can't be divided in "
            "stages: leave out --pp"
        )
    return layers


def looped_parts_of(module: nn.Module, num_layers: int) -> nn.ModuleList | None:
    """The list of the parts that a module's loop goes over: its layers, or parts with several layers' attention each.

    The i-th layer has all attention with the layer index i, and the i-th of other parts that of as many layers as each.
    Parts may stand for those of other stages. None for a module without such a list.
    """
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
    return next((part for part in lists if _has_layers(part, num_layers)), None)


def _has_layers(parts: nn.ModuleList, num_layers: int) -> bool:
    if not len(parts) or num_layers % len(parts):
        return False
    each = num_layers // len(parts)
    own = ((index, part) for index, part in enumerate(parts) if not isinstance(part, OtherLayer))
    if each == 1:
        return all(_layer_indices(layer) == {index} for index, layer in own)
    # Parts of several layers may have numbers of their own.
    below = ((index, set[int]().union(*map(_layer_indices, part.children()))) for index, part in own)
    return all(indices == {*range(index * each, (index + 1) * each)} for index, indices in below)


def _layer_indices(layer: nn.Module) -> set[int]:
    indices = {getattr(part, "layer_idx", None) for part in layer.modules()}
    return {index for index in indices if index is not None}
