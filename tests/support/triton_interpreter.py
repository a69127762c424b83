"""Triton's kernels for tests: compiled where there is a GPU, otherwise in Triton's interpreter, which numpy computes.

The interpreter is chosen by TRITON_INTERPRET while triton is imported first; tests/conftest.py sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.runner.backends.attention_work import dealing, step_work
from baton.runner.backends.cuda import shared_splits
from baton.runner.backends.cuda.product_tiles import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL_TILES = (Tile(16, 16, 32), Tile(32, 32, 16), Tile(16, 32, 64))
"""Tiles of products for the interpreter."""
SPLIT = dealing.SPLIT if DEVICE.type == "cuda" else 64
"""Keys of a split in these tests: in the interpreter, which takes some milliseconds for a tile of keys, only a few."""


def triton_attention_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the attention kernels, with splits of SPLIT keys, whose tensors are on DEVICE.

    Skips the test where it can't run.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    from baton.runner.backends.cuda import attention_kernels, triton_attention

    for module in (shared_splits, dealing, step_work, triton_attention):
        monkeypatch.setattr(module, "SPLIT", SPLIT)
    if DEVICE.type == "cpu":
        from triton.runtime import interpreter

        if not isinstance(attention_kernels.attend, interpreter.InterpretedFunction):
            pytest.skip("there is no GPU, and TRITON_INTERPRET is not 1")
        mend_interpreter(interpreter)
    return triton_attention


def mend_interpreter(interpreter: Any) -> None:
    """Make the interpreter faster, its products independent of other rows, and right for bfloat16, whose bit patterns
    it multiplies as integers."""
    import triton.language as tl

    builder, convert = interpreter.InterpreterBuilder, interpreter._convert_float
    if convert.__module__ == __name__:
        return

    def create_dot(self: Any, one: Any, other: Any, sums: Any, *_precision: Any) -> Any:
        # One chain of sums in the order of k for each number, as on a GPU: the order in which numpy's library adds
        # depends on the shapes.
        rows, columns, total = wide(one), wide(other), sums.data.copy()
        for place in range(rows.shape[-1]):
            total += rows[..., place, np.newaxis] * columns[..., place, np.newaxis, :]
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    def wide(operand: Any) -> Any:
        is_wide = operand.dtype.scalar != tl.bfloat16
        return operand.data if is_wide else _from_bfloat16(operand.data).view(np.float32)

    def convert_float(numbers: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
        if (source, target) == (tl.bfloat16, tl.float32):
            return _from_bfloat16(numbers)
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().view(torch.uint16).numpy()
            return np.asarray(rounded, dtype=np.uint16)
        return np.asarray(convert(numbers, source, target, rounding))

    builder.create_dot, interpreter._convert_float = create_dot, convert_float
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)


class _PatchOnce:
    """Replaces the interpreter's functions in triton.language once a launch: each call within a kernel does so again,
    which takes longer than what it computes."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._patched: set[int] = set()
        self._scope: Any = None

    def __call__(self, function: Any) -> _PatchOnce:
        names = function.__globals__
        if id(names) not in self._patched:
            self._patched.add(id(names))
            scope = self._patch(function)
            if self._scope is None:
                self._scope = scope
        return self

    def restore(self) -> None:
        self._scope.restore()
        self._scope = None
        self._patched.clear()


def _from_bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    return bits.astype(np.uint32) << np.uint32(16)
