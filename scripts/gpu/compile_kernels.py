"""Compiles the GPU kernels for Hopper on a machine without a GPU: `python -m gpu.compile_kernels FILE`.

The kernels are started as on a GPU, by the functions that start them there, so exactly the variants that run there are
compiled; nothing is computed. Writes a JSON line for each kernel, and ends with 1 if one does not compile or computes
its products with other instructions than it should.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cuda.triton_attention import triton_attention
from baton.runner.backends.cuda.triton_norm import triton_norm
from baton.runner.backends.paged_cache import CacheView
from gpu.probes.digest import constants, digests
from gpu.probes.leaves import leaves
from gpu.probes.product import TILES, product

HOPPER = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPERATION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_OF_INTEREST = ("HMMA", "HGMMA", "LDGSTS", "LDL", "STL", "BAR", "SHFL")
Case = tuple[str, Callable[[], object], str | None]
"""A name, what starts kernels, and the matrix instruction that they are to use, if that matters."""


class _NoGpu:
    """Stands for Triton's driver: it names a GPU for which to compile."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    compiled: list[Any] = []
    start = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(start(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(_NoGpu())
    failed = False
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for name, launch, instruction in _cases():
            compiled.clear()
            started = time.monotonic()
            lines: list[dict[str, Any]] = []
            try:
                launch()
                lines = [_describe(kernel) for kernel in compiled]
            except Exception as error:
                lines = [{"error": f"{type(error).__name__}: {error}"}]
            for line in lines:
                wrong = "error" in line or (instruction is not None and instruction not in line["operations"])
                failed |= wrong
                line = {"case": name, **line, "seconds": round(time.monotonic() - started, 1)}
                file.write(json.dumps(line) + "\n")
                print(f"{'FAILED ' if wrong else ''}{line}", flush=True)
    print(f"{sys.argv[1]}: compiled with Triton {triton.__version__} for {HOPPER.arch}")
    sys.exit(1 if failed else 0)


def _cases() -> Iterator[Case]:
    for number, tile in enumerate(TILES):
        x, weight = (torch.empty(rows, 2048, dtype=torch.bfloat16) for rows in (64, 512))
        yield f"probe: product {tuple(tile)}", partial(product, x, weight, tile), "HGMMA" if number else "HMMA"
    for dim in (64, 128):
        plain = AttentionFeatures(dim**-0.5)
        window_and_sinks = AttentionFeatures(dim**-0.5, window=100, sinks=torch.empty(32, dtype=torch.bfloat16))
        for name, rows, sequences, how, sharing in (
            ("prompt", 2048, 1, plain, None),
            ("decode", 8, 8, plain, None),
            ("window and sinks", 8, 8, window_and_sinks, None),
            ("shared blocks", 8, 8, plain, torch.zeros(3, 8, dtype=torch.int32)),
        ):
            yield f"attention, {name}, heads of {dim}", partial(_attend, dim, rows, sequences, how, sharing), None
    for width in (2048, 4096):
        row = torch.empty(8, width, dtype=torch.bfloat16)
        yield f"norm of {width}", partial(triton_norm, row, None, row[0], 1e-6, False), None
        yield f"norm of {width} and sum", partial(triton_norm, row, row, row[0], 1e-6, False), None
    yield "probe: leaves of logits", partial(leaves, torch.empty(2, 128256)), None
    starts = torch.zeros(8, dtype=torch.int64)
    memory, given = torch.zeros(8192, dtype=torch.uint64), constants(torch.device("cpu"))
    yield "probe: digests", partial(digests, memory, starts, 4096, given), None


def _attend(dim: int, rows: int, sequences: int, how: AttentionFeatures, sharing: torch.Tensor | None) -> object:
    heads, kv_heads, block_size, blocks = 32, 8, 16, 128
    half = kv_heads * block_size * dim
    cache = CacheView(
        torch.empty(blocks * 2 * half, dtype=torch.bfloat16), blocks, 2 * half, 0, half, kv_heads, block_size, dim, dim
    )
    call = AttentionCall(
        torch.empty(rows, heads, dim, dtype=torch.bfloat16),
        cache,
        torch.zeros(sequences + 1, dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.int32),
        torch.zeros(sequences, 128, dtype=torch.int32),
        how,
        sharing,
    )
    return triton_attention(call)


def _describe(kernel: Any) -> dict[str, Any]:
    """Registers, bytes of stack (what is spilled lies there), shared memory and instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        operations = Counter(_OPERATION.findall(_run("nvdisasm", "-c", file.name)))
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    return {
        "kernel": kernel.name,
        "warps": kernel.metadata.num_warps,
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": kernel.metadata.shared,
        "operations": {name: operations[name] for name in _OF_INTEREST if operations[name]},
    }


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
