"""Measures Baton for scripts/compare_engines: scheduler and runner of one engine. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def measure(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the seconds of each prompt, and of each decode step by batch size."""
    import baton
    from baton.bench.micro.engine_drive import EngineDrive
    from baton.runner import TorchSpec, load

    max_batch, block = max(plan["batches"]), 16
    blocks = max_batch * (-(-plan["context"] // block) + len(plan["batches"]) * (plan["steps"] // block + 3))
    dtype = {"bf16": "bfloat16", "f32": "float32"}[plan["precision"]]
    model = Path(plan["model"])
    runner = load(TorchSpec(model, dtype, block, num_blocks=blocks * 9 // 8, num_threads=plan["threads"]))
    drive = EngineDrive(runner, plan["context"], max_batch)
    prefill = [drive.prefill(prompt) for prompt in plan["prompts"]][1:]
    decode = {str(batch): drive.decode(plan["prompts"][:batch], plan["steps"]) for batch in plan["batches"]}
    settings = {"kernels": runner.model.numerics, "bit_exact": runner.model.bit_exact}
    return {"version": baton.__version__, "settings": settings, "prefill_s": prefill, "decode_s": decode}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    if not request.get("prepare_only"):
        print(json.dumps(measure(request)))
