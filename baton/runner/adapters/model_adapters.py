"""The adapters of one model: which of its products they may change, and those that are loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterFiles, AdapterInfo, TensorPiece, read_adapter
from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts, LoadedAdapters, ModuleOutputs, RowsOfStep
from baton.runner.adapters.embedding import AdaptableEmbedding
from baton.runner.backends.cpu.kernels.adapters import AdapterTable, StepAdapters
from baton.runner.backends.low_rank import LowRank, Outputs
from baton.runner.backends.operations import Operations

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module of the model is computed."""

    product: AdaptableProduct
    number: int
    outputs: ModuleOutputs


@dataclass(frozen=True, slots=True)
class _Loaded:
    products: Mapping[int, Any]
    """By the product's number, what `Operations.adapt` returned."""
    embedding: Any


class ModelAdapters:
    """The adapters of a model. `load` may be called from any thread, everything else from the one that computes."""

    def __init__(
        self,
        module: Any,
        operations: Operations,
        dtype: torch.dtype,
        row_quantum: int,
        device: torch.device,
        read_files: Callable[[Path], AdapterFiles] = read_adapter,
    ) -> None:
        """`module`: with all products replaced."""
        self._operations = operations
        self._dtype = dtype
        self._read_files = read_files
        self._changes = threading.Lock()
        """Held to change what is loaded, never while files are read: the thread of steps must not wait for these."""
        self._loads: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        """By digest: held while this adapter is loaded, so that nobody else reads it, too."""
        self._loaded: list[_Loaded | None] = []
        """By slot. It never becomes shorter, since a step may still have rows of an adapter that was unloaded."""
        self._slots: dict[str, int] = {}
        self.rows = RowsOfStep()
        self.rows.row_quantum = row_quantum
        self._products: list[AdaptableProduct] = []
        self._places: dict[str, _Place] = {}
        self._embedding: AdaptableEmbedding | None = None
        self._head_name = ""
        self._attach(module, device)

    def _attach(self, module: Any, device: torch.device) -> None:
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        # The head that an embedding shares is found twice: its own name is the shorter one.
        paths = sorted(module.named_modules(remove_duplicate=False), key=lambda found: len(found[0]))
        seen: set[int] = set()
        for path, part in paths:
            if part is embedding and self._embedding is None:
                self._embedding = AdaptableEmbedding.of(path, part, self.rows, device)
            if part is head and not self._head_name:
                self._head_name = path
            if not isinstance(part, HasProducts) or id(part) in seen:
                continue
            seen.add(id(part))
            for product in part.products:
                product.attach(len(self._products), self.rows)
                for outputs in product.modules:
                    name = f"{path}.{outputs.module}" if outputs.module else path
                    self._places[name] = _Place(product, len(self._products), outputs)
                self._products.append(product)

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each loaded adapter, by digest; the value follows what is loaded and unloaded."""
        return self._slots

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """Numbers of outputs and inputs of the modules that adapters may change, the embedding apart, by name."""
        return {
            name: (place.outputs.num_outputs, place.product.num_inputs)
            for name, place in self._places.items()
            if place.product.computes_all_rows
        }

    def begin(self, slots: npt.NDArray[np.int32] | None) -> None:
        """Begin a step of rows with these slots [T]; None: no row has an adapter."""
        self.rows.slots = None if slots is None else torch.from_numpy(slots)

    def of_step(self) -> StepAdapters | None:
        """The adapters for a program that computes all rows of the step."""
        return self.rows.of_step()

    def check(self, directory: Path, max_rank: int) -> AdapterInfo:
        """Check an adapter as `load` does, and load nothing. Raises AdapterRefused."""
        return self._open(directory, max_rank).info()

    def load(self, directory: Path, digest: str, max_rank: int) -> None:
        """Read an adapter, and make it known; no effect on one that is loaded. Raises AdapterRefused."""
        with self._changes:
            load = self._loads.setdefault(digest, threading.Lock())
        with load:
            if digest in self._slots:
                return
            files = self._open(directory, max_rank)
            try:
                loaded = self._read(files, digest)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise AdapterRefused(f"{directory}: there is no memory for it; unload other adapters first") from error
            with self._changes:
                if None not in self._loaded:
                    self._loaded.append(None)
                slot = self._loaded.index(None)
                self._loaded[slot] = loaded
                self.rows.table = self._table()
                self._slots[digest] = slot

    def unload(self, digest: str) -> None:
        """Free an adapter's memory; no effect on one that is not loaded."""
        with self._changes:
            slot = self._slots.pop(digest, None)
            if slot is not None:
                self._loaded[slot] = None
                self.rows.table = self._table()

    def _table(self) -> LoadedAdapters:
        return LoadedAdapters(
            AdapterTable(
                [None if loaded is None else loaded.products.get(number) for loaded in self._loaded]
                for number in range(len(self._products))
            ),
            [None if loaded is None else loaded.embedding for loaded in self._loaded],
        )

    def _open(self, directory: Path, max_rank: int) -> AdapterFiles:
        """The files of an adapter that fits this model. Raises AdapterRefused."""
        files = self._read_files(directory)
        self._check(files)
        files.check_ranks(max_rank)
        return files

    def _check(self, files: AdapterFiles) -> None:
        """Raise AdapterRefused unless the adapter's modules are in this model, and have its shapes."""
        if not any(tensors.computes for tensors in files.modules.values()):
            raise AdapterRefused(f"{files.directory} changes no module: none has both A and B; take another adapter")
        for name, tensors in files.modules.items():
            if tensors.others and any(not rest.startswith("base_layer.") for rest in tensors.others):
                raise AdapterRefused(
                    f"{files.directory} replaces the module {name} (modules_to_save), which Baton does not compute; "
                    "train it with LoRA instead"
                )
            if tensors.a is None and tensors.b is None and not tensors.others:
                continue
            num_outputs, num_inputs = self._shape_of(files, name, tensors.is_embedding)
            for place, shape in ((tensors.a, (None, num_inputs)), (tensors.b, (num_outputs, None))):
                if place is not None and any(
                    wanted is not None and found != wanted for found, wanted in zip(place.shape, shape, strict=True)
                ):
                    expected = [files.config.rank_of(name) if size is None else size for size in shape]
                    raise AdapterRefused(
                        f"{files.directory}: {place.name} has the shape {list(place.shape)}, and this model needs "
                        f"{expected}; the adapter is of another base model"
                    )
            for rest, place in tensors.others.items():
                if rest != "base_layer.weight" or not (tensors.is_embedding or name == self._head_name):
                    raise AdapterRefused(
                        f"{files.directory} brings the base model's {place.name}, which is compared for the embedding "
                        "and the head alone; save the adapter without it"
                    )
                expected = [num_outputs, num_inputs] if not tensors.is_embedding else [num_inputs, num_outputs]
                if list(place.shape) != expected:
                    raise AdapterRefused(
                        f"{files.directory}: {place.name} has the shape {list(place.shape)}, and this model has "
                        f"{expected}; the adapter is of another base model"
                    )

    def _shape_of(self, files: AdapterFiles, name: str, is_embedding: bool) -> tuple[int, int]:
        """Outputs and inputs of a module; raises AdapterRefused for one that adapters can't change."""
        place, embedding = self._places.get(name), self._embedding
        if is_embedding and embedding is not None and embedding.name == name:
            return embedding.width, embedding.vocab_size
        if is_embedding or place is None:
            raise AdapterRefused(f"{files.directory} changes {name}, {self._why_not(name)}")
        if not place.product.computes_all_rows:
            raise AdapterRefused(
                f"{files.directory} changes {name}, which this model does not compute once for each token; "
                "train the adapter without it"
            )
        return place.outputs.num_outputs, place.product.num_inputs

    def _why_not(self, name: str) -> str:
        parts = name.split(".")
        if ".experts" in f".{name}":
            return "which are experts, whose adapters Baton does not compute; train the adapter without them"
        alike = [
            one
            for one in self._places
            if [p for p in one.split(".") if not p.isdigit()] == [p for p in parts if not p.isdigit()]
        ]
        if alike:
            return "and this model has no such layer; the adapter is of another base model"
        return "which is no product of this model; the adapter is of another base model"

    def _read(self, files: AdapterFiles, digest: str) -> _Loaded:
        tensors: dict[str, torch.Tensor] = {}
        base = {
            place.name: self._base_rows(name)
            for name, of_module in files.modules.items()
            for place in of_module.others.values()
        }
        for piece in files.read(digest, by_rows=base):
            name = piece.place.name
            if name in base:
                _check_base(files, piece, base[name], self._dtype)
            else:
                tensors[name] = _as_float32(files, piece)
        terms: dict[int, list[LowRank]] = {}
        embedding = None
        for name, of_module in files.modules.items():
            a, b = of_module.a, of_module.b
            if a is None or b is None:
                continue
            factor = files.config.factor_of(name)
            bias = None if of_module.bias is None else tensors[of_module.bias.name]
            if of_module.is_embedding:
                assert self._embedding is not None
                embedding = self._embedding.adapt(self._operations, tensors[a.name], tensors[b.name], factor)
                continue
            found = self._places[name]
            term = LowRank(tensors[a.name], factor, (Outputs(found.outputs.first, tensors[b.name], bias),))
            terms.setdefault(found.number, []).append(term)
        return _Loaded({number: self._adapted(number, some) for number, some in terms.items()}, embedding)

    def _adapted(self, number: int, terms: Sequence[LowRank]) -> Any:
        product = self._products[number]
        ordered = sorted(terms, key=lambda term: term.outputs[0].first)
        return self._operations.adapt(product.packed, ordered, self._dtype)

    def _base_rows(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What returns rows of the weight of the embedding, or of the head."""
        if self._embedding is not None and self._embedding.name == name:
            return self._embedding.weight_rows
        return partial(self._operations.take_rows, self._places[name].product.packed, dtype=self._dtype)


def _check_base(
    files: AdapterFiles, piece: TensorPiece, rows_of: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """Raise AdapterRefused if rows of the base model that PEFT wrote beside the adapter are not this model's."""
    expected = _as_tensor(piece).to(dtype)
    index = torch.arange(piece.first_row, piece.first_row + expected.shape[0])
    if not torch.equal(rows_of(index).cpu(), expected):
        raise AdapterRefused(
            f"{files.directory} brings its own {piece.place.name}, and this model's is another one; save the adapter "
            "with save_embedding_layers=False"
        )


def _as_tensor(piece: TensorPiece) -> torch.Tensor:
    # A copy that can be written to, so that torch does not warn.
    flat = torch.frombuffer(bytearray(piece.content), dtype=_DTYPES[piece.place.dtype])
    return flat.view(-1, *piece.place.shape[1:])


def _as_float32(files: AdapterFiles, piece: TensorPiece) -> torch.Tensor:
    given = _as_tensor(piece)
    if not bool(torch.isfinite(given).all()):
        raise AdapterRefused(
            f"{files.weights_path}: {piece.place.name} has NaN or infinity; the adapter is broken, take another one"
        )
    return given.float()
