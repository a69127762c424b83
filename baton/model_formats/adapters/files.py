"""An adapter's directory on disk: which modules it has tensors for, their shapes and places, and its digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from baton.errors import AdapterRefused
from baton.model_formats.adapters.config import LONGEST, MAX_RANK, AdapterConfig, read_config
from baton.model_formats.files import SafetensorsHeader, UnsoundSafetensors, open_regular, read_header

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"

_MOST_HEADER_BYTES = 32 << 20
_MOST_TENSORS = 200_000
_MOST_BYTES = 32 << 30
_READ_BYTES = 1 << 22
_PREFIX = "base_model.model."
_WRAPPED = ".base_layer"
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_HALF_ENDS = bytes(byte for byte in range(256) if byte & 0x7C == 0x7C)
"""The last bytes of those float16 that are NaN or infinite."""
_ONES_OF_EXPONENT = bytes(0x80 if byte & 0x7F == 0x7F else 0 for byte in range(256))
"""For the last byte of a float32 or bfloat16: 0x80 if the bits of its exponent are ones, otherwise 0."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What is known of an adapter once its files are read."""

    digest: str
    """SHA-256 in hex over the adapter's weights and over the settings that change what it computes."""
    rank: int
    """The highest rank of its modules."""
    num_bytes: int
    """Size of its weights in the file."""
    num_modules: int
    """How many modules of the base model it changes."""
    base_model: str = ""
    """The base model that the adapter's files name; a hint for people, never checked."""


class TensorPlace(NamedTuple):
    """A tensor in the file."""

    name: str
    dtype: str
    """The name that safetensors has for it: F32, F16 or BF16."""
    shape: tuple[int, ...]
    start: int
    """Its first byte, counted from the first tensor."""
    stop: int


class TensorPiece(NamedTuple):
    """What was read of a tensor: all of it, or some of its rows."""

    place: TensorPlace
    first_row: int
    content: bytes


@dataclass(slots=True)
class ModuleTensors:
    """The tensors of one module of the base model."""

    module: str
    """The module's name in the base model."""
    a: TensorPlace | None = None
    """[rank, inputs]; of an embedding [rank, vocabulary]."""
    b: TensorPlace | None = None
    """[outputs, rank]."""
    bias: TensorPlace | None = None
    """[outputs], which is added as B A x is."""
    is_embedding: bool = False
    patterns_name: str = ""
    """The name with which patterns of ranks and factors are compared: the module's, or its parameter's."""
    num_stacked: int = 1
    """The number of experts whose A are in `a`, one behind the other, and whose B are in `b`, rank by rank; 0: the
    tensors are a parameter's, of which only the model says how many experts it has."""
    others: dict[str, TensorPlace] = field(default_factory=dict)
    """The tensors of a module that the adapter replaces, and those of the base model that PEFT wrote beside its own, by
    the rest of their names."""

    @property
    def computes(self) -> bool:
        """Whether A and B are both there: a module that lacks one of them is as in the base model."""
        return self.a is not None and self.b is not None

    @property
    def is_of_parameter(self) -> bool:
        """Whether the tensors are a parameter's, for which only the model says which one it is."""
        return self.num_stacked == 0


