"""Compiles all GPU kernels for several architectures, and records what they need. Run by scripts/gpu_kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import triton
from generated_parts import keep
from gpu.compile_kernels import KernelCompiler, describe
from gpu.kernel_cases import kernel_cases
from gpu.kernel_record import CAPABILITIES, RECORD, Need, digest_of_sources, parse, render


def main(argv: Sequence[str]) -> int:
    """Writes the record; with `--check` compares it, or the given cases of it. Returns 1 if it is outdated."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_kernels", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare, and fail on a difference")
    parser.add_argument("--case", action="append", help="with --check: only these cases")
    options = parser.parse_args(argv)
    needs = compiled_needs(options.case)
    if options.case:
        recorded = [need for need in parse(RECORD.read_text(encoding="utf-8"))[1] if need.case in options.case]
        for need in sorted({*needs} ^ {*recorded}):
            print(f"scripts/gpu_kernels: {'compiled' if need in needs else 'recorded'}: {need}", file=sys.stderr)
        return int(needs != recorded)
    return keep(RECORD, render(needs, triton.__version__, digest_of_sources()), only_compare=options.check)


def compiled_needs(only: Sequence[str] | None = None) -> list[Need]:
    """What every kernel needs on every architecture; `only`: those of some cases."""
    compiler = KernelCompiler()
    needs = []
    for name, launch, _, least_capability in kernel_cases():
        if only is not None and name not in only:
            continue
        for capability in (known for known in CAPABILITIES if known >= least_capability):
            for kernel in map(describe, compiler.compile(launch, capability)):
                numbers = (kernel[key] for key in ("registers", "stack_bytes", "shared_bytes", "warps"))
                needs.append(Need.of((capability, *numbers), kernel["kernel"], name))
    return needs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
