"""The record of what compiled kernels need, in docs/performance/gpu/kernels.txt: how it is written and read.

Pure, and without Triton, so that a test can compare the record with the sources wherever it runs.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "performance" / "gpu" / "kernels.txt"
CAPABILITIES = (80, 90, 100)
"""Ampere (A100), Hopper (H100, H200) and Blackwell (B200)."""
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""The most shared memory of a block of threads; CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"."""
_SOURCES = (
    "baton/runner/backends/cuda/triton_*.py",
    "baton/runner/backends/cuda/*_kernels.py",
    "baton/runner/backends/cuda/sampling/*.py",
    "baton/runner/backends/cuda/product_tiles.py",
    "scripts/gpu/*_cases.py",
)
_HEAD = f"{'sm':>3} {'regs':>4} {'stack':>5} {'shared':>6} {'warps':>5}  kernel, case"


class Need(NamedTuple):
    """What one compiled kernel needs."""

    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    kernel: str
    case: str

    @classmethod
    def of(cls, numbers: Iterable[int], kernel: str, case: str) -> Need:
        """`numbers`: the other fields, in their order."""
        capability, registers, stack_bytes, shared_bytes, warps = numbers
        return cls(capability, registers, stack_bytes, shared_bytes, warps, kernel, case)


def digest_of_sources(root: Path = ROOT) -> str:
    """A digest of what the kernels and their cases are, whatever their layout, comments and docstrings."""
    paths = sorted(path for pattern in _SOURCES for path in root.glob(pattern))
    trees = (ast.dump(_WithoutTexts().visit(ast.parse(path.read_text(encoding="utf-8")))) for path in paths)
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:16]


class _WithoutTexts(ast.NodeTransformer):
    """Leaves docstrings out of a tree, also those of constants."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def render(needs: Iterable[Need], triton_version: str, digest: str) -> str:
    lines = [
        f"{need.capability:>3} {need.registers:>4} {need.stack_bytes:>5} {need.shared_bytes:>6} {need.warps:>5}  "
        f"{need.kernel}, {need.case}"
        for need in needs
    ]
    title = "What the GPU kernels need, compiled by scripts/gpu_kernels: registers of a thread, bytes of stack and of"
    return "\n".join([title, f"shared memory. Triton {triton_version}, sources {digest}", "", _HEAD, *lines, ""])


def parse(record: str) -> tuple[Mapping[str, str], list[Need]]:
    """What `render` wrote: the versions `Triton` and `sources`, and what each kernel needs."""
    head, _, table = record.partition(_HEAD)
    words = head.replace(",", "").split()
    about = {name: words[words.index(name) + 1] for name in ("Triton", "sources")}
    needs = []
    for line in table.strip().splitlines():
        *numbers, what = line.split(maxsplit=5)
        kernel, _, case = what.partition(", ")
        needs.append(Need.of(map(int, numbers), kernel, case))
    return about, needs
