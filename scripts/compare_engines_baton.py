"""Measures Baton for scripts/compare_engines: scheduler and runner of one engine. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def measure(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the seconds of each prompt, and of each decode step and its floor by batch size."""
    import baton
    from baton.bench.micro.engine_drive import EngineDrive
    from baton.bench.results.host import last_level_cache
    from baton.runner import TorchSpec, load
    from baton.runner.measuring.limits import bytes_beyond, read_limit

    max_batch, block = max(plan["batches"]), 16
    blocks = max_batch * (-(-plan["context"] // block) + len(plan["batches"]) * (plan["steps"] // block + 3))
    dtype = {"bf16": "bfloat16", "f32": "float32"}[plan["precision"]]
    model = Path(plan["model"])
    weights = None if plan["weights"] == "bf16" else plan["weights"]
    spec = TorchSpec(model, dtype, block, num_blocks=blocks * 9 // 8, num_threads=plan["threads"], quantization=weights)
    runner = load(spec)
    drive = EngineDrive(runner, plan["context"], max_batch)
    prefill = [drive.prefill(prompt) for prompt in plan["prompts"]][1:]
    decode, floors = {}, {}
    with read_limit(plan["threads"], bytes_beyond(last_level_cache())) as memory:
        for batch in plan["batches"]:
            before = memory.rate()
            decode[str(batch)] = drive.decode(plan["prompts"][:batch], plan["steps"])
            context = plan["context"] + 2 + (plan["steps"] - 1) / 2
            num_bytes = runner.model.weight_bytes + batch * context * runner.layout.block_bytes / block
            floors[str(batch)] = num_bytes / max(before, memory.rate())
    settings = {"kernels": runner.model.numerics, "bit_exact": runner.model.bit_exact}
    return {
        "version": baton.__version__,
        "settings": settings,
        "prefill_s": prefill,
        "decode_s": decode,
        "floor_s": floors,
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    if not request.get("prepare_only"):
        print(json.dumps(measure(request)))
