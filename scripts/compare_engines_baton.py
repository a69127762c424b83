"""Measures Baton for scripts/compare_engines: scheduler and runner of one engine. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any


def measure(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the seconds of each prompt, and of each decode step and its floor by batch size."""
    import baton
    from baton.bench.micro.engine_drive import EngineDrive, load_with_room
    from baton.bench.micro.engine_work import cache_bytes_read
    from baton.bench.results.host import last_level_cache
    from baton.runner import TorchSpec, load
    from baton.runner.measuring.limits import bytes_beyond, read_limit

    max_batch = max(plan["batches"])
    dtype = {"bf16": "bfloat16", "f32": "float32"}[plan["precision"]]
    model = Path(plan["model"])
    weights = plan["weights"] if plan["weights"] in ("int8", "int4") else None
    spec = TorchSpec(model, dtype, num_threads=plan["threads"], quantization=weights)

    def num_stripes(block_size: int) -> int:
        per_prompt = -(-plan["context"] // block_size) + len(plan["batches"]) * (plan["steps"] // block_size + 3)
        return int(max_batch * per_prompt * 9 // 8)

    runner = load_with_room(lambda num_blocks: load(replace(spec, num_blocks=num_blocks)), num_stripes)
    drive = EngineDrive(runner, plan["context"], max_batch)
    prefill = [drive.prefill(prompt) for prompt in plan["prompts"]][1:]
    decode, floors = {}, {}
    with read_limit(plan["threads"], bytes_beyond(last_level_cache())) as memory:
        for batch in plan["batches"]:
            before = memory.rate()
            decode[str(batch)] = drive.decode(plan["prompts"][:batch], plan["steps"])
            context = plan["context"] + 2 + (plan["steps"] - 1) / 2
            weights = runner.model.weight_bytes - runner.model.table_bytes
            num_bytes = weights + batch * cache_bytes_read(runner.layout, context)
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
