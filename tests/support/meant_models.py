"""Tiny quantised models of every format, each with what its weights mean in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from baton.runner.model.random_model import write_random_model
from baton.runner.model.stored.gguf import QUANTIZED_FORMATS
from baton.runner.model.stored.quantize import quantized
from tests.support.float64_model import Float64Model
from tests.support.gguf_models import converted, random_module, write_module
from tests.support.quantized_models import (
    FP8_FORMATS,
    ODD_GROUPS,
    ODD_WIDTHS,
    PACKED_FORMATS,
    Tensors,
    WrittenFormat,
    edit_config,
    is_quantized,
)
from tests.support.tiny_models import TINY_MODELS

VOCAB_SIZE = 64
NUM_LAYERS = 2
"""A last layer, which computes only the rows that sample, and one before it."""
_SMALL: Mapping[str, Any] = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": NUM_LAYERS}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**TINY_MODELS["llama"], **_SMALL},
    "qwen2": {**TINY_MODELS["qwen2"], **_SMALL},
    "qwen3_moe": {**TINY_MODELS["qwen3_moe"], **_SMALL, "norm_topk_prob": True},
}
"""The architectures that `Float64Model` computes, with few tokens, since each logit has a bound of its own."""


@dataclass(frozen=True)
class MeantModel:
    """A model directory, how a node loads it, and what it means."""

    directory: Path
    tensors: Tensors
    """The tensors of transformers' checkpoint, those of quantised weights dequantised in float64."""
    blocks: Mapping[str, int]
    """By layer the number of neighbouring inputs that are rounded together, if the layer rounds its inputs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `load_runner`."""

    def in_float64(self, *, is_narrow: bool = False) -> Float64Model:
        """The model in float64; `is_narrow`: plain weights have been rounded to bfloat16 before."""
        tensors = self.tensors
        if is_narrow:
            tensors = {
                name: tensor if name.removesuffix(".weight") in self.blocks else tensor.bfloat16()
                for name, tensor in tensors.items()
            }
        return Float64Model(json.loads((self.directory / "config.json").read_text()), tensors)


def _plain(directory: Path, architecture: str, seed: int, changes: Mapping[str, Any]) -> Tensors:
    """A random model, also in its biases and norms, which transformers fills with zeros and ones."""
    write_random_model(directory, {**SHAPES[architecture], **changes}, seed)
    tensors: Tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return tensors


def _save(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_checkpoint(
    directory: Path, architecture: str, form: WrittenFormat, block: int | None = 32, seed: int = 3, **changes: Any
) -> MeantModel:
    """Write a quantised checkpoint; `block`: the inputs that are rounded together, None for weights that round none."""
    stored: Tensors = {}
    meant: Tensors = {}
    blocks: dict[str, int] = {}
    for name, tensor in _plain(directory, architecture, seed, changes).items():
        layer = name.removesuffix(".weight")
        if not is_quantized(name, tensor):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = form.write(layer, tensor)
        stored |= parts
        if block is not None:
            blocks[layer] = block
    _save(directory, stored)
    edit_config(directory, quantization_config=dict(form.config))
    return MeantModel(directory, meant, blocks)


def write_odd_groups(directory: Path, architecture: str, name: str) -> MeantModel:
    """Write a checkpoint of `ODD_GROUPS`."""
    form, block = ODD_GROUPS[name]
    return write_checkpoint(directory, architecture, form, block, **ODD_WIDTHS[architecture])


def write_for_load(directory: Path, architecture: str, bits: int, seed: int = 3, **changes: Any) -> MeantModel:
    """Write a plain model, which its node quantises: the head, and an embedding that is the head, always to 8 bits."""
    tensors = _plain(directory, architecture, seed, changes)
    _save(directory, tensors)
    head = "lm_head" if "lm_head.weight" in tensors else "model.embed_tokens"
    meant, blocks = dict(tensors), {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if is_quantized(name, tensor) or layer == head:
            meant[name] = quantized(tensor, 8 if layer == head else bits).dequantized(torch.float64)
            blocks[layer] = 32
    return MeantModel(directory, meant, blocks, {"quantization": f"int{bits}"})


WIDE: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Rows that the blocks of all of GGUF's formats divide."""


def mixed_formats(name: str) -> str:
    """The format of a matrix in a GGUF file that has all formats; queries, keys and values, and gate and up differ."""
    kinds = {
        "attn_q": "Q4_K",
        "attn_k": "Q5_0",
        "attn_v": "Q6_K",
        "attn_output": "Q5_K",
        "ffn_gate": "Q4_0",
        "ffn_up": "Q5_1",
        "ffn_down": "Q4_1",
    }
    return next((kind for part, kind in kinds.items() if f".{part}." in name), "Q8_0")


GGUF_FILES: Mapping[str, str | Callable[[str], str]] = {
    **{f"gguf-{kind.lower()}": kind for kind in QUANTIZED_FORMATS},
    "gguf-mixed": mixed_formats,
}
"""The quantised formats of GGUF files, and one file that has all of them."""


def write_gguf_model(
    directory: Path, architecture: str, matrices: str | Callable[[str], str], **changes: Any
) -> MeantModel:
    """Convert a GGUF file with matrices of these formats; its numbers in float32 are llama.cpp's own."""
    module = random_module(architecture, **{**WIDE, **changes})
    source = write_module(directory.with_suffix(".gguf"), module, matrices)
    converted(source, directory)
    stored = load_file(directory / "model.safetensors")
    blocks = {
        layer: 16 if part == "q6_k" else 32
        for layer, _, part in (name.rpartition(".") for name in stored)
        if part.upper() in QUANTIZED_FORMATS
    }
    return MeantModel(directory, dict(module.state_dict()), blocks)


def _gguf(matrices: str | Callable[[str], str]) -> Callable[[Path, str], MeantModel]:
    return lambda directory, architecture: write_gguf_model(
        directory, architecture, matrices, num_hidden_layers=NUM_LAYERS
    )


def _checkpoint(form: WrittenFormat, block: int | None) -> Callable[[Path, str], MeantModel]:
    return lambda directory, architecture: write_checkpoint(directory, architecture, form, block)


def _for_load(bits: int) -> Callable[[Path, str], MeantModel]:
    return lambda directory, architecture: write_for_load(directory, architecture, bits)


MEANT_MODELS: Mapping[str, Callable[[Path, str], MeantModel]] = {
    **{name: _checkpoint(form, 32) for name, form in PACKED_FORMATS.items()},
    **{name: _checkpoint(form, None) for name, form in FP8_FORMATS.items()},
    **{name: _gguf(matrices) for name, matrices in GGUF_FILES.items()},
    "int8": _for_load(8),
    "int4": _for_load(4),
}
"""Every format, by its name: writes a model of an architecture into a directory."""