_SUFFIXES = {
    "lora_A.weight": ("a", False),
    "lora_B.weight": ("b", False),
    "lora_B.bias": ("bias", False),
    "lora_embedding_A": ("a", True),
    "lora_embedding_B": ("b", True),
}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The checked files of an adapter. What fits a base model is checked by whoever knows the model."""

    directory: Path
    config: AdapterConfig
    header: SafetensorsHeader
    tensors: tuple[TensorPlace, ...]
    """In the order in which they lie in the file, one behind the other."""
    modules: Mapping[str, ModuleTensors]
    """By the modules' names in the base model."""

    @property
    def weights_path(self) -> Path:
        return self.directory / WEIGHTS_NAME

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return self.tensors[-1].stop

    def check_ranks(self, max_rank: int) -> None:
        """Raise AdapterRefused for ranks that are not those of the settings, or above the highest that is allowed.

        Settings may have many patterns: who knows the model's modules refuses others first, and says which parameters
        the tensors of parameters are of (`with_parameters`): they are not checked otherwise.
        """
        for tensors in self.modules.values():
            _check_rank(self.weights_path, self.config, tensors, max_rank)

    def with_parameters(self, found: Mapping[str, tuple[str, int]]) -> AdapterFiles:
        """The same files, for some modules with the name of the parameter that is meant and its number of experts."""
        modules = {
            name: replace(tensors, patterns_name=found[name][0], num_stacked=found[name][1])
            if name in found
            else tensors
            for name, tensors in self.modules.items()
        }
        return replace(self, modules=modules)

    def info(self) -> AdapterInfo:
        """What is to be known of the adapter; reads the whole file for its digest. Raises AdapterRefused."""
        ranks = [_rank_of(self.config, tensors) for tensors in self.modules.values() if tensors.computes]
        return AdapterInfo(
            self.digest(), max(ranks, default=0), self.num_bytes, len(self.modules), self.config.base_model
        )

    def digest(self) -> str:
        """SHA-256 over the file's bytes and the settings that change results.

        Raises AdapterRefused, also for a tensor with NaN or infinity.
        """
        state = self._begin_digest()
        for piece in self._read({tensor.name for tensor in self.tensors}):
            state.update(piece.content)
        return str(state.hexdigest())

    def check_digest(self, digest: str) -> None:
        """Raise AdapterRefused unless the files are those of this digest."""
        self._compare(self.digest(), digest)

    def read(self, digest: str, by_rows: Container[str] = ()) -> Iterator[TensorPiece]:
        """The tensors in the order of the file, read once; those named in `by_rows` in pieces of some rows each.

        Raises AdapterRefused for a tensor with NaN or infinity, and at the end for files that are not those of this
        digest.
        """
        state = self._begin_digest()
        for piece in self._read(by_rows):
            state.update(piece.content)
            yield piece
        self._compare(str(state.hexdigest()), digest)

    def _read(self, by_rows: Container[str]) -> Iterator[TensorPiece]:
        parts = [part for place in self.tensors for part in _rows_at_a_time(place, place.name in by_rows)]
        pieces = self._pieces(size for _, _, size in parts)
        for (place, first_row, _), piece in zip(parts, pieces, strict=True):
            if not is_finite(place.dtype, piece):
                raise AdapterRefused(
                    f"{self.weights_path}: {place.name} has NaN or infinity; the adapter is broken, take another one"
                )
            yield TensorPiece(place, first_row, piece)

    def _begin_digest(self) -> Any:
        state = hashlib.sha256(b"baton adapter 1")
        for part in (self.config.canonical(), self.header.content):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state

    def _compare(self, digest: str, wanted: str) -> None:
        if digest != wanted:
            raise AdapterRefused(
                f"{self.directory} holds the adapter {digest:.12}, not {wanted:.12}, since its files have changed; "
                "load it again"
            )

    def _pieces(self, sizes: Iterable[int]) -> Iterator[bytes]:
        """The file's bytes from the first tensor on, in pieces of these sizes."""
        try:
            with open_regular(self.weights_path) as file:
                file.seek(self.header.data_start)
                for size in sizes:
                    piece = b""
                    while len(piece) < size:
                        more = file.read(size - len(piece))
                        if not more:
                            raise AdapterRefused(f"{self.weights_path} has become shorter; load it again")
                        piece = piece + more if piece else more
                    yield piece
        except OSError as error:
            raise AdapterRefused(f"{self.weights_path} can't be read ({error}); copy it again") from error


def is_finite(dtype: str, content: bytes) -> bool:
    """Whether these numbers have no NaN and no infinity among them, whose exponents are all ones."""
    size = _ELEMENT_BYTES[dtype]
    last = content[size - 1 :: size]
    if dtype == "F16":
        return len(last.translate(None, _HALF_ENDS)) == len(last)
    # The exponent has 8 bits: 7 are in the last byte of a number, and one is the highest of the byte before.
    exponents = int.from_bytes(last.translate(_ONES_OF_EXPONENT)) & int.from_bytes(content[size - 2 :: size])
    return exponents == 0


