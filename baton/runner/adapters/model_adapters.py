"""The adapters of one model: which of its products they may change, and those that are loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterFiles, AdapterInfo, TensorPiece, read_adapter
from baton.runner.adapters.adaptable import (
    AdaptableEmbedding,
    AdaptableExperts,
    AdaptableProduct,
    HeldRows,
    LoadedAdapters,
    RowsOfStep,
    divided_among_experts,
)
from baton.runner.adapters.places import NoPlaceHere, ParameterNames, Place, Places, named_parts
from baton.runner.backends.cpu.kernels.adapters import AdapterTable, StepAdapters
from baton.runner.backends.low_rank import LowRank, Outputs
from baton.runner.backends.operations import Operations

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Fitting:
    """The files of an adapter that fits the model."""

    files: AdapterFiles
    places: Mapping[str, Place]
    """By the names of the adapter's modules, the embedding's apart."""
    swaps_experts: bool
    """Whether A of experts has their outputs and B their inputs, as older releases of PEFT wrote most models'."""
    elsewhere: Mapping[str, str]
    """Why the other modules have no place here, by name: they must have one in another stage."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    products: Mapping[int, Any]
    """By the product's number, what `Operations.adapt` returned."""
    experts: Mapping[int, Sequence[Any]]
    """By the number of the experts' product, what `AdaptableExperts.adapt` returned."""
    embedding: Any


_RESERVED = _Loaded({}, {}, None)
"""In the place of an adapter that is being loaded."""


class Checked(NamedTuple):
    """What was found out of an adapter's files in one process."""

    info: AdapterInfo
    elsewhere: Mapping[str, str]
    """Why some of its modules have no place in this part of the model, by name. A whole model refuses them itself."""


