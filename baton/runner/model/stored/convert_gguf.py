"""Writes the model directory of a GGUF file: config.json, the tokenizer's files, and weights as safetensors.

Quantised weights stay in the blocks of the file (baton/runner/model/stored/gguf.py reads them), and plain ones
keep their numbers.

Run as a process of its own (`python -m baton.runner.model.stored.convert_gguf FILE DIRECTORY`), so that the command
that needs the directory does not keep torch in memory. It prints lines with the bytes written and their total: the
first once all of the file but its weights was found sound, and one after each tensor.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import tokenizers
import torch

from baton.errors import ConfigError, ExitCode
from baton.model_formats.gguf.architectures import Architecture, architecture_of, configuration
from baton.model_formats.gguf.container import GgufFile, TensorPlace, open_gguf
from baton.model_formats.gguf.facts import Facts
from baton.model_formats.gguf.tokenizer import generation_config_json, tokenizer_config_json, tokenizer_json
from baton.runner.model.stored.gguf import QUANTIZED_FORMATS, part_of, quantization_config

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The formats of plain numbers; safetensors calls them alike."""
_NUM_BYTES = {"U8": 1, **{name: dtype.itemsize for name, dtype in _PLAIN_DTYPES.items()}}


def convert(source: Path, directory: Path, on_progress: Callable[[int, int], None]) -> None:
    """Write the model directory of `source` into `directory`, an existing empty one, and flush it to the disk.

    Only one tensor is in memory at a time. Calls `on_progress` with the bytes of weights that are written, and their
    total; with 0 once all of the file but its weights was found sound. Raises ConfigError for a file that is malformed,
    of an unknown architecture, or can't be written.
    """
    with open_gguf(source) as file:
        facts = Facts(file)
        config, architecture = configuration(facts), architecture_of(facts)
        places = weight_places(file, architecture, config)
        formats = _quantized_formats(places.values())
        texts = {
            "config.json": config | ({"quantization_config": quantization_config(formats)} if formats else {}),
            "generation_config.json": generation_config_json(facts),
            "tokenizer_config.json": tokenizer_config_json(facts),
            "tokenizer.json": _checked_tokenizer(source, tokenizer_json(facts)),
        }
        try:
            for name, content in texts.items():
                _write(directory / name, json.dumps(content, ensure_ascii=False, indent=1).encode())
            _write_weights(
                directory / "model.safetensors",
                [_entry(name, tensor, architecture) for name, tensor in places.items()],
                lambda tensor: read_weight(file, tensor, architecture, config),
                on_progress,
            )
        except OSError as error:
            raise ConfigError(
                f"the model directory {directory} can't be written ({error.strerror}): it takes about "
                f"{source.stat().st_size / 2**20:.1f} MiB; choose a larger directory: XDG_CACHE_HOME=DIRECTORY"
            ) from error


def _checked_tokenizer(source: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # The library raises plain Exception.
        raise ConfigError(f"{source} has a tokenizer that can't be built: {str(error).splitlines()[0]}") from error
    return content


def _quantized_formats(tensors: Iterable[TensorPlace]) -> list[str]:
    """The quantised formats of a file, the one with most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.format.name] += tensor.num_bytes
    return [name for name, _ in sizes.most_common() if name in QUANTIZED_FORMATS]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the safetensors file."""

    name: str
    tensor: TensorPlace
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _NUM_BYTES[self.dtype]


def _entry(name: str, tensor: TensorPlace, architecture: Architecture) -> _Entry:
    kind = tensor.format
    if kind.name in QUANTIZED_FORMATS:
        rows = tensor.shape[0]
        return _Entry(
            f"{name.removesuffix('.weight')}.{part_of(kind.name)}", tensor, "U8", (rows, tensor.num_bytes // rows)
        )
    is_changed = architecture.norms_include_one and tensor.name.endswith("norm.weight")
    return _Entry(name, tensor, "F32" if is_changed else kind.name, tensor.shape)


def _write_weights(
    path: Path,
    entries: Sequence[_Entry],
    read: Callable[[TensorPlace], torch.Tensor],
    on_progress: Callable[[int, int], None],
) -> None:
    """Write a safetensors file tensor by tensor. Wide dtypes come first, so that every tensor is aligned."""
    entries = sorted(entries, key=lambda entry: (-_NUM_BYTES[entry.dtype], entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    on_progress(0, end)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            out.write(read(entry.tensor).contiguous().view(torch.uint8).numpy().data)
            on_progress(header[entry.name]["data_offsets"][1], end)
        _flush(out)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as out:
        out.write(content)
        _flush(out)


def _flush(out: BufferedWriter) -> None:
    out.flush()
    os.fsync(out.fileno())


def weight_places(file: GgufFile, architecture: Architecture, config: Mapping[str, Any]) -> Mapping[str, TensorPlace]:
    """The tensors that are weights, by their names in transformers.

    Raises ConfigError for a tensor without a place, and for one that can't be quantised and is.
    """
    try:
        named = {architecture.weight_name(name, config["num_hidden_layers"]): name for name in file.tensors}
        places = {theirs: file.tensors[name] for theirs, name in named.items() if theirs is not None}
        for tensor in places.values():
            if tensor.format.name in QUANTIZED_FORMATS:
                _check_quantised(tensor)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    return places


def _check_quantised(tensor: TensorPlace) -> None:
    if len(tensor.shape) != 2:
        raise ConfigError(f"tensor {tensor.name} is quantised and has {len(tensor.shape)} dimensions instead of 2")
    if tensor.name.endswith(("norm.weight", ".bias")):
        raise ConfigError(f"tensor {tensor.name} is quantised, and no norm and no bias is")


def read_weight(
    file: GgufFile, tensor: TensorPlace, architecture: Architecture, config: Mapping[str, Any]
) -> torch.Tensor:
    """One weight, for which what llama.cpp's converter changed is undone.

    Plain numbers in their own dtype and shape; the blocks of a quantised matrix as uint8 [n, bytes of a row]. Raises
    ConfigError for scales that are not finite, and for rows that heads can't share.
    """
    raw = torch.frombuffer(bytearray(file.bytes_of(tensor)), dtype=torch.uint8)
    kind = QUANTIZED_FORMATS.get(tensor.format.name)
    if kind is None:
        weight = raw.view(_PLAIN_DTYPES[tensor.format.name]).view(tensor.shape)
    else:
        weight = raw.view(tensor.shape[0], -1)
        if not kind.has_finite_scales(weight):
            raise ConfigError(
                f"{file.path}: tensor {tensor.name} has a scale that is infinite or not a number; copy the file again"
            )
    heads = architecture.interleaved_heads(tensor.name, config)
    if heads:
        return _in_halves(weight, f"{file.path}: tensor {tensor.name}", heads)
    if architecture.norms_include_one and tensor.name.endswith("norm.weight"):
        return weight.float() - 1
    return weight


def _in_halves(weight: torch.Tensor, name: str, heads: int) -> torch.Tensor:
    """The rows of each head in transformers' order: first those at even places, then those at odd places."""
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise ConfigError(f"{name} has {rows} rows, which {heads} heads can't share in pairs")
    return weight[torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()]


def main(source: str, directory: str) -> int:
    """Convert and return the exit code; an error is one line on stderr."""
    try:
        convert(Path(source), Path(directory), lambda done, total: print(done, total, flush=True))  # noqa: T201
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_CONFIG)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
