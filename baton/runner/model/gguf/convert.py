"""Writes the model directory of a GGUF file: config.json, the tokenizer's files, and weights as safetensors.

Quantised weights stay in the blocks of the file (baton/runner/model/quantization/gguf.py reads them), and plain ones
keep their numbers.

Run as a process of its own (`python -m baton.runner.model.gguf.convert FILE DIRECTORY`), so that the command that needs
the directory does not keep torch in memory. It prints lines with the bytes written and their total: the first once all
of the file but its weights was found sound, and one after each tensor.
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
from baton.model_formats.gguf.container import TensorPlace, open_gguf
from baton.model_formats.gguf.facts import Facts
from baton.model_formats.gguf.tokenizer import generation_config_json, tokenizer_config_json, tokenizer_json
from baton.runner.model.gguf.read import PLAIN_DTYPES, read_weight, weight_places
from baton.runner.model.quantization.gguf import part_of, quantization_config
from baton.runner.model.quantization.gguf_blocks import QUANTIZED_FORMATS

_NUM_BYTES = {"U8": 1, **{name: dtype.itemsize for name, dtype in PLAIN_DTYPES.items()}}


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
