"""Writes tiny models in the formats of quantised checkpoints, as the tools that make them lay them out.

Everything here is written a second time, with numpy and without Baton's code: what a reader makes of a file is held
against the numbers that the writer meant.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from baton.runner.model.random_model import write_random_model
from tests.support.tiny_models import TINY_MODELS

Tensors = dict[str, torch.Tensor]
GROUP = 32


@dataclass(frozen=True)
class Integers:
    """A weight in integers: codes [n, k] from 0 on, zeros and float16 scales [n, G]."""

    codes: npt.NDArray[np.int64]
    zeros: npt.NDArray[np.int64]
    scales: npt.NDArray[np.float16]

    @property
    def dequantized(self) -> torch.Tensor:
        """What the integers mean: float64 [n, k]."""
        group = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (np.repeat(each, group, axis=1) for each in (self.zeros, self.scales.astype(np.float64)))
        return torch.from_numpy((self.codes - zeros) * scales)


def integers_of(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> Integers:
    """Quantise a weight [n, k] from the smallest to the largest number of each group."""
    n, k = weight.shape
    groups = weight.double().numpy().reshape(n, k // group, group)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    top = 2**bits - 1
    if symmetric:
        scales = (2 * np.maximum(-low, high) / top).astype(np.float16)
        zeros = np.full_like(low, 2 ** (bits - 1)).astype(np.int64)
    else:
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float64)), 1, top).astype(np.int64)
    steps = np.rint(groups / scales.astype(np.float64)[..., None]) + zeros[..., None]
    return Integers(np.clip(steps, 0, top).astype(np.int64).reshape(n, k), zeros, scales)


def packed_along_rows(values: npt.NDArray[np.int64], bits: int) -> torch.Tensor:
    """Pack 32 / bits neighbours of each row into a word, the first in the lowest bits; the last word is padded."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    words = np.zeros((values.shape[0], padded.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        words |= (padded[:, place::per_word].astype(np.uint32)) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(layer: str, found: Integers, bits: int, *, version: int = 1) -> Tensors:
    """A layer as AutoGPTQ (version 1) and GPTQModel (version 2) store it."""
    k = found.codes.shape[1]
    stored_zeros = (found.zeros - (version == 1)) & (2**bits - 1)
    return {
        f"{layer}.qweight": packed_along_rows(found.codes, bits).T.contiguous(),
        f"{layer}.qzeros": packed_along_rows(stored_zeros.T, bits),
        f"{layer}.scales": torch.from_numpy(found.scales.T.copy()),
        f"{layer}.g_idx": torch.arange(k, dtype=torch.int32) // (k // found.scales.shape[1]),
    }


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(layer: str, found: Integers) -> Tensors:
    """A layer as AutoAWQ stores it for its `gemm` kernels."""

    def packed(by_output: npt.NDArray[np.int64]) -> torch.Tensor:
        words = np.zeros((by_output.shape[0], by_output.shape[1] // 8), dtype=np.uint32)
        for word in range(words.shape[1]):
            for place, output in enumerate(_AWQ_ORDER):
                words[:, word] |= by_output[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(words.view(np.int32).copy())

    return {
        f"{layer}.qweight": packed(found.codes.T),
        f"{layer}.qzeros": packed(found.zeros.T),
        f"{layer}.scales": torch.from_numpy(found.scales.T.copy()),
    }


def pack_quantized(layer: str, found: Integers, bits: int, *, symmetric: bool) -> Tensors:
    """A layer as compressed-tensors stores it in the format pack-quantized."""
    tensors = {
        f"{layer}.weight_packed": packed_along_rows(found.codes, bits),
        f"{layer}.weight_scale": torch.from_numpy(found.scales.copy()).bfloat16(),
        f"{layer}.weight_shape": torch.tensor(found.codes.shape, dtype=torch.int64),
    }
    if not symmetric:
        tensors[f"{layer}.weight_zero_point"] = packed_along_rows(found.zeros.T, bits).T.contiguous()
    return tensors


def int_quantized(layer: str, found: Integers, *, symmetric: bool) -> Tensors:
    """A layer as compressed-tensors stores it in the formats int-quantized and naive-quantized."""
    tensors = {
        f"{layer}.weight": torch.from_numpy((found.codes - 128).astype(np.int8)),
        f"{layer}.weight_scale": torch.from_numpy(found.scales.copy()),
    }
    if not symmetric:
        tensors[f"{layer}.weight_zero_point"] = torch.from_numpy((found.zeros - 128).astype(np.int8))
    return tensors


def fp8(layer: str, weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    """A layer in float8 with one scale, with one a row, or with one for a block of 128 x 128, and what it means."""
    n, k = weight.shape
    rows, columns = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}[kind]
    grid = torch.zeros(-(-n // rows), -(-k // columns))
    for row in range(grid.shape[0]):
        for column in range(grid.shape[1]):
            block = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            grid[row, column] = block.abs().max() / 448
    spread = grid.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    scale = grid.reshape(()) if kind == "tensor" else grid
    return {f"{layer}.weight": codes, f"{layer}.{name}": scale}, (codes.float() * spread).double()


def _scheme(bits: int, group: int | None, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None}
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return {"group_0": {"targets": ["Linear"], "weights": {**weights, **strategy}, **more}}


def _compressed(kind: str, groups: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class WrittenFormat:
    """How one kind of quantised checkpoint is written: its quantization_config, and a layer's tensors and meaning."""

    config: Mapping[str, Any]
    write: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


def _integer_format(
    config: Mapping[str, Any],
    bits: int,
    group: int | None,
    symmetric: bool,
    layout: Callable[[str, Integers], Tensors],
    scales: torch.dtype = torch.float16,
) -> WrittenFormat:
    def write(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = integers_of(weight, bits, group or weight.shape[1], symmetric=symmetric)
        # Scales that the file stores in bfloat16 must be that coarse from the start.
        coarse = torch.from_numpy(found.scales.astype(np.float32)).to(scales).to(torch.float16).numpy()
        found = Integers(found.codes, found.zeros, coarse)
        return layout(layer, found), found.dequantized

    return WrittenFormat(config, write)


def _gptq(bits: int, group: int | None, symmetric: bool, version: int) -> WrittenFormat:
    layout = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": False}
    return _integer_format(
        {**config, **layout}, bits, group, symmetric, lambda layer, found: gptq(layer, found, bits, version=version)
    )


def _pack_quantized(bits: int, group: int | None, symmetric: bool) -> WrittenFormat:
    return _integer_format(
        _compressed("pack-quantized", _scheme(bits, group, symmetric)),
        bits,
        group,
        symmetric,
        lambda layer, found: pack_quantized(layer, found, bits, symmetric=symmetric),
        torch.bfloat16,
    )


def _int_quantized(kind: str, group: int | None, symmetric: bool, **more: Any) -> WrittenFormat:
    return _integer_format(
        _compressed(kind, _scheme(8, group, symmetric, **more)),
        8,
        group,
        symmetric,
        lambda layer, found: int_quantized(layer, found, symmetric=symmetric),
    )


_DYNAMIC_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}

PACKED_FORMATS: Mapping[str, WrittenFormat] = {
    "gptq-int4": _gptq(4, GROUP, True, 1),
    "gptq-int4-asymmetric": _gptq(4, GROUP, False, 1),
    "gptq-v2-int4-asymmetric": _gptq(4, GROUP, False, 2),
    "gptq-int8-rows": _gptq(8, None, True, 1),
    "gptq-int8-asymmetric": _gptq(8, GROUP, False, 1),
    "awq-int4": _integer_format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        4,
        GROUP,
        False,
        awq,
    ),
    "ct-int4": _pack_quantized(4, GROUP, True),
    "ct-int4-asymmetric": _pack_quantized(4, GROUP, False),
    "ct-packed-int8": _pack_quantized(8, GROUP, True),
    "ct-int8-rows": _int_quantized("int-quantized", None, True, input_activations=_DYNAMIC_ACTIVATIONS),
    "ct-int8-groups-asymmetric": _int_quantized("naive-quantized", GROUP, False),
}
"""Formats whose weights are packed as integers."""

FP8_FORMATS: Mapping[str, WrittenFormat] = {
    "fp8-block": WrittenFormat(
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda layer, weight: fp8(layer, weight, "block")
    ),
    "fp8-tensor": WrittenFormat({"quant_method": "fp8"}, lambda layer, weight: fp8(layer, weight, "tensor")),
    "fp8-channel": WrittenFormat(
        _compressed(
            "float-quantized",
            {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                }
            },
        ),
        lambda layer, weight: fp8(layer, weight, "channel"),
    ),
}
"""Formats whose weights are packed in float8."""

ODD_GROUPS: Mapping[str, tuple[WrittenFormat, int]] = {
    "gptq-int4-groups-of-96": (_gptq(4, 96, False, 1), 32),
    "ct-int4-groups-of-36": (_pack_quantized(4, 36, True), 12),
    "ct-int8-groups-of-36": (_int_quantized("naive-quantized", 36, False), 12),
}
"""Formats in groups of other sizes than powers of 2, with the number of neighbouring inputs that are rounded together.
"""
ODD_WIDTHS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 288, "intermediate_size": 576, "head_dim": 72},
    "qwen3_moe": {"hidden_size": 72, "moe_intermediate_size": 36, "head_dim": 72},
}
"""Widths that these groups divide (those of a mixture: groups of 36), and vectors don't, so that rows are padded."""


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """Whether tools quantise a tensor: linear layers and experts, but no head, embedding or router of a mixture."""
    plain = ("embed", "lm_head", "norm", "gate.weight")
    return name.endswith(".weight") and tensor.dim() == 2 and not any(part in name for part in plain)


def write_quantized_model(
    directory: Path, architecture: str | Mapping[str, Any], form: WrittenFormat, seed: int = 3, **config: Any
) -> Path:
    """Write a tiny random model in this format, and beside it a plain one that has the same numbers in float32.

    `architecture`: one of TINY_MODELS, or a configuration. Returns the directory of the plain one.
    """
    base = TINY_MODELS[architecture] if isinstance(architecture, str) else architecture
    write_random_model(directory, {**base, **config}, seed)
    twin = directory.parent / f"{directory.name}-plain"
    shutil.copytree(directory, twin)
    plain = load_file(directory / "model.safetensors")
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in plain.items():
        if is_quantized(name, tensor):
            parts, dequantized = form.write(name.removesuffix(".weight"), tensor)
            stored.update(parts)
            meant[name] = dequantized.float()
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=dict(form.config))
    return twin


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of a model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
