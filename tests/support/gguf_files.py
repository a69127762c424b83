"""Small GGUF files, written with llama.cpp's own package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, npt.NDArray[Any]]],
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a file: for each tensor its format, such as Q4_K or F32, and its bytes [..., bytes of a row] or floats.

    A value of the metadata is written as the type that it has in Python; 32 bits for an int and a float.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, rows: int, columns: int, seed: int, scale: float = 0.05) -> npt.NDArray[np.uint8]:
    """Random bytes of a quantised format, with finite scales of about `scale`: [rows, bytes of a row]."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // elements, num_bytes), dtype=np.uint8)
    for start in SCALE_STARTS[kind]:
        scales = rng.normal(0, scale, blocks.shape[:2]).astype("<f2")
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


SCALE_STARTS: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the float16 scales of a block begin, for each quantised format that is read."""


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
