"""Measures a model of every listed type against the limits of this machine's memory and arithmetic.

The models are those of the tests with widths as people run them: two to four layers of each kind, and 200 to 1,500
million parameters. STEP / FLOOR is a decode step's time divided by that of reading its weights, keys, values and states
once; PROMPT is the rate of the products of a prompt's rows with weights, as a share of the machine's product rate, and
WITH ATTENTION the same with the products of attention. `baton bench engine` measures the same of one model. Each type
is measured in a process of its own; run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from baton.bench.micro.engine import EngineBenchConfig, run  # noqa: E402
from baton.bench.results.host import processor, usable_cores  # noqa: E402
from tests.support.listed_types import LISTED_TYPES  # noqa: E402

BATCHES = (1, 8)
TIMES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 125),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim", "dim_model_base"), 32),
    **dict.fromkeys(("mamba_d_ssm", "hidden_size_per_layer_input", "mamba_dt_rank", "time_step_rank"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "adapter_rank", "laurel_rank"), 8),
    **dict.fromkeys(("index_topk", "sliding_window", "attention_chunk_size", "floor_scale"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 8),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 4),
}
"""How many times as large a number is as in the tests."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def widened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of the tests with larger numbers."""
    config: dict[str, Any] = {
        name: value * TIMES.get(name, 1) if type(value) is int else value for name, value in fields.items()
    }
    if "num_attention_heads_per_layer" in config:
        config["num_attention_heads_per_layer"] = [4 * heads for heads in config["num_attention_heads_per_layer"]]
    if config["model_type"] == "mamba2":
        config["head_dim"] //= 2  # its heads are twice as wide as the rows
    if config["model_type"] in ("mamba", "falcon_mamba", "jamba"):
        config.update({name: 16 for name in ("state_size", "mamba_d_state") if name in config})
    few_experts = [name for name in EXPERTS if config.get(name) == 4]
    config.update(dict.fromkeys(few_experts, 8))
    if few_experts and "moe_intermediate_size" not in config and "intermediate_size" in config:
        config["intermediate_size"] //= 4  # it is that of an expert
    return {**config, "initializer_range": 0.02}


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """The figures of one type."""
    from baton.runner.model.random_model import write_random_model

    with tempfile.TemporaryDirectory(prefix="baton-type-") as folder:
        write_random_model(Path(folder), widened(LISTED_TYPES[name]), seed=0, dtype="bfloat16")
        report = run(
            EngineBenchConfig(
                Path(folder),
                name,
                "bfloat16",
                context_tokens=options.context_tokens,
                steps=options.steps,
                batches=BATCHES,
                threads=options.threads,
                alone=True,
            )
        )
    return {
        "type": name,
        "weight_mb": report.weight_bytes / 1e6,
        "step_by_floor": [figures.step_by_floor for figures in report.decode],
        "prompt": report.prefill_share_of_product_rate,
        "with_attention": report.prefill_share_with_attention,
        "split": [
            [
                split.step,
                split.attention_ms,
                split.products_ms,
                split.elementwise_ms,
                split.sampling_ms,
                split.python_ms,
            ]
            for split in report.time_split
        ],
    }


def main() -> int:
    """Measures the types that are named, by turns."""
    parser = argparse.ArgumentParser(prog="scripts/type_speed", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    parser.add_argument("--context-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=18, help="decode steps of each batch, in six rounds")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--split", action="store_true", help="also show where the time goes, in milliseconds")
    parser.add_argument("--json", action="store_true", help="measure one type here, and print its figures as JSON")
    options = parser.parse_args()
    unknown = [name for name in options.types if name not in LISTED_TYPES]
    if unknown:
        parser.error(f"no listed type: {', '.join(unknown)}; docs/models.md lists them")
    if options.json:
        print(json.dumps(measure(options, options.types[0])))
        return 0
    print(f"{options.context_tokens} tokens, {options.threads} threads of {processor()}\n")
    print(f"{'TYPE':18}  WEIGHTS  {'STEP / FLOOR x 1':>16}  {'x 8':>5}  PROMPT  WITH ATTENTION")
    failed = 0
    for name in options.types or sorted(LISTED_TYPES):
        done = subprocess.run(
            [sys.executable, __file__, "--json", name, *_flags(options)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            check=False,
        )
        if done.returncode:
            failed += 1
            lines = done.stderr.strip().splitlines()
            print(f"{name:18}  failed: {lines[-1][:200] if lines else done.returncode}", flush=True)
        else:
            _show(json.loads(done.stdout), split=options.split)
    return min(failed, 1)


def _flags(options: argparse.Namespace) -> list[str]:
    return [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in ("context_tokens", "steps", "threads")]


def _show(figures: Mapping[str, Any], *, split: bool) -> None:
    one, eight = figures["step_by_floor"]
    print(
        f"{figures['type']:18}  {figures['weight_mb']:4.0f} MB  {one:16.2f}  {eight:5.2f}  {figures['prompt']:6.2f}  "
        f"{figures['with_attention']:14.2f}",
        flush=True,
    )
    for step, *parts in figures["split"] if split else ():
        names = ("attention", "products", "elementwise", "sampling", "rest")
        print(f"    {step}: {', '.join(f'{name} {ms:.2f}' for name, ms in zip(names, parts, strict=True))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
