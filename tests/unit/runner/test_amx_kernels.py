"""AMX's products on any processor with AVX-512: its tile instructions are emulated in plain C (emulated_tiles.h)."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernel_file import LIBRARY
from baton.runner.backends.cpu.kernels.library import library
from baton.runner.backends.quantized_product import block_of
from baton.runner.backends.quantized_weight import QuantizedWeight
from tests.support.kernel_inputs import (
    DTYPES,
    INTEGER_KINDS,
    INTEGER_SHAPES,
    constant_zero,
    float8,
    nested,
    own_zeros,
    randn,
    with_offsets,
)
from tests.support.pairs import all_pairs

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "baton/runner/backends/cpu/kernels/csrc"
HEADER = ROOT / "tests/support/emulated_tiles.h"
COMPILER = shutil.which(os.environ.get("CC", "cc"))

pytestmark = [
    pytest.mark.skipif(
        "avx512_bf16" not in kernels.available().isas, reason="the kernels of AMX need AVX-512 with BF16"
    ),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
]

LONG_SHAPES = ((70, 1184, 32), (33, 1408, 128), (20, 624, 16))
"""Numbers n, k and group of weights of several pieces, the last of which ends within a chunk."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library of AMX's kernels with emulated tiles; everything else is in the package's own library."""
    folder = tmp_path_factory.mktemp("emulated")
    listed = re.search(r"extra_compile_args=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)
    assert listed is not None
    flags = [flag for flag in re.findall(r'"([^"]+)"', listed[1]) if not flag.startswith("-O")]
    # Compiled quickly; the many functions of amx.c that have no part in this, even more so.
    ways = {"amx": ["-O0"], "amx_int8": ["-O1"], "kernels": ["-O1", "-DEMULATED_TILES_HERE"]}
    running = [
        subprocess.Popen(
            [str(COMPILER), *flags, *how, "-fPIC", "-include", HEADER, "-c", SOURCES / f"{name}.c", "-o", f"{name}.o"],
            cwd=folder,
        )
        for name, how in ways.items()
    ]
    assert [one.wait() for one in running] == [0] * len(running)
    objects = [f"{name}.o" for name in ways]
    subprocess.run([str(COMPILER), "-shared", *objects, LIBRARY, "-lm", "-o", "libtiles.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "libtiles.so"))


@contextmanager
def emulated_tiles(functions: ctypes.CDLL) -> Iterator[ctypes.c_int]:
    """Weights are packed for AMX, and multiplied on emulated tiles; gives the count of rows of tiles' products.

    What a processor would refuse fails the test.
    """
    lib = library()
    own = {name: getattr(lib, name) for name in ("linear", "quantized_linear", "isa")}
    emulated = {"linear": functions.baton_linear, "quantized_linear": functions.baton_quantized_linear}
    for name, function in emulated.items():
        function.argtypes = own[name].argtypes
    assert functions.baton_isa_supported(0)
    try:
        for name, value in {**emulated, "isa": 0}.items():
            setattr(lib, name, value)
        yield ctypes.c_int.in_dll(functions, "emulated_tile_rows")
    finally:
        for name, value in own.items():
            setattr(lib, name, value)
    assert ctypes.c_int.in_dll(functions, "emulated_tile_faults").value == 0


def require_bits_of_vectors(functions: ctypes.CDLL, weight: QuantizedWeight, x: torch.Tensor) -> None:
    """Require that a product on tiles has the bits of the one that the tests of all instruction sets look at.

    Tiles have no rows beyond those of x, and fewer than 16 are left to vectors.
    """
    (m, k), n = x.shape, weight.codes.shape[0]
    on_tiles = m * (k // block_of(weight.group)) * 4 * -(-n // 64) if m >= 16 else 0
    packed, bias = kernels.pack(weight), randn(n, seed=8, dtype=x.dtype)
    expected = kernels.linear(x, packed, bias, threads=1)
    with emulated_tiles(functions) as rows:
        before = rows.value
        out = kernels.linear(x, packed, bias, threads=1)
        assert rows.value - before == on_tiles
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@all_pairs({"dtype": DTYPES, "bits": [4, 5, 6, 8], "kind": INTEGER_KINDS})
def test_quantized_products_have_the_bits_of_vectors(
    compiled: ctypes.CDLL, dtype: torch.dtype, bits: int, kind: Callable[..., QuantizedWeight]
) -> None:
    for place, (n, k, group) in enumerate(INTEGER_SHAPES + LONG_SHAPES):
        x = randn(16 + 3 * place, k, seed=place, dtype=dtype) * torch.linspace(0.1, 10, k).to(dtype)
        require_bits_of_vectors(compiled, kind(n, k, bits, group), x)


@pytest.mark.parametrize("kind", [constant_zero, own_zeros, with_offsets, nested])
def test_any_number_of_rows_is_multiplied(compiled: ctypes.CDLL, kind: Callable[..., QuantizedWeight]) -> None:
    weight = kind(40, 224, 4, 32)
    for m in range(1, 41):
        require_bits_of_vectors(compiled, weight, randn(m, 224, seed=m))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_zeros_and_codes_of_any_size_are_multiplied_exactly(compiled: ctypes.CDLL, bits: int) -> None:
    weight = constant_zero(70, 96, bits, 32)
    x = torch.cat([torch.ones(1, 96), -torch.ones(1, 96), randn(18, 96)])
    for zero in (0, 1, 127, 128, 129, 255):
        for code in (0, (1 << bits) - 1):
            extreme = replace(weight, zeros=zero, codes=torch.full_like(weight.codes, code))
            require_bits_of_vectors(compiled, extreme, x)
    require_bits_of_vectors(compiled, replace(weight, zeros=torch.full((70, 3), 255, dtype=torch.uint8)), x)


def test_rows_with_infinities_and_nan_spoil_no_others(compiled: ctypes.CDLL) -> None:
    x = randn(33, 160)
    x[3, 100], x[20, 0], x[32, 159] = torch.inf, torch.nan, -torch.inf
    x[7] = 0
    for kind in (constant_zero, own_zeros, with_offsets):
        require_bits_of_vectors(compiled, kind(70, 160, 8, 32), x)


def test_products_of_all_kinds_take_turns_on_a_thread_s_tiles(compiled: ctypes.CDLL) -> None:
    integers, numbers, codes = constant_zero(70, 96, 8, 32), randn(70, 96, seed=2).bfloat16(), float8(70, 96, 32)
    expected = kernels.pack(integers)
    for m in (1, 16, 17, 40):
        x = randn(m, 96, seed=m).bfloat16()
        of_integers = kernels.linear(x, expected, threads=1)
        with emulated_tiles(compiled):
            packed, packed_codes = kernels.pack(numbers), kernels.pack(codes)
            for _ in range(2):
                assert torch.equal(kernels.linear(x, kernels.pack(integers), threads=1), of_integers)
                out = kernels.linear(x, packed, out_dtype=torch.float32, threads=1)
                torch.testing.assert_close(out, x.float() @ numbers.float().T, rtol=1e-5, atol=1e-4)
                out = kernels.linear(x, packed_codes, out_dtype=torch.float32, threads=1)
                torch.testing.assert_close(out, x.float() @ codes.dequantized(torch.float32).T, rtol=1e-5, atol=1e-1)