class ModelAdapters:
    """The adapters of a model, or of the part that a rank or stage has, in this process.

    `check`, `load` and what concerns slots may be called from any thread, everything else from the one that computes.
    """

    def __init__(
        self,
        module: Any,
        operations: Operations,
        dtype: torch.dtype,
        row_quantum: int,
        device: torch.device,
        names: Callable[[Any], ParameterNames],
        read_files: Callable[[Path], AdapterFiles] = read_adapter,
        is_stage: bool = False,
    ) -> None:
        """`module`: with all products replaced. `names`: of this module's files. `is_stage`: whether other stages have
        the other layers."""
        self._operations = operations
        self._dtype = dtype
        self._read_files = read_files
        self._is_stage = is_stage
        self._changes = threading.Lock()
        """Held to change what is loaded, never while files are read: the thread of steps must not wait for these."""
        self._loaded: list[_Loaded | None] = []
        """By slot. It never becomes shorter, since a step may still have rows of an adapter that was unloaded."""
        self._slots: dict[str, int] = {}
        self.rows = RowsOfStep()
        self.rows.row_quantum = row_quantum
        self._places = Places(module, self.rows, names)
        self._embedding: AdaptableEmbedding | None = None
        self._head_name = ""
        self._find_vocabulary(module, device)

    def _find_vocabulary(self, module: Any, device: torch.device) -> None:
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        for path, part in named_parts(module):
            if part is embedding:
                self._embedding = AdaptableEmbedding.of(path, part, self.rows, device)
            if part is head:
                self._head_name = path

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each loaded adapter, by digest; the value follows what is loaded and unloaded."""
        return self._slots

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """Numbers of outputs and inputs of the modules that adapters may change, the embedding apart, by name."""
        return {
            name: (place.outputs.num_outputs, place.product.num_inputs)
            for name, place in self._places.modules.items()
            if place.product.computes_all_rows
        }

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Numbers of outputs and inputs of all products that adapters may change, the embedding's apart."""
        names = [(place.outputs.num_outputs, place.product.num_inputs) for place in self._places.modules.values()]
        others = (shape for product in self._places.products for shape in product.other_shapes)
        return {*names, *others, *((experts.num_outputs, experts.num_inputs) for experts in self._places.experts)}

    def begin(self, slots: npt.NDArray[np.int32] | None) -> None:
        """Begin a step of rows with these slots [T]; None: no row has an adapter."""
        self.rows.begin(None if slots is None else torch.from_numpy(slots))

    def of_step(self) -> StepAdapters | None:
        """The adapters for a program that computes all rows of the step."""
        return self.rows.of_step()

    def check(self, directory: Path, max_rank: int) -> Checked:
        """Check an adapter as `load` does, and load nothing. Raises AdapterRefused."""
        fitting = self._open(directory, max_rank)
        return Checked(fitting.files.info(), fitting.elsewhere)

    def reserve(self) -> int:
        """A slot for an adapter, which no other one gets until it is freed."""
        with self._changes:
            if None not in self._loaded:
                self._loaded.append(None)
            slot = self._loaded.index(None)
            self._loaded[slot] = _RESERVED
            return slot

    def load(self, directory: Path, digest: str, max_rank: int, slot: int) -> Mapping[str, str]:
        """Read an adapter into a slot; returns why some of its modules have no place here, as `Checked` has it.

        `slot`: one that is reserved in the process that leads, which lets steps name the adapter (`publish`). Raises
        AdapterRefused.
        """
        fitting = self._open(directory, max_rank)
        try:
            loaded = self._read(fitting, digest)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise AdapterRefused(f"{directory}: there is no memory for it; unload other adapters first") from error
        with self._changes:
            self._loaded += [None] * (slot + 1 - len(self._loaded))
            self._loaded[slot] = loaded
            self.rows.table = self._table()
        return fitting.elsewhere

    def publish(self, digest: str, slot: int) -> None:
        """Let steps name the adapter in a slot."""
        with self._changes:
            self._slots[digest] = slot

    def free(self, slot: int) -> None:
        """Free a slot, and the memory of the adapter that is in it, if one is."""
        with self._changes:
            for digest in [digest for digest, own in self._slots.items() if own == slot]:
                del self._slots[digest]
            if slot < len(self._loaded):
                self._loaded[slot] = None
                self.rows.table = self._table()

    def _table(self) -> LoadedAdapters:
        return LoadedAdapters(
            AdapterTable(
                [None if loaded is None else loaded.products.get(number) for loaded in self._loaded]
                for number in range(len(self._places.products))
            ),
            [
                [None if loaded is None else loaded.experts.get(number) for loaded in self._loaded]
                for number in range(len(self._places.experts))
            ],
            [None if loaded is None else loaded.embedding for loaded in self._loaded],
        )

    def _open(self, directory: Path, max_rank: int) -> _Fitting:
        """The files of an adapter that fits this model. Raises AdapterRefused."""
        files = self._read_files(directory)
        places, elsewhere = self._check(files)
        open_places = {name: (place.patterns_name, place.num_stacked) for name, place in places.items()}
        files = files.with_parameters(open_places)
        fitting = _Fitting(files, places, _swaps_experts(files, places), elsewhere)
        self._check_shapes(fitting)
        files.check_ranks(max_rank)
        return fitting

    def _check(self, files: AdapterFiles) -> tuple[dict[str, Place], dict[str, str]]:
        """The places of the adapter's modules, the embedding apart, and why others have none in this stage.

        Raises AdapterRefused if one has none in the model.
        """
        if not any(tensors.computes for tensors in files.modules.values()):
            raise AdapterRefused(f"{files.directory} changes no module: none has both A and B; take another adapter")
        places: dict[str, Place] = {}
        elsewhere: dict[str, str] = {}
        for name, tensors in files.modules.items():
            if tensors.others and any(not rest.startswith("base_layer.") for rest in tensors.others):
                raise AdapterRefused(
                    f"{files.directory} replaces the module {name} (modules_to_save), which Baton does not compute; "
                    "train it with LoRA instead"
                )
            if tensors.a is None and tensors.b is None and not tensors.others:
                continue
            try:
                if tensors.is_embedding:
                    self._embedding_of(files, name)
                else:
                    places[name] = self._places.find(files, name)
            except NoPlaceHere as error:
                if not self._is_stage:
                    raise
                elsewhere[name] = str(error)
                continue
            for rest, place in tensors.others.items():
                if rest != "base_layer.weight" or not (tensors.is_embedding or name == self._head_name):
                    raise AdapterRefused(
                        f"{files.directory} brings the base model's {place.name}, which is compared for the embedding "
                        "and the head alone; save the adapter without it"
                    )
        _check_each_once(files, places)
        return places, elsewhere

    def _check_shapes(self, fitting: _Fitting) -> None:
        """Raise AdapterRefused unless the tensors of modules have the shapes of this model; ranks are not checked."""
        files = fitting.files
        for name, tensors in files.modules.items():
            if name in fitting.elsewhere or (tensors.a is None and tensors.b is None and not tensors.others):
                continue
            place = fitting.places.get(name)
            if place is None:
                embedding = self._embedding_of(files, name)
                num_outputs, num_inputs = embedding.width, embedding.vocab_size
            else:
                num_outputs, num_inputs = place.outputs.num_outputs, place.product.num_inputs
            a_width, b_width = num_inputs, num_outputs
            if fitting.swaps_experts and place is not None and place.is_stacked:
                a_width, b_width = b_width, a_width
            for tensor, axis, width in ((tensors.a, 1, a_width), (tensors.b, 0, b_width)):
                if tensor is not None and tensor.shape[axis] != width:
                    ranks = files.config.rank_of(tensors.patterns_name) * tensors.num_stacked
                    expected = [ranks, width] if axis else [width, ranks]
                    raise AdapterRefused(
                        f"{files.directory}: {tensor.name} has the shape {list(tensor.shape)}, and this model needs "
                        f"{expected}; the adapter is of another base model"
                    )
            expected = [num_inputs, num_outputs] if tensors.is_embedding else [num_outputs, num_inputs]
            for tensor in tensors.others.values():
                if list(tensor.shape) != expected:
                    raise AdapterRefused(
                        f"{files.directory}: {tensor.name} has the shape {list(tensor.shape)}, and this model has "
                        f"{expected}; the adapter is of another base model"
                    )

    def _embedding_of(self, files: AdapterFiles, name: str) -> AdaptableEmbedding:
        """The embedding of this name; raises NoPlaceHere for another module."""
        if (embedding := self._embedding) is None or embedding.name != self._places.own_name(name):
            raise NoPlaceHere(
                f"{files.directory} changes {name} as an embedding, which is none of this model; the adapter is of "
                "another base model"
            )
        return embedding

    def _read(self, fitting: _Fitting, digest: str) -> _Loaded:
        files = fitting.files
        tensors: dict[str, torch.Tensor] = {}
        modules = {name: tensors for name, tensors in files.modules.items() if name not in fitting.elsewhere}
        base = {
            place.name: self._base_rows(name)
            for name, of_module in modules.items()
            for place in of_module.others.values()
        }
        own = {part.name for tensors in modules.values() for part in (tensors.a, tensors.b, tensors.bias) if part}
        for piece in files.read(digest, by_rows=base):
            name = piece.place.name
            if name in base:
                _check_base(files, piece, base[name], self._dtype)
            elif name in own:
                tensors[name] = _as_tensor(piece).float()
        terms: dict[int, list[LowRank]] = {}
        of_experts: dict[int, list[list[LowRank]]] = {}
        embedding = None
        for name, of_module in modules.items():
            a, b = of_module.a, of_module.b
            if a is None or b is None:
                continue
            factor = files.config.factor_of(of_module.patterns_name)
            if of_module.is_embedding:
                assert self._embedding is not None
                embedding = self._embedding.adapt(self._operations, tensors[a.name], tensors[b.name], factor)
                continue
            place = fitting.places[name]
            bias = None if of_module.bias is None else tensors[of_module.bias.name]
            outputs = (Outputs(place.outputs.first, tensors[b.name], bias),)
            if not isinstance(place.product, AdaptableExperts):
                terms.setdefault(place.number, []).append(LowRank(tensors[a.name], factor, outputs))
                continue
            experts = of_experts.setdefault(place.number, [[] for _ in range(place.product.num_experts)])
            if place.expert is None:
                pair = tensors[a.name], tensors[b.name]
                divided = divided_among_experts(*pair, factor, place.num_stacked, swapped=fitting.swaps_experts)
                used = divided[: len(experts)]
                of_experts[place.number] = [[*some, more] for some, more in zip(experts, used, strict=True)]
            else:
                experts[place.expert].append(LowRank(tensors[a.name], factor, outputs))
        return _Loaded(
            {number: self._adapted(self._places.products[number], some) for number, some in terms.items()},
            {
                number: self._places.experts[number].adapt([_in_order(some) for some in experts], self._dtype)
                for number, experts in of_experts.items()
            },
            embedding,
        )

    def _adapted(self, product: AdaptableProduct, terms: Sequence[LowRank]) -> Any:
        return product.adapt(_in_order(terms), product.row_dtype or self._dtype)

    def _base_rows(self, name: str) -> Callable[[torch.Tensor], HeldRows]:
        """What returns those rows of the weight of the embedding, or of the head, that this process has."""
        own = self._places.own_name(name)
        if self._embedding is not None and self._embedding.name == own:
            return self._embedding.held_rows
        return partial(self._operations.held_rows, self._places.modules[own].product.packed, dtype=self._dtype)


