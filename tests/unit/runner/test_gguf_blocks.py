"""Blocks of GGUF's quantised formats, against llama.cpp's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from baton.runner.backends.cpu.kernels.quantized import PackedQuantizedWeight
from baton.runner.backends.cpu.kernels.weights import pack
from baton.runner.model.stored import gguf as blocks_module
from baton.runner.model.stored.gguf import QUANTIZED_FORMATS
from tests.support.gguf_files import SCALE_STARTS, random_blocks

ROWS, COLUMNS = 6, 1024


@pytest.mark.parametrize("kind", SCALE_STARTS)
@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
def test_random_blocks_mean_what_llama_cpp_says(monkeypatch: pytest.MonkeyPatch, kind: str, rows_at_once: int) -> None:
    monkeypatch.setattr(blocks_module, "_PIECE", rows_at_once * COLUMNS)
    blocks = random_blocks(kind, ROWS, COLUMNS, seed=3)
    weight = QUANTIZED_FORMATS[kind].unpack(torch.from_numpy(blocks))
    assert weight.shape == (ROWS, COLUMNS)
    assert int(weight.codes.max()) < 2**weight.bits
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(weight.dequantized().numpy(), expected, rtol=2**-22, atol=2**-22)
    np.testing.assert_allclose(weight.dequantized(torch.float64).numpy(), expected, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("kind", SCALE_STARTS)
def test_packed_blocks_take_as_many_bytes_as_the_format_says(kind: str) -> None:
    form = QUANTIZED_FORMATS[kind]
    packed = pack(form.unpack(torch.from_numpy(random_blocks(kind, 64, COLUMNS, seed=3))))
    assert isinstance(packed, PackedQuantizedWeight)
    assert packed.storage.nbytes == 64 * COLUMNS // form.layout.num_elements * form.packed_bytes


@pytest.mark.parametrize(
    ("kind", "start"), [(kind, start) for kind, starts in SCALE_STARTS.items() for start in starts]
)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_no_finite_number_is_found(kind: str, start: int, bad: float) -> None:
    blocks = random_blocks(kind, ROWS, COLUMNS, seed=3)
    assert QUANTIZED_FORMATS[kind].has_finite_scales(torch.from_numpy(blocks))
    blocks[-1, start : start + 2] = np.array([bad], dtype="<f2").view(np.uint8)
    assert not QUANTIZED_FORMATS[kind].has_finite_scales(torch.from_numpy(blocks))


def test_rows_that_are_no_whole_number_of_blocks_have_no_columns() -> None:
    assert QUANTIZED_FORMATS["Q4_K"].columns(288) == 512
    assert QUANTIZED_FORMATS["Q4_K"].columns(287) is None