def _rows_at_a_time(place: TensorPlace, is_cut: bool) -> Iterator[tuple[TensorPlace, int, int]]:
    """A tensor, or parts of it: each its first row, and its size in bytes."""
    rows, size = place.shape[0], place.stop - place.start
    step = max(1, _READ_BYTES * rows // size) if is_cut else rows
    for first in range(0, rows, step):
        yield place, first, min(step, rows - first) * (size // rows)


def open_adapter(directory: Path, max_rank: int = MAX_RANK) -> AdapterFiles:
    """The adapter in a directory, whose ranks are checked, too; raises as `read_adapter` and `check_ranks` do."""
    files = read_adapter(directory)
    files.check_ranks(max_rank)
    return files


def read_adapter(directory: Path) -> AdapterFiles:
    """Read the settings and the header of an adapter's files. Raises AdapterRefused for what is unsound in them.

    The ranks are not checked.
    """
    if not directory.is_dir():
        raise AdapterRefused(f"there is no directory {directory}; name one that PEFT's save_pretrained wrote")
    config = read_config(directory)
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        if (directory / _PICKLE_NAME).exists():
            raise AdapterRefused(
                f"{directory} has only pickled weights ({_PICKLE_NAME}), which could run code; save the adapter as "
                "safetensors"
            )
        raise AdapterRefused(f"{directory} has no {WEIGHTS_NAME}; copy the weights there")
    try:
        header = read_header(path, _MOST_HEADER_BYTES, _MOST_TENSORS)
    except (UnsoundSafetensors, OSError) as error:
        raise AdapterRefused(str(error)) from error
    tensors = _places(path, header)
    files = AdapterFiles(directory, config, header, tensors, _modules(path, config, tensors))
    for module in files.modules.values():
        _check_module(path, config, module)
    return files


def _places(path: Path, header: SafetensorsHeader) -> tuple[TensorPlace, ...]:
    places = sorted((_place(path, name, entry) for name, entry in header.entries.items()), key=attrgetter("start"))
    if not places:
        raise AdapterRefused(f"{path} holds no tensors; copy it again")
    end = 0
    for tensor in places:
        if tensor.start != end:
            raise AdapterRefused(
                f"{path}: the tensor {tensor.name} begins at {tensor.start}, not at {end}; copy it again"
            )
        end = tensor.stop
    if end > _MOST_BYTES:
        raise AdapterRefused(f"{path} holds {end} bytes of weights; at most {_MOST_BYTES} are read")
    return tuple(places)


def _place(path: Path, name: str, entry: Mapping[str, Any]) -> TensorPlace:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterRefused(f"{path}: the tensor {name} is described wrongly; copy it again") from error
    if not isinstance(dtype, str) or dtype not in _ELEMENT_BYTES:
        raise AdapterRefused(f"{path}: the tensor {name} is of dtype {dtype!r:.20}; only F32, F16 and BF16 are read")
    if not all(type(number) is int and 0 < number < 1 << 40 for number in shape) or not 1 <= len(shape) <= 3:
        raise AdapterRefused(f"{path}: the tensor {name} has the shape {list(shape)!r:.60}; copy it again")
    size = math.prod(shape) * _ELEMENT_BYTES[dtype]
    if type(start) is not int or type(stop) is not int or start < 0 or stop - start != size:
        raise AdapterRefused(f"{path}: the tensor {name} needs {size} bytes, and other ones are given; copy it again")
    return TensorPlace(name, dtype, shape, start, stop)


def _modules(path: Path, config: AdapterConfig, tensors: tuple[TensorPlace, ...]) -> dict[str, ModuleTensors]:
    modules: dict[str, ModuleTensors] = {}
    for tensor in tensors:
        name = tensor.name
        if not name.startswith(_PREFIX):
            raise AdapterRefused(
                f"{path}: the tensor {name} is none that PEFT writes; its name must begin with {_PREFIX}"
            )
        name = name.removeprefix(_PREFIX)
        for suffix, (part, is_embedding) in _SUFFIXES.items():
            if name.endswith(f".{suffix}"):
                module = name.removesuffix(f".{suffix}")
                of_module = modules.setdefault(module, _tensors_of(config, module))
                if of_module.a is not None and of_module.is_embedding != is_embedding:
                    raise AdapterRefused(f"{path} has tensors of {module} as of an embedding and as of a product")
                of_module.is_embedding = is_embedding
                setattr(of_module, part, tensor)
                break
        else:
            module, _, rest = name.rpartition(".")
            if module.endswith(_WRAPPED):
                module, rest = module.removesuffix(_WRAPPED), f"base_layer.{rest}"
            elif not config.saves(module):
                raise AdapterRefused(
                    f"{path}: the tensor {tensor.name} is neither LoRA's A or B nor of a module in modules_to_save; "
                    "save the adapter without it"
                )
            modules.setdefault(module, ModuleTensors(module, patterns_name=module)).others[rest] = tensor
    return modules


def _tensors_of(config: AdapterConfig, module: str) -> ModuleTensors:
    """A module without tensors yet; PEFT wraps a module once for each of its parameters."""
    wrapped = without_wrappers(module)
    # A text that says which modules are meant says nothing of one module: the model knows.
    is_module = not isinstance(config.target_modules, str) and config.targets(wrapped)
    is_parameter = bool(config.parameters_of(wrapped)) and not is_module
    return ModuleTensors(module, patterns_name=module, num_stacked=0 if is_parameter else 1)


def without_wrappers(module: str) -> str:
    """The name of the module in the base model to whose parameters tensors under this name belong."""
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    return module


def _rank_of(config: AdapterConfig, tensors: ModuleTensors) -> int:
    """The rank of a module's tensors; if it is not known yet which parameter's, the highest that it may be."""
    if not tensors.is_of_parameter:
        return config.rank_of(tensors.patterns_name)
    module = without_wrappers(tensors.module)
    return max(config.rank_of(f"{module}.{parameter}") for parameter in config.parameters_of(module))


def _check_module(path: Path, config: AdapterConfig, tensors: ModuleTensors) -> None:
    """Check a module's tensors against each other, and against the settings apart from the rank."""
    module, a, b = tensors.module, tensors.a, tensors.b
    if len(module) > LONGEST:
        raise AdapterRefused(f"{path} has the module {module:.60}…; names of at most {LONGEST} characters are read")
    if (a is not None or b is not None) and not (tensors.is_of_parameter or config.targets(module)):
        raise AdapterRefused(
            f"{path} has tensors of {module}, which is none of its target_modules, and of which it targets no "
            "parameter; copy both files again"
        )
    if tensors.is_of_parameter and (tensors.is_embedding or tensors.bias is not None):
        raise AdapterRefused(
            f"{path} has a bias, or tensors of an embedding, for a parameter of {module}; copy both files again"
        )
    for tensor in (a, b):
        if tensor is not None and len(tensor.shape) != 2:
            raise AdapterRefused(f"{path}: {tensor.name} has the shape {list(tensor.shape)}, which is no matrix's")
    if tensors.bias is not None and not config.has_lora_bias:
        raise AdapterRefused(
            f"{path} has {tensors.bias.name}, but its settings say no lora_bias; copy both files again"
        )
    if tensors.bias is not None and b is not None and tensors.bias.shape != b.shape[:1]:
        raise AdapterRefused(
            f"{path}: {tensors.bias.name} has the shape {list(tensors.bias.shape)}, not {[b.shape[0]]}"
        )


def _check_rank(path: Path, config: AdapterConfig, tensors: ModuleTensors, max_rank: int) -> None:
    """Check a module's tensors against the rank that the settings say."""
    if (tensors.a is None and tensors.b is None) or tensors.is_of_parameter:
        return
    rank = config.rank_of(tensors.patterns_name)
    if rank > max_rank:
        raise AdapterRefused(
            f"{path}: {tensors.module} has the rank {rank}, and at most {max_rank} is allowed; raise --max-lora-rank"
        )
    for tensor, axis in ((tensors.a, 0), (tensors.b, 1)):
        if tensor is not None and tensor.shape[axis] != rank * tensors.num_stacked:
            experts = f", {tensors.num_stacked} times," if tensors.num_stacked > 1 else ""
            raise AdapterRefused(
                f"{path}: {tensor.name} has the shape {list(tensor.shape)}, which is none of the rank {rank}{experts} "
                "in its settings; copy both files again"
            )
