"""Reads the tensors of a GGUF file as transformers has them, in the blocks of the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from baton.errors import ConfigError
from baton.model_formats.gguf.architectures import Architecture
from baton.model_formats.gguf.container import GgufFile, TensorPlace
from baton.runner.model.quantization.gguf_blocks import QUANTIZED_FORMATS

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The formats of plain numbers; safetensors calls them alike."""


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
        weight = raw.view(PLAIN_DTYPES[tensor.format.name]).view(tensor.shape)
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
