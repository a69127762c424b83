"""Writes the model directory of a GGUF file: config.json, the tokenizer's files, and weights as safetensors.

Run as a process of its own (`python -m baton.runner.model.gguf.convert FILE DIRECTORY`), so that the command that needs
the directory does not keep torch in memory. It prints a line with the bytes written and their total after each tensor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
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
from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.gguf.read import read_weight, weight_places

_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_QUANTISED_AS = "BF16"
"""The dtype in which quantised weights are written. Plain ones keep theirs; norms are written as float32."""


def convert(source: Path, directory: Path, on_progress: Callable[[int, int], None]) -> None:
    """Write the model directory of `source` into `directory`, an existing empty one, and flush it to the disk.

    Only one tensor is in memory at a time. Calls `on_progress` with the bytes of weights that are written, and their
    total. Raises ConfigError for a file that is malformed, of an unknown architecture, or can't be written.
    """
    with open_gguf(source) as file:
        facts = Facts(file)
        config = configuration(facts)
        texts = {
            "config.json": config,
            "generation_config.json": generation_config_json(facts),
            "tokenizer_config.json": tokenizer_config_json(facts),
            "tokenizer.json": _checked_tokenizer(source, tokenizer_json(facts)),
        }
        try:
            for name, content in texts.items():
                _write(directory / name, json.dumps(content, ensure_ascii=False, indent=1).encode())
            _write_weights(directory / "model.safetensors", file, architecture_of(facts), config, on_progress)
        except OSError as error:
            raise ConfigError(
                f"the model directory {directory} can't be written ({error.strerror}): set XDG_CACHE_HOME to a "
                "directory with enough room"
            ) from error


def _checked_tokenizer(source: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # The library raises plain Exception.
        raise ConfigError(f"{source} has a tokenizer that can't be built: {str(error).splitlines()[0]}") from error
    return content


def _write_weights(
    path: Path,
    file: GgufFile,
    architecture: Architecture,
    config: Mapping[str, Any],
    on_progress: Callable[[int, int], None],
) -> None:
    """Write a safetensors file tensor by tensor. Wide dtypes come first, so that every tensor is aligned."""
    places = weight_places(file, architecture, config)
    dtypes = {name: _dtype(tensor, architecture) for name, tensor in places.items()}
    names = sorted(places, key=lambda name: (-_PLAIN_BYTES[dtypes[name]], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + _num_elements(places[name]) * _PLAIN_BYTES[dtypes[name]]
        header[name] = {"dtype": dtypes[name], "shape": list(places[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            weight = read_weight(file, places[name], architecture, config)
            if isinstance(weight, QuantizedWeight):
                weight = weight.dequantized(torch.bfloat16)
            out.write(weight.contiguous().view(torch.uint8).numpy().data)
            on_progress(header[name]["data_offsets"][1], end)
        _flush(out)


def _dtype(tensor: TensorPlace, architecture: Architecture) -> str:
    """The dtype of a tensor in the safetensors file; GGUF and safetensors call plain ones alike."""
    if tensor.format.name not in _PLAIN_BYTES:
        return _QUANTISED_AS
    return "F32" if architecture.norms_include_one and tensor.name.endswith("norm.weight") else tensor.format.name


def _num_elements(tensor: TensorPlace) -> int:
    return tensor.num_bytes // tensor.format.num_bytes * tensor.format.num_elements


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
