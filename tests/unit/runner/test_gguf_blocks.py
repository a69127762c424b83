"""Blocks of GGUF's quantised formats, against llama.cpp's own package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from baton.model_formats.gguf.container import open_gguf
from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.gguf.blocks import unpack
from tests.support.gguf_files import SCALE_STARTS, random_blocks, write_gguf

ROWS, COLUMNS = 6, 1024


def unpacked(path: Path) -> torch.Tensor | QuantizedWeight:
    with open_gguf(path) as file:
        (place,) = file.tensors.values()
        return unpack(place, file.bytes_of(place))


@pytest.mark.parametrize("kind", SCALE_STARTS)
def test_random_blocks_mean_what_llama_cpp_says(tmp_path: Path, kind: str) -> None:
    blocks = random_blocks(kind, ROWS, COLUMNS, seed=3)
    weight = unpacked(write_gguf(tmp_path / "w.gguf", {"w": (kind, blocks)}))
    assert isinstance(weight, QuantizedWeight)
    assert weight.shape == (ROWS, COLUMNS)
    assert int(weight.codes.max()) < 2**weight.bits
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(weight.dequantized().numpy(), expected, rtol=2**-22, atol=2**-22)
    np.testing.assert_allclose(weight.dequantized(torch.float64).numpy(), expected, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_tensors_keep_their_dtype_and_their_bits(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 32).to(dtype)
    tensor = unpacked(write_gguf(tmp_path / "w.gguf", {"w": (kind, values.view(torch.uint8).numpy())}))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == dtype
    assert torch.equal(tensor, values)


@pytest.mark.parametrize(
    ("kind", "start"), [(kind, start) for kind, starts in SCALE_STARTS.items() for start in starts]
)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_no_finite_number_is_refused_with_the_name(
    tmp_path: Path, kind: str, start: int, bad: float
) -> None:
    blocks = random_blocks(kind, ROWS, COLUMNS, seed=3)
    blocks[-1, start : start + 2] = np.array([bad], dtype="<f2").view(np.uint8)
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.w has a scale that is infinite"):
        unpacked(write_gguf(tmp_path / "w.gguf", {"blk.0.w": (kind, blocks)}))


def test_a_quantised_tensor_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    blocks = random_blocks("Q8_0", 4, 64, seed=3).reshape(2, 2, -1)
    with pytest.raises(ConfigError, match="tensor w is quantised and has 3 dimensions"):
        unpacked(write_gguf(tmp_path / "w.gguf", {"w": ("Q8_0", blocks)}))
