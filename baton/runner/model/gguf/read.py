"""Reads the weights of a GGUF file under transformers' names, without losing precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from baton.errors import ConfigError
from baton.model_formats.gguf.architectures import Architecture, architecture_of, configuration
from baton.model_formats.gguf.container import GgufFile, TensorPlace, open_gguf
from baton.model_formats.gguf.facts import Facts
from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.gguf.blocks import unpack


def read_quantized(path: Path) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """The weights one after the other, each with its name in transformers; only one is in memory at a time.

    Quantised ones stay integers with scales, and plain ones keep their dtype. Raises ConfigError, see `open_gguf`.
    """
    with open_gguf(path) as file:
        facts = Facts(file)
        config, architecture = configuration(facts), architecture_of(facts)
        for name, tensor in weight_places(file, architecture, config).items():
            yield name, read_weight(file, tensor, architecture, config)


def weight_places(file: GgufFile, architecture: Architecture, config: Mapping[str, Any]) -> Mapping[str, TensorPlace]:
    """The tensors that are weights, by their names in transformers. Raises ConfigError for a tensor without a place."""
    try:
        named = {architecture.weight_name(name, config["num_hidden_layers"]): name for name in file.tensors}
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    return {theirs: file.tensors[name] for theirs, name in named.items() if theirs is not None}


def read_weight(
    file: GgufFile, tensor: TensorPlace, architecture: Architecture, config: Mapping[str, Any]
) -> torch.Tensor | QuantizedWeight:
    """One weight as transformers has it: what llama.cpp's converter changed is undone."""
    try:
        weight = unpack(tensor, file.bytes_of(tensor))
        heads = architecture.interleaved_heads(tensor.name, config)
        if heads:
            return _in_halves(weight, tensor, heads)
        if architecture.norms_include_one and tensor.name.endswith("norm.weight"):
            if isinstance(weight, QuantizedWeight):
                raise ConfigError(f"tensor {tensor.name} is quantised, and no norm is")
            return weight.float() - 1
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    return weight


def _in_halves(
    weight: torch.Tensor | QuantizedWeight, tensor: TensorPlace, heads: int
) -> torch.Tensor | QuantizedWeight:
    """The rows of each head in transformers' order: first those at even places, then those at odd places."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ConfigError(f"tensor {tensor.name} has {rows} rows, which {heads} heads can't share in pairs")
    order = torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
    if isinstance(weight, torch.Tensor):
        return weight[order]
    parts: dict[str, Any] = {field.name: getattr(weight, field.name) for field in fields(weight)}
    for name, part in parts.items():
        parts[name] = part[order] if isinstance(part, torch.Tensor) else part
    return QuantizedWeight(**parts)