def _check_each_once(files: AdapterFiles, places: Mapping[str, Place]) -> None:
    """Raise AdapterRefused if two names are one place: models of older releases of transformers had other names."""
    seen: dict[tuple[int, int | None, int], str] = {}
    for name, place in sorted(places.items(), key=lambda item: item[1].expert is not None):
        product, first = id(place.product), place.outputs.first
        # An expert's tensors are in those of all experts, too, if both are there.
        stacked = seen.get((product, None, 0), name) if place.expert is not None else name
        for other in (stacked, seen.setdefault((product, place.expert, first), name)):
            if other != name:
                raise AdapterRefused(f"{files.directory} changes {name} twice, as {other}, too; copy both files again")


def _swaps_experts(files: AdapterFiles, places: Mapping[str, Place]) -> bool:
    """Whether an adapter's experts have A and B swapped, as the first of them says whose two widths differ."""
    for name, place in places.items():
        a, b = files.modules[name].a, files.modules[name].b
        widths = (place.product.num_inputs, place.outputs.num_outputs)
        if place.is_stacked and a is not None and b is not None and widths[0] != widths[1]:
            return (b.shape[0], a.shape[1]) == widths
    return False


def _in_order(terms: Sequence[LowRank]) -> list[LowRank]:
    return sorted(terms, key=lambda term: term.outputs[0].first)


def _check_base(
    files: AdapterFiles, piece: TensorPiece, held_rows: Callable[[torch.Tensor], HeldRows], dtype: torch.dtype
) -> None:
    """Raise AdapterRefused if rows of the base model that PEFT wrote beside the adapter are not this model's."""
    expected = _as_tensor(piece).to(dtype)
    index = torch.arange(piece.first_row, piece.first_row + expected.shape[0])
    places, rows = held_rows(index)
    if not torch.equal(rows.cpu(), expected[places.cpu()]):
        raise AdapterRefused(
            f"{files.directory} brings its own {piece.place.name}, and this model's is another one; save the adapter "
            "with save_embedding_layers=False"
        )


def _as_tensor(piece: TensorPiece) -> torch.Tensor:
    # A copy that can be written to, so that torch does not warn.
    flat = torch.frombuffer(bytearray(piece.content), dtype=_DTYPES[piece.place.dtype])
    return flat.view(-1, *piece.place.shape[1:])
