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
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch

from baton.errors import ConfigError, ExitCode
from baton.model_formats.files import NewTensor, write_safetensors, written
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
                with written(directory / name) as out:
                    out.write(json.dumps(content, ensure_ascii=False, indent=1).encode())
            tensors = _new_tensors(file, places, architecture, config)
            write_safetensors(directory / "model.safetensors", tensors, on_progress)
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


def _new_tensors(
    file: GgufFile, places: Mapping[str, TensorPlace], architecture: Architecture, config: Mapping[str, Any]
) -> list[NewTensor]:
    """The tensors of the safetensors file. Wide dtypes come first, so that every tensor is aligned."""
    tensors = []
    for name, tensor in places.items():
        kind, dtype, shape = tensor.format.name, tensor.format.name, tensor.shape
        if kind in QUANTIZED_FORMATS:
            dtype, shape = "U8", (shape[0], tensor.num_bytes // shape[0])
            name = f"{name.removesuffix('.weight')}.{part_of(kind)}"
        elif architecture.norms_include_one and tensor.name.endswith("norm.weight"):
            dtype = "F32"
        content = partial(_content, file, tensor, architecture, config)
        tensors.append(NewTensor(name, dtype, shape, math.prod(shape) * _NUM_BYTES[dtype], content))
    return sorted(tensors, key=lambda tensor: (-_NUM_BYTES[tensor.dtype], tensor.name))


def _content(file: GgufFile, tensor: TensorPlace, architecture: Architecture, config: Mapping[str, Any]) -> memoryview:
    content: memoryview = read_weight(file, tensor, architecture, config).contiguous().view(torch.uint8).numpy().data
    return content


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
