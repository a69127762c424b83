"""Compiles the GPU kernels on a machine without a GPU, by the functions that start them on one: so exactly the variants
that run there are compiled, and nothing is computed.

`python -m gpu.compile_kernels FILE` compiles for Hopper with whatever release of Triton there is, and writes a JSON
line for each kernel. It ends with 1 if one does not compile or multiplies with other instructions than it should.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from gpu.kernel_cases import kernel_cases

HOPPER = 90
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPERATION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_OF_INTEREST = ("HMMA", "HGMMA", "LDGSTS", "LDL", "STL", "BAR", "SHFL")


class KernelCompiler:
    """Compiles in place of starting, in this whole process, which can start no kernel afterwards.

    Also stands for Triton's driver: it names a GPU for which to compile.
    """

    def __init__(self) -> None:
        self._capability = HOPPER
        self._compiled: list[Any] = []
        start, compiled = JITFunction.run, self._compiled

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            compiled.append(start(kernel, *args, grid=grid, warmup=True, **kwargs))

        JITFunction.run = compile_only
        triton.runtime.driver.set_active(self)

    def compile(self, launch: Callable[[], object], capability: int = HOPPER) -> list[Any]:
        """The kernels that a function starts, compiled for a compute capability (9.0 is 90)."""
        self._capability = capability
        self._compiled.clear()
        launch()
        return list(self._compiled)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device, so that each capability is a device of its own.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    compiler, failed = KernelCompiler(), False
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for name, launch, instruction, _ in kernel_cases():
            started = time.monotonic()
            lines: list[dict[str, Any]] = []
            try:
                lines = [{**describe(kernel), "operations": _operations(kernel)} for kernel in compiler.compile(launch)]
            except Exception as error:
                lines = [{"error": f"{type(error).__name__}: {error}"}]
            for line in lines:
                wrong = "error" in line or (instruction is not None and instruction not in line["operations"])
                failed |= wrong
                line = {"case": name, **line, "seconds": round(time.monotonic() - started, 1)}
                file.write(json.dumps(line) + "\n")
                print(f"{'FAILED ' if wrong else ''}{line}", flush=True)
    print(f"{sys.argv[1]}: compiled with Triton {triton.__version__} for {HOPPER}")
    sys.exit(1 if failed else 0)


def describe(kernel: Any) -> dict[str, Any]:
    """Name, warps, registers, bytes of stack (what is spilled lies there) and shared memory of a compiled kernel."""
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", _of_cubin(kernel, "cuobjdump", "-res-usage"))[0])
    return {
        "kernel": kernel.name,
        "warps": kernel.metadata.num_warps,
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": kernel.metadata.shared,
    }


def _operations(kernel: Any) -> dict[str, int]:
    counts = Counter(_OPERATION.findall(_of_cubin(kernel, "nvdisasm", "-c")))
    return {name: counts[name] for name in _OF_INTEREST if counts[name]}


def _of_cubin(kernel: Any, tool: str, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / tool), *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
