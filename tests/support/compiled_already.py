"""Stands in for a C compiler where the sources are those of this checkout: scripts/setup has compiled its kernels.

It is run as a program, whose first argument is the real compiler. A source is compiled if it and all that it includes
are there, as they are in the checkout; linking all of them gives the checkout's library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "baton/runner/backends/cpu/kernels"
SOURCES = KERNELS / "csrc"


def main(compiler: str, *arguments: str) -> None:
    output = Path(arguments[arguments.index("-o") + 1])
    if "-c" not in arguments:
        linked = {Path(name).stem for name in arguments if name.endswith(".o")}
        assert linked == {path.stem for path in SOURCES.glob("*.c")}, f"not all sources are linked: {linked}"
        shutil.copy(KERNELS / "libkernels.so", output)
        return
    source = arguments[arguments.index("-c") + 1]
    read = subprocess.run([compiler, "-MM", source], capture_output=True, text=True, check=True).stdout
    for name in read.replace("\\\n", " ").split()[1:]:
        assert Path(name).read_bytes() == (SOURCES / Path(name).name).read_bytes(), f"{name} has other text"
    output.touch()


main(*sys.argv[1:])
