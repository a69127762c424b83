"""The kernels compile for aarch64 with the flags of the package's own build, and use the processor's vectors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "baton/runner/backends/cpu/kernels/csrc").glob("*.c"))
COMPILER = os.environ.get("AARCH64_CC") or shutil.which("aarch64-linux-gnu-gcc")

pytestmark = pytest.mark.skipif(
    COMPILER is None,
    reason="no C compiler for aarch64 (aarch64-linux-gnu-gcc or AARCH64_CC): run scripts/cross-compiler",
)


@pytest.mark.timeout(600)  # a compiler works for a minute on vectors in plain C, and longer beside other tests
def test_the_kernels_compile_and_use_neon(tmp_path: Path) -> None:
    # The flags of setup.py, which have no -march.
    listed = re.search(r"extra_compile_args=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)
    assert listed is not None
    flags = re.findall(r'"([^"]+)"', listed[1])
    assembly = tmp_path / "portable.s"
    for source in SOURCES:
        # The sources for other processors are empty here and compile quickly.
        how = ["-S", "-o", str(assembly)] if source.stem == "portable" else ["-fsyntax-only"]
        command = [str(COMPILER), *flags, "-fPIC", "-Werror", *how, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
    # Fused multiply-add of whole vectors, without calls of the C library.
    code = assembly.read_text()
    assert len(re.findall(r"\bfmla\s+v\d+\.4s", code)) > 50
    assert not re.search(r"\bbl\s+fmaf\b", code)
