"""Measures OpenVINO GenAI for scripts/compare_engines: runs in the comparison's venv, prints one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def prepare(model: Path, made: Path, weights: str) -> Path:
    """Converts the weights to OpenVINO's format (fp16, int8, int4), once; returns the directory."""
    target = made / f"openvino-{weights}"
    if not (target / "openvino_model.xml").is_file():
        source = made / "openvino-source"
        source.mkdir(parents=True, exist_ok=True)
        for file in model.iterdir():
            link = source / file.name
            if not link.exists():
                link.symlink_to(file.resolve())
        # The random model has no end-of-sequence token, but the converter needs one. No measurement stops at it.
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "Ġw1000", "pad_token": "Ġw1000"}
        (source / "tokenizer_config.json").write_text(json.dumps(words))
        exporter = Path(sys.executable).with_name("optimum-cli")
        # Without a format of the weights large models are quantised to 8 bits without a message.
        subprocess.run(
            [
                *(str(exporter), "export", "openvino", "--model", str(source), "--weight-format", weights),
                *("--task", "text-generation-with-past", str(target)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return target


def measure(target: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the seconds of each prompt, and of each decode step by batch size."""
    import openvino_genai as genai

    limits = genai.SchedulerConfig()
    limits.max_num_batched_tokens = max(plan["batches"]) * plan["context"]
    limits.max_num_seqs = max(plan["batches"])
    limits.num_kv_blocks = 2 + max(plan["batches"]) * (-(-(plan["context"] + plan["steps"] + 4) // 32) + 1)
    limits.enable_prefix_caching = False
    limits.dynamic_split_fuse = True
    settings = {
        "INFERENCE_NUM_THREADS": plan["threads"],
        "INFERENCE_PRECISION_HINT": plan["precision"],
        "KV_CACHE_PRECISION": plan["kv"],
    }
    pipeline = genai.ContinuousBatchingPipeline(str(target), limits, "CPU", settings)
    run = _Run(genai, pipeline)
    prefill = [run.prefill(prompt) for prompt in plan["prompts"]][1:]
    decode = {str(batch): run.decode(plan["prompts"][:batch], plan["steps"]) for batch in plan["batches"]}
    version = genai.get_version()
    return {"version": version, "settings": settings, "prefill_s": prefill, "decode_s": decode}


class _Run:
    """Drives the pipeline step by step."""

    def __init__(self, genai: Any, pipeline: Any) -> None:
        self._genai, self._pipeline, self._count = genai, pipeline, 0

    def prefill(self, prompt: list[int]) -> float:
        """Computes one prompt and its first token; returns the seconds."""
        handle = self._add(prompt, 1)
        return self._until_idle([handle])[0]

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Decodes all prompts as one batch; returns the seconds of each step that only decodes."""
        handles = [self._add(prompt, steps + 2) for prompt in prompts]
        times = self._until_idle(handles)
        # One step computes all prompts, for which the token budget has room; then each step decodes one token each.
        return times[-steps:]

    def _add(self, prompt: list[int], tokens: int) -> Any:
        import numpy as np
        import openvino as ov

        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        self._count += 1
        return self._pipeline.add_request(self._count, ov.Tensor(np.array([prompt], dtype=np.int64)), config)

    def _until_idle(self, handles: list[Any]) -> list[float]:
        times = []
        while self._pipeline.has_non_finished_requests():
            started = time.perf_counter()
            self._pipeline.step()
            times.append(time.perf_counter() - started)
        for handle in handles:
            handle.read_all()
        return times


if __name__ == "__main__":
    request = json.load(sys.stdin)
    directory = prepare(Path(request["model"]), Path(request["made"]), request["weights"])
    if not request.get("prepare_only"):
        print(json.dumps(measure(directory, request)))
